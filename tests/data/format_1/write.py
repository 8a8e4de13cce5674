"""Write this folder anew: what an interrupted replay, a service and its follower leave, in the formats of number 1.

The folder was written once, by the code before the first release, and is never rewritten: later versions must read it.
A format of another number gets a folder of its own. Run it in an empty folder, with penstock on the path.
"""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.io.log import LogWriter
from penstock.serving.flight import connect

DIM, ITEMS, KEYS, FRAMES, DONE = 4, 30, 24, 26, 19
PENSTOCK = (sys.executable, "-m", "penstock")


def config():
    dynamic = ps.Dynamic(min_count=2, expire_after=6, evict="lru", key_type="uint64")
    tables = [
        ps.TableConfig(ITEMS, DIM, name="item", optimizer=ps.Adagrad(0.1)),
        ps.TableConfig(KEYS, DIM, name="user", optimizer=ps.Adam(0.1), dynamic=dynamic),
    ]
    return ps.EmbeddingConfig.from_tables(tables)


def frames():
    """Return frames of both tables. The last id of every tenth frame is out of range."""
    rng = np.random.default_rng(1)
    for number in range(FRAMES):
        items = rng.integers(0, ITEMS, 5).astype(np.uint64)
        items[-1] += np.uint64(ITEMS if number % 10 == 9 else 0)
        keys = (rng.integers(number // 2, number // 2 + 20, 8).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        gradients = rng.standard_normal((13, DIM)).astype(np.float32)
        yield pa.record_batch(
            {
                "table": pa.array(["item"] * 5 + ["user"] * 8).dictionary_encode(),
                "step": pa.array(np.full(13, number)),
                "id": pa.array(np.concatenate([items, keys])),
                "gradient": pa.FixedSizeListArray.from_arrays(pa.array(gradients.reshape(-1)), DIM),
            }
        )


def run(*words):
    done = subprocess.run([*PENSTOCK, *map(str, words), "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def replay(commits, *more):
    flags = ("--num-required", 3, "--on-bad-row", f"quarantine={commits}.bad.arrows")
    saving = ("--checkpoint", commits, "--every", 2, "--deltas", f"{commits}.deltas.arrows")
    return run("replay", "tables.pbtxt", "log.arrows", *flags, *saving, *more)


def state(commits):
    engine = ps.Engine.restore(commits)
    return {"step": engine.global_step, "pending": engine.gate.num_accumulated, "hash": engine.state_hash()}


def serve_and_follow(commits, batches):
    words = (
        "serve",
        "tables.pbtxt",
        "--listen",
        "grpc://127.0.0.1:0",
        "--checkpoint",
        commits,
        "--every",
        4,
        "--resume",
    )
    words = (*words, "--on-bad-row", "drop", "--json")
    with subprocess.Popen([*PENSTOCK, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as service:
        address = service.stderr.readline().decode().split()[1].rstrip(",")
        with connect(address) as client:
            client.put(batches, "worker", first=1)
        followed = run("follow", address, "--into", "parquet:rows", "--once")
        service.send_signal(signal.SIGTERM)
        service.communicate()
    return followed


def main():
    config().save("tables.pbtxt")
    batches = list(frames())
    with LogWriter("log.arrows", batches[0].schema) as log:
        for batch in batches:
            log.write(batch)
    replay("replay", "--limit", DONE)
    run("tag", "replay", "half")
    expected = {"replay": state("replay")}
    expected["replay"]["resumed"] = replay("whole")["state_hash"]
    shutil.rmtree("whole")
    for path in Path().glob("whole.*"):
        path.unlink()
    serve_and_follow("service", batches[:DONE])
    for path in Path().rglob(".lock"):  # it names a process and a machine
        path.unlink()
    expected["service"] = state("service")
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
