"""Commands whose tables all lie on the host do without jax."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli import TWO_TABLES, frame, started
from ipc import write
from limits import until
from services import Process

from penstock.serving.flight import connect

CONFIG = TWO_TABLES
CODE = """
import json, sys
from penstock.cli import main

for words in json.loads(sys.argv[1]):
    code = main(words)
    assert code == 0, (words, code)
    assert not [name for name in sys.modules if name.startswith("jax")], words
"""


@pytest.fixture
def run(tmp_path, config):
    """run(commands…): runs them in one process without jax, in a folder with a log, a configuration, and placed ones"""
    batches = [frame(step, table=["user", "item", "user", "item"], worker=step) for step in range(6)]
    for name, part in (("log.arrows", batches), ("begin.arrows", batches[:3])):
        write(tmp_path / name, part)
    for placement, settings in (("HOST", ""), ("CACHED", "device_bytes: 200")):
        text = f"tpu_embedding_configuration {{ {config.read_text()} }}\n"
        text += f'table {{ name: "user" placement {{ where: {placement} {settings} }} }}\n'
        (tmp_path / f"{placement.lower()}.pbtxt").write_text(text)

    def run(*commands):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PENSTOCK_"))}
        command = [sys.executable, "-c", CODE, json.dumps([words.split() for words in commands])]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line)["state_hash"] for line in done.stdout.splitlines() if '"state_hash"' in line]

    return run


def test_a_replay_does_without_jax_whatever_its_flags(run):
    log = "replay tables.pbtxt log.arrows --json"
    hashes = run(
        log,
        f"{log} --devices 4",
        f"{log} --out out",
        f"{log} --checkpoint whole --every 2 --deltas deltas.arrows",
        "replay tables.pbtxt begin.arrows --checkpoint resumed --every 1",
        "replay tables.pbtxt log.arrows --checkpoint resumed --resume --json --devices 3",
        "passes tables.pbtxt log.arrows --json --passes 2 --out passed",
        "replay host.pbtxt log.arrows --json",
        "replay cached.pbtxt log.arrows --json",
    )
    assert len(hashes) == 8
    assert len(set(hashes)) == 1


def test_the_other_commands_do_without_jax(run):
    run(
        "replay tables.pbtxt log.arrows --checkpoint a",
        "replay tables.pbtxt log.arrows --checkpoint b",
        "validate tables.pbtxt log.arrows",
        "plan cached.pbtxt log.arrows",
        "inspect log.arrows",
        "inspect a",
        "diff a b",
        "export a exported --format parquet",
        "tag a good",
        "log a",
        "diff a a@good",
        "history a --table user --id 1",
        "blame tables.pbtxt log.arrows --table user --id 1",
        "branch a@good c",
        "rollback a --to good",
        "synth synthetic.arrows --rows 100 --vocabulary 50 --dim 2",
        "demo --dir demo",
        "doctor",
    )


ENGINE = """
import sys
import numpy as np
import penstock as ps
from penstock.contrib.pages.metrics import Metrics

table = ps.TableConfig(10, 2, ps.Constant(1.0), ps.SGD(1.0), combiner="sum", name="t")
config = ps.EmbeddingConfig.from_features({"f": ps.FeatureConfig(table)}, batch_size=1)
engine = ps.Engine(config)
activations, data = engine.recv_activations({"f": [[3]]})
engine.send_gradients({"f": np.ones((1, 2), np.float32)}, deduplication_data=data)
engine.save("saved")
restored = ps.Engine.restore("saved")
restored.flush(), restored.wait() if hasattr(restored, "wait") else None
assert list(restored.stage([], table="t")) == [] and Metrics(restored).plain()["penstock_compiles_total"] == 0
restored.load_parameters("t", restored.retrieve_parameters("t")["parameters"])
assert restored.state_hash() == engine.state_hash() and restored.warmup() == 0
print("jax" in sys.modules, engine.lookup("t", [3]).tolist())
rows = engine.table("t")
print("jax" in sys.modules, type(rows).__name__, rows[3].tolist())
"""


def test_an_engine_loads_jax_for_an_array_of_jax_and_for_nothing_before(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PENSTOCK_"))}
    command = [sys.executable, "-c", ENGINE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["False [[0.0, 0.0]]", "True ArrayImpl [0.0, 0.0]"], done.stderr


def test_a_service_and_its_follower_do_without_jax(config, tmp_path):
    with Process(config, "--listen", "grpc://127.0.0.1:0", "--checkpoint", tmp_path / "c") as service:
        with connect(service.uri) as client, client.producer("trainer") as producer:
            producer.send(frame(table=["user", "item", "user", "item"]))
        follower = started("follow", service.uri, "--into", f"parquet:{tmp_path}/rows")
        until(lambda: list((tmp_path / "rows").rglob("*.parquet")))
        for process in (service.process, follower):
            libraries = Path(f"/proc/{process.pid}/maps").read_text()
            assert "jaxlib" not in libraries
            assert "pyarrow" in libraries
        follower.terminate()
        follower.communicate()
        service.end(signal.SIGTERM)
