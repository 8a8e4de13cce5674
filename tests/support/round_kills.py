"""Kills of a service, of its workers, and of both, in rounds: the tables are those of a replay of the workers' logs.

    python tests/support/round_kills.py --cases 300 --seed 1
    python tests/support/round_kills.py --only 17

Every case has two to four workers, whose frames depend on no row. A worker that is started again continues after the
frames of it that are durable. Prints a line per case, and ends with 1 if the hash of one differs from the replay's.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.io.flight import connect

LIMIT_S = 120.0
DIM, ROWS = 2, 50
SCHEMA = pa.schema([("step", pa.int64()), ("id", pa.int64()), ("gradient", pa.list_(pa.float32(), DIM))])


def frames_of(case, worker, count):
    """Yield step, batch of the frames of a worker: some steps have no frame of it, and some frames no rows."""
    for step in range(count):
        rng = np.random.default_rng([case, worker, step])
        if worker and rng.random() < 0.1 and step < count - 1:
            continue
        num = 0 if rng.random() < 0.15 else int(rng.integers(1, 40))
        gradients = pa.array(rng.standard_normal(num * DIM).astype(np.float32))
        columns = [
            pa.array(np.full(num, step)),
            pa.array(rng.integers(0, ROWS, num)),
            pa.FixedSizeListArray.from_arrays(gradients, DIM),
        ]
        yield step, pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def work(uri, case, worker, count):
    """Send the frames of a worker, from the one after those that are durable."""
    pause = np.random.default_rng([case, worker])
    with connect(uri, patience_s=LIMIT_S) as client, client.producer(f"rank-{worker}") as producer:
        for number, (step, batch) in enumerate(frames_of(case, worker, count), 1):
            if number > producer.last:
                producer.send(batch, step=None if batch.num_rows else step)
                if pause.random() < 0.3:
                    time.sleep(pause.random() * 0.05)


def replayed(folder, case, workers, count):
    """Return the state hash of a replay of the workers' logs."""
    for worker in range(workers):
        with pa.ipc.new_stream(folder / f"{worker}.arrows", SCHEMA) as log:
            for step, batch in frames_of(case, worker, count):
                log.write_batch(batch, custom_metadata={"penstock.end": "", "penstock.step": str(step)})
    engine = ps.Engine(ps.EmbeddingConfig.load(folder / "tables.pbtxt"), workers=workers)
    report = engine.run([folder / f"{worker}.arrows" for worker in range(workers)])
    assert (report.steps, report.stale, report.pending) == (count, 0, 0), report
    return engine.state_hash()


class Job:
    """The processes of a case."""

    def __init__(self, folder, case, workers, count, port):
        self.folder, self.case, self.count, self.port = folder, case, count, port
        self.uri = f"grpc://127.0.0.1:{port}"
        self.num_workers = workers
        self.service = self.start_service()
        self.workers = [self.start_worker(worker) for worker in range(workers)]

    def start_service(self):
        words = ["serve", self.folder / "tables.pbtxt", "--workers", self.num_workers, "--listen", self.uri, "--json"]
        words += ["--checkpoint", self.folder / "state", "--resume", "--every", 1 + self.case % 3, "--grace", 1]
        return self.start("service.log", "-m", "penstock", *words)

    def start_worker(self, worker):
        return self.start("workers.log", __file__, "--work", self.uri, self.case, worker, self.count)

    def start(self, log, *words):
        with open(self.folder / log, "ab") as errors:
            return subprocess.Popen([sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=errors)

    def kill(self, process):
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def end(self):
        """Return what the service says at its end, once all workers have ended."""
        end_s = time.monotonic() + LIMIT_S
        for process in self.workers:
            if process.wait(max(0.1, end_s - time.monotonic())):
                raise RuntimeError(f"a worker ended with {process.returncode}")
        with connect(self.uri, patience_s=LIMIT_S) as client:
            client.status()  # a service that has only just been started would end by the signal without a word
        self.service.send_signal(signal.SIGTERM)
        out, _ = self.service.communicate(timeout=LIMIT_S)
        return json.loads(out.decode().splitlines()[-1])

    def close(self):
        for process in [*self.workers, self.service]:
            if process.poll() is None:
                self.kill(process)
            process.stdout.close()


def run_case(case, port):
    """Run a case. Returns a text, and whether it failed."""
    chance = random.Random(case)
    workers, count, kills = chance.randint(2, 4), chance.randint(20, 60), chance.randint(1, 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = ps.TableConfig(ROWS, DIM, optimizer=ps.Adagrad(0.1), name="user")
        (folder / "tables.pbtxt").write_text(str(ps.EmbeddingConfig.from_tables([table]).to_engine_proto()))
        expected, killed = replayed(folder, case, workers, count), []
        job = Job(folder, case, workers, count, port)
        try:
            for _ in range(kills):
                time.sleep(chance.random() * 1.5)
                whom = chance.choice(["service", "worker", "both", "twice"])
                killed.append(whom)
                worker = chance.randrange(workers)
                if whom != "worker":
                    job.kill(job.service)
                if whom in ("worker", "both"):
                    job.kill(job.workers[worker])
                    job.workers[worker] = job.start_worker(worker)
                if whom != "worker":
                    job.service = job.start_service()
                if whom == "twice":
                    time.sleep(chance.random())
                    job.kill(job.service)
                    job.service = job.start_service()
            status = job.end()
            good = status.get("state_hash") == expected and status["global_step"] == count
            text = f"{status.get('global_step')} of {count} steps, hash {'equal' if good else 'DIFFERS'}"
        except (RuntimeError, subprocess.TimeoutExpired, ValueError, IndexError, KeyError) as error:
            logs = [(folder / f"{each}.log").read_text()[-1500:] for each in ("service", "workers")]
            good, text = False, f"FAILED: {type(error).__name__}: {error}\n" + "\n".join(logs)
        finally:
            job.close()
    return f"{case}: {workers} workers, {count} steps, killed {', '.join(killed)}: {text}", not good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--work", nargs=4)
    args = parser.parse_args()
    if args.work:
        uri, *numbers = args.work
        work(uri, *map(int, numbers))
        return 0
    cases = [args.only] if args.only is not None else range(args.seed, args.seed + args.cases)
    failed = 0
    for case in cases:
        text, is_bad = run_case(case, free_port())
        print(text, flush=True)
        failed += is_bad
    print(f"{len(cases)} cases, {failed} failed")
    return int(failed > 0)


def free_port():
    """A port that nothing listens at."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main())
