"""Cached tables: the bits of tables on the devices, whatever the size of the cache, in runs, passes and checkpoints."""

import cached
import numpy as np
import pytest
from deltas import bytes_of
from ipc import log

import penstock as ps

ONE_STEP = 80  # rows: no step has more distinct ids of a table
LOG, SHORT = cached.log_of(), cached.log_of(steps=3, rows=5)  # the latter for a cache of one row
SIZES = {"one row": 1, "one step": ONE_STEP, "a tenth": 0.1, "half": 0.5, "all": 1.0}


@pytest.fixture(scope="module")
def of_device(mesh_of):
    """of_device(variant, log): hash and deltas of the tables on the devices, once per variant and log."""
    found = {}

    def run(variant, batches):
        if (variant, len(batches)) not in found:
            engine = ps.Engine(cached.config_of(), mesh_of(3))
            deltas = bytes_of(engine.stage(batches, slots=True, flush=True))
            found[variant, len(batches)] = engine.state_hash(), deltas
        return found[variant, len(batches)]

    return run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", ["ffi", "xla", "pallas"])
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_a_cache_changes_no_bit_of_tables_and_deltas(variant, devices, size, of_device, mesh_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    batches = SHORT if size == "one row" else LOG
    wanted_hash, wanted = of_device(variant, batches)
    config = cached.config_of(cached.cached(SIZES[size]))
    engine = ps.Engine(config, mesh_of(devices))
    assert engine.core.tables.table("plain").variant == variant
    assert bytes_of(engine.stage(batches, slots=True, flush=True)) == wanted
    assert engine.state_hash() == wanted_hash
