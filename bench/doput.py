"""DoPut: a step pushed over loopback into ``penstock serve``, a separate process on the same CPUs.

It takes turns with ``Replay`` of the same steps: the difference is the network, two processes and bookkeeping.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from penstock.bench.distributions import Int64
from penstock.bench.penstock_adapter import Ours, config_of
from penstock.bench.workloads import Float32, Step, Workload
from penstock.io.flight import connect

SERVE = [sys.executable, "-m", "penstock", "serve"]
ENDS_WITHIN_S = 10


class DoPut(Ours):
    """A producer that pushes steps as one frame each, and waits until all are applied (the last acknowledgement).

    The service ends with this object.
    """

    def __init__(self, workload: Workload, steps: Sequence[Step], threads: int, folder: Path) -> None:
        self._steps = steps
        config = folder / "tables.pbtxt"
        config_of(workload, "adagrad").save(config)
        command = [*SERVE, str(config), "--threads", str(threads), "--no-hash"]
        said = folder / "serve.txt"
        with said.open("w") as errors:
            service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        weakref.finalize(self, _end, service)
        self._client = connect(_address(service, said))

    def run(self, steps: Sequence[int]) -> None:
        self._client.put((self._steps[number].batches for number in steps), "bench")

    def seen(self, table: str, ids: Int64) -> Float32:
        return self._client.rows(table, ids)


def _address(service: subprocess.Popen[str], said: Path) -> str:
    """Return the service's address from its first line. Raises RuntimeError with its last line if it does not start."""
    assert service.stdout is not None
    words = service.stdout.readline().split()
    if len(words) > 1:
        return words[1].rstrip(",")
    service.wait()
    raise RuntimeError("penstock serve: " + (said.read_text().strip().splitlines() or ["no output"])[-1])


def _end(service: subprocess.Popen[str]) -> None:
    service.terminate()
    try:
        service.communicate(timeout=ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        service.kill()
        service.communicate()
