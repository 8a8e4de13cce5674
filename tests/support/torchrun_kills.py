"""Kills of torchrun jobs of two ranks in rounds: tables and dense part end as those of an unbroken job.

    python tests/support/torchrun_kills.py service 20
    python tests/support/torchrun_kills.py rank 20
    python tests/support/torchrun_kills.py all 10

A service is started again with --resume. A rank that is killed ends the job, which is started again from outside, as
within torchrun gloo's own rendezvous may fail. ``all``: the service and the job. Each job is killed once or twice.
Prints a line per job, and ends with 1 if one differs, fails, or waits beyond its limit.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from round_kills import free_port

import penstock as ps
from penstock.io.flight import connect

STEPS, LIMIT_S, SECONDS_OF_A_STEP = 40, 150.0, 0.02
TRAINER = f"""
import os
import time
import torch
import torch.distributed as distributed
import penstock.torch as pt

distributed.init_process_group("gloo")
rank = distributed.get_rank()
with open(f"pid-{{rank}}.part", "w") as out:
    out.write(str(os.getpid()))
os.rename(f"pid-{{rank}}.part", f"pid-{{rank}}")
torch.manual_seed(0)
bag = pt.EmbeddingBag(1000, 8, mode="sum", store=pt.store(os.environ["SERVICE"], patience_s={LIMIT_S}))
dense = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
opt = pt.Step(bag, torch.optim.Adagrad(dense.parameters(), lr=0.01))
first = 0
if os.path.exists("model.pt"):
    state = torch.load("model.pt", weights_only=True)
    dense.load_state_dict(state["dense"])
    opt.load_state_dict(state["opt"])
    first = state["next"]
distributed.barrier()  # all have looked for it before the first rank saves one
for number in range(first, {STEPS}):
    if rank == 0 and number % 5 == 0:
        torch.save({{"dense": dense.state_dict(), "opt": opt.state_dict(), "next": number}}, "model.part")
        os.rename("model.part", "model.pt")
    random = torch.Generator().manual_seed(1000 * number + rank)
    ids = torch.randint(1000, (16, 4), generator=random)
    opt.zero_grad()
    (dense(bag(ids)) ** 2).mean().backward()
    opt.step()
    time.sleep({SECONDS_OF_A_STEP})
if rank == 0:
    torch.save(dense.state_dict(), "final.pt")
bag.store.close()
distributed.destroy_process_group()
"""


class Job:
    """A service and the ranks that torchrun started."""

    def __init__(self, folder):
        self.folder, self.uri = folder, f"grpc://127.0.0.1:{free_port()}"
        tables = [ps.TableConfig(1000, 8, name="user")]
        ps.EmbeddingConfig.from_tables(tables, optimizer=ps.Adagrad(0.1)).save(folder / "tables.pbtxt")
        (folder / "trainer.py").write_text(TRAINER)
        self.start_service()
        self.start_ranks()

    def start_service(self):
        words = ["serve", "tables.pbtxt", "--workers", "2", "--reduction", "sum", "--checkpoint", "state"]
        words += ["--every", "7", "--resume", "--listen", self.uri]
        self.service = self.start("service.log", "penstock", *words)

    def start_ranks(self):
        for each in self.folder.glob("pid-*"):
            each.unlink()
        words = ["--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.2", "trainer.py"]
        self.ranks = self.start("ranks.log", "torch.distributed.run", *words)

    def start(self, log, *words):
        environment = {**os.environ, "SERVICE": self.uri, "OMP_NUM_THREADS": "1"}
        with open(self.folder / log, "ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", *words], cwd=self.folder, env=environment, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def wait_for(self, step, num_ranks=0):
        """Wait until a step is applied and so many ranks run, or the job has ended. Raises TimeoutError."""
        end_s = time.monotonic() + LIMIT_S
        with connect(self.uri, patience_s=LIMIT_S) as client:
            while client.status()["global_step"] < step or len(self.pids()) < num_ranks:
                if time.monotonic() > end_s:
                    raise TimeoutError(f"step {step}: {client.explain()}")
                if self.ranks.poll() is not None:
                    return
                time.sleep(0.005)

    def pids(self):
        return [int(each.read_text()) for each in sorted(self.folder.glob("pid-[01]"))]

    def kill(self, kind, chance):
        if kind != "rank":
            kill(self.service)
        if kind == "rank":
            os.kill(chance.choice(self.pids()), signal.SIGKILL)
            self.ranks.wait(timeout=LIMIT_S)
        elif kind == "all":
            self.kill_ranks()
        if kind != "rank":
            self.start_service()
        if kind != "service":
            self.start_ranks()

    def kill_ranks(self):
        kill(self.ranks)
        for pid in self.pids():  # they are in sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self):
        """Return the rows, slots and dense parameters at the end."""
        if code := self.ranks.wait(timeout=LIMIT_S):
            raise RuntimeError(f"the ranks ended with {code}")
        self.service.terminate()
        self.service.wait(timeout=LIMIT_S)
        engine = ps.Engine.restore(self.folder / "state")
        if engine.gate.num_accumulated:
            raise RuntimeError(f"{engine.gate.num_accumulated} frames wait in the gate")
        dense = torch.load(self.folder / "final.pt", weights_only=True)
        parts = [engine.retrieve_parameters("user"), {name: tensor.numpy() for name, tensor in dense.items()}]
        return [(name, array.tobytes()) for part in parts for name, array in sorted(part.items())]

    def close(self):
        kill(self.service)
        if self.ranks.poll() is None:
            self.kill_ranks()


def kill(process):
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(number, kind, kills, expected):
    """Run a job that is killed so often. Returns how it ended, and whether as it should."""
    chance = random.Random(f"{kind} {number}")
    folder = Path(tempfile.mkdtemp(prefix="torchrun-kills-"))
    job, steps = Job(folder), sorted(chance.randrange(STEPS - 5) for _ in range(kills))
    try:
        for step in steps:
            job.wait_for(step, num_ranks=2 if kind == "rank" else 0)
            time.sleep(chance.random() * 0.1)
            if job.ranks.poll() is not None:
                raise RuntimeError("the ranks ended before they were killed")
            job.kill(kind, chance)
        good = job.end() == expected
        text = "equal" if good else "DIFFERS"
    except (RuntimeError, OSError, subprocess.TimeoutExpired, ps.PenstockError) as error:
        good, text = False, f"FAILED: {type(error).__name__}: {error}"
    finally:
        job.close()
    if good:
        shutil.rmtree(folder)
    else:
        text += f"; its files: {folder}"
    return f"{number}: {kind} killed at steps {steps}: {text}", good


def main(kind, kills):
    if kind not in ("service", "rank", "all"):
        raise SystemExit(f"expected service, rank or all, got {kind}")
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name))
        try:
            expected = job.end()
        finally:
            job.close()
    left, number, failed = int(kills), 0, 0
    while left:
        number += 1
        now = min(2, left)
        text, good = run(number, kind, now, expected)
        print(text, flush=True)
        left, failed = left - now, failed + (not good)
    print(f"{kind}: {kills} kills in {number} jobs, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(*sys.argv[1:]))
