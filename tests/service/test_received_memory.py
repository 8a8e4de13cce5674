"""A service keeps the memory of the frames that it has received."""

import platform
import subprocess
import sys

import pytest
from limits import HANG_S

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")

# Page faults of the second of two blocks, each smaller than a huge page: the memory of the first is used again, or not.
FAULTS = """
import ctypes, resource, sys
from penstock.service.received_memory import keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(1 << 20)
    ctypes.memset(block, 1, 1 << 20)
    libc.free(block)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def faults(**environment):
    env = {"PATH": "/usr/bin:/bin", "GLIBC_TUNABLES": "", **environment}
    env = {name: value for name, value in env.items() if value}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    return int(done.stdout)


def test_memory_that_was_freed_is_used_again():
    assert faults() < 4


def test_a_setting_of_the_environment_takes_precedence():
    # Blocks from 64 kB on are mapped, and unmapped when they are freed.
    assert faults(MALLOC_MMAP_THRESHOLD_="65536") > 4
