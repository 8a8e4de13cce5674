"""Commands in a process of their own, below limits of the system."""

import os
import subprocess
import sys

LIMITED = """
import os, resource, signal, sys
resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
os.execv(sys.executable, [sys.executable, "-m", "penstock", *sys.argv[3:]])
"""


def below(limit, *words, file_bytes=0):
    """A command below a limit of all private memory, also of what allocators reserve. Pages of files are not in it.

    file_bytes : limit of the size of a file; 0: none
    """
    return subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, (limit, file_bytes, *words))],
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
