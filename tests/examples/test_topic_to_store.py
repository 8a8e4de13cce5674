"""examples/topic_to_store.py from end to end: a broker, a service, a follower and a store, each killed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from brokers import server_path
from limits import HANG_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "topic_to_store.py"


@pytest.mark.evidence
@pytest.mark.promise("A store equals the tables whichever part on the way to it is killed")
def test_the_store_equals_the_tables_after_kills_of_every_part():
    pytest.importorskip("nats")
    pytest.importorskip("redis")
    folders = [str(Path(server_path(name)).parent) for name in ("nats-server", "redis-server")]
    environment = {**os.environ, "PATH": ":".join([os.environ["PATH"], *folders])}
    # The first ten draws of this seed contain every part.
    words = [sys.executable, EXAMPLE, "--kills", "10", "--seed", "0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, frames, verdict = done.stdout.splitlines()
    assert min(map(int, re.findall("([0-9]+) of the", kills))) > 0
    frames, step = map(int, re.match("([0-9]+) frames .* step ([0-9]+);", frames).groups())
    assert frames == step > 10
    assert verdict == "the store equals the tables"
