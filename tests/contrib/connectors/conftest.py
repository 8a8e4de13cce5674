"""What the tests of brokers share: a NATS server, and the configuration of the frames."""

import pytest
from brokers import Nats
from services import config_of


@pytest.fixture
def nats(tmp_path):
    with Nats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
def config(tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    return tmp_path / "tables.pbtxt"
