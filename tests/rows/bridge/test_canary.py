"""The first use of our kernel on a machine: a canary decides, a failure falls back to XLA, and both are reported."""

import json
import re
import shutil
from functools import lru_cache, partial
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pytest
from checkpoints import config_of
from faulty_kernels import Kernel, does_not_compile, off_in_one_line, writes_an_untouched_line
from sharing import LocalJob

import penstock as ps
from penstock.cli import doctor
from penstock.contrib.pages.metrics import Metrics
from penstock.contrib.shares.joined_reports import joined_problems, joined_variants
from penstock.model.updates import UpdateRule
from penstock.rows.bridge import backends, canary, program_cache, programs, tensorcore
from penstock.rows.bridge.row_format import Line
from penstock.rows.bridge.sharding import Layout

SHARED, OURS = program_cache.compiled, tensorcore.apply.__wrapped__


@pytest.fixture
def on_tpu(monkeypatch, tmp_path):
    """on_tpu(kernel): a machine whose devices count as a TPU's, with that kernel, or with ours, interpreted."""

    def set_up(kernel=None):
        monkeypatch.setattr(backends, "platform", lambda mesh: "tpu")
        monkeypatch.setattr(tensorcore, "BLOCK", 8)
        monkeypatch.setattr(tensorcore, "UNROLLED", 2)
        monkeypatch.setattr(tensorcore, "apply", kernel or OURS)
        kernels = lru_cache(SHARED.__wrapped__)
        monkeypatch.setattr(program_cache, "compiled", lambda *key: (kernels if "pallas" in key else SHARED)(*key))
        monkeypatch.setattr(canary, "verdicts", lambda: tmp_path / "verdicts")
        canary.failure.cache_clear()

    yield set_up
    canary.failure.cache_clear()


FAULTS = [
    ({"spoil": off_in_one_line}, "step 0: line .* has .* instead of .*"),
    ({"spoil": writes_an_untouched_line}, "step 0: line 1 has 0 instead of .*"),
    ({"spoil": does_not_compile}, "RuntimeError: scoped vmem: 16.03 MB of 16.00 MB"),
    ({"moves": True}, "step 0: the table moved"),
]


def an_engine(optimizer=None, names="ab", **arguments):
    tables = [ps.TableConfig(700, 24, name=name, optimizer=optimizer or ps.Adagrad(0.1)) for name in names]
    return ps.Engine(ps.EmbeddingConfig.from_tables(tables), **arguments)


def frames(num_frames=4):
    for seed in range(num_frames):
        rng = np.random.default_rng(seed)
        rows = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(200 * 24, np.float32)), 24)
        yield pa.record_batch({"id": rng.permutation(700)[:200], "gradient": rows})


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def wanted():
    """The state after the frames, whatever the variant."""
    engine = an_engine()
    engine.run(frames(), table="a")
    return engine.state_hash()


def test_our_kernel_passes_its_canary_and_is_then_used(on_tpu):
    on_tpu()
    engine = an_engine()
    report = engine.run(frames(1), table="a")
    assert report.variants == {"a": "pallas", "b": "pallas"}
    assert (report.device_problems, report.notes) == (0, ())


@pytest.mark.sampled(
    "fault0-step 0: line .* has .* instead of .*",
    "fault2-RuntimeError: scoped vmem: 16.03 MB of 16.00 MB",
)
@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_kernel_that_fails_its_canary_is_not_used_and_the_report_says_why(fault, reason, on_tpu, caplog, wanted):
    on_tpu(partial(Kernel, **fault))
    engine = an_engine()
    report = engine.run(frames(), table="a")
    (note,) = report.notes
    assert re.fullmatch(f"tables 'a', 'b': the kernel failed its canary, XLA's program updates: {reason}", note)
    assert report.variants == {"a": "xla", "b": "xla"}
    assert report.device_problems == Metrics(engine).plain()["penstock_device_problems_total"] == 1
    assert warnings_in(caplog) == [note]
    assert engine.state_hash() == wanted


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"moves": True}, "table 'a', step 0: the step moved the table instead of updating it in place"),
        ({"spoil": does_not_compile}, "table 'a', step 0: the kernel does not compile for 256 lines: scoped vmem: 16"),
    ],
)
def test_a_kernel_that_fails_in_a_step_is_replaced_there_and_no_row_is_lost(fault, problem, on_tpu, caplog, wanted):
    on_tpu(partial(Kernel, **fault, of_the_canary=False))
    engine = an_engine()
    assert engine.core.tables.table("a").backend.variant == "pallas"
    report = engine.run(frames(), table="a")
    assert report.variants == {"a": "xla", "b": "xla"}
    assert report.device_problems == 1
    assert report.notes[0].startswith(problem)
    assert report.notes[0].endswith("; XLA's program updates from here on")
    assert warnings_in(caplog) == list(report.notes)
    assert engine.state_hash() == wanted


def test_a_table_that_xlas_program_moves_is_reported(on_tpu, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")
    on_tpu()
    monkeypatch.setattr(programs, "apply", partial(Kernel, moves=True))
    monkeypatch.setattr(program_cache, "compiled", lru_cache(SHARED.__wrapped__))
    report = an_engine(names="m").run(frames(), table="m")
    assert report.variants == {"m": "xla"}
    moved = "the step moved the table instead of updating it in place"
    assert report.notes == tuple(f"table 'm', step {step}: {moved}" for step in range(3))  # only the first are watched


def test_a_verdict_is_kept_for_the_machine_and_not_for_another_rule(on_tpu, tmp_path):
    line, rule = Line(128, 1, 128), UpdateRule("adagrad", 1)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("shard",))
    on_tpu(partial(Kernel, spoil=off_in_one_line))
    wrong = canary.failure(mesh, rule, line)
    assert "instead of" in wrong
    on_tpu(partial(Kernel, spoil=does_not_compile))  # a later process
    assert canary.failure(mesh, rule, line) == wrong
    other = UpdateRule("adagrad", 1, gradient_max=1.0)
    assert "scoped vmem" in canary.failure(mesh, other, line)
    on_tpu(Kernel)  # an exception is not kept
    assert canary.failure(mesh, other, line) == ""
    on_tpu(partial(Kernel, spoil=does_not_compile))
    assert canary.failure(mesh, other, line) == ""
    for kept in (tmp_path / "verdicts").iterdir():
        kept.write_text(json.dumps([1]))  # damaged: the canary runs again
    on_tpu(Kernel)
    assert canary.failure(mesh, rule, line) == ""


@pytest.mark.parametrize(
    ("folder", "kept"), [("/a/cache", Path("/a/cache")), ("gs://bucket/cache", None), (None, None)]
)
def test_verdicts_are_kept_next_to_the_compilation_cache_if_it_is_a_directory(folder, kept):
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", folder)
        assert canary.verdicts() == kept
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("device", "slots", "dim", "fits"),
    [
        ("TPU v4", 2, 1536, True),
        ("TPU v4", 2, 2048, False),
        ("TPU v5 lite", 2, 2048, False),
        ("TPU v5", 0, 2048, True),
        ("TPU v6 lite", 2, 2048, True),
        ("TPU v6 lite", 2, 4096, False),
        ("TPU7x", 2, 2048, True),
    ],
)
def test_lines_that_exceed_vmem_are_left_to_xla(device, slots, dim, fits):
    assert tensorcore.fits(Line(dim, slots, 128), device) == fits


def test_a_table_whose_lines_exceed_vmem_gets_no_kernel(mesh_of):
    rule = UpdateRule("adam", 2)
    layouts = [Layout("t", 100, dim, 2, 1, False, 128) for dim in (128, 2048)]
    assert [backends.possible("pallas", mesh_of(1), layout, rule) for layout in layouts] == [True, False]


# ---- the record in commits


def test_a_commit_records_the_variant_and_a_resumed_engine_keeps_it(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")
    an_engine().save(tmp_path / "saved")
    monkeypatch.delenv("PENSTOCK_VARIANT")
    assert an_engine().core.tables.table("a").backend.variant == "host"
    engine = ps.Engine.restore(tmp_path / "saved")
    report = engine.run(frames(1), table="a")
    assert report.variants == {"a": "xla", "b": "xla"}
    assert (report.device_problems, report.notes, warnings_in(caplog)) == (0, (), [])


def test_a_resumed_engine_that_cannot_keep_the_variant_reports_it(monkeypatch, tmp_path, caplog, on_tpu):
    on_tpu(Kernel)
    an_engine().save(tmp_path / "saved")
    on_tpu(partial(Kernel, moves=True))
    (tmp_path / "verdicts").rename(tmp_path / "elsewhere")  # another machine
    caplog.clear()
    engine = ps.Engine.restore(tmp_path / "saved")
    report = engine.run(frames(1), table="a")
    assert report.variants == {"a": "xla", "b": "xla"}
    resumed, failed = report.notes
    assert resumed.startswith("tables updated by 'pallas' (jax ")
    assert resumed.endswith(") now (a, b): bits agree only to the bound between variants (docs/devices.md)")
    assert "canary" in failed
    assert sorted(warnings_in(caplog)) == sorted(report.notes)
    assert report.device_problems == 2


def test_another_compiler_is_reported_unless_our_handlers_update(monkeypatch, tmp_path):
    for variant, reported in (("xla", True), ("host", False)):
        engine = an_engine(variant=variant)
        assert engine.core.tables.table("a").backend.variant == variant
        engine.save(tmp_path / variant)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "__version__", "99.1")
            problems = ps.Engine.restore(tmp_path / variant).core.tables.programs.problems
        assert bool(problems) == reported


# ---- what may be asked for


def test_a_preferred_variant_is_used_where_it_is_possible(monkeypatch):
    mixed = an_engine(variant={"a": "xla"})
    assert mixed.run([], table="a").variants == {"a": "xla", "b": "host"}
    assert an_engine(variant="pallas").run([], table="a").variants == {"a": "host", "b": "host"}  # rows, not lines
    monkeypatch.setenv("PENSTOCK_VARIANT", "host")
    assert an_engine(variant="xla").run([], table="a").variants == {"a": "host", "b": "host"}
    monkeypatch.setenv("PENSTOCK_VARIANT", "auto")
    assert an_engine(variant="xla").run([], table="a").variants == {"a": "xla", "b": "xla"}


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("cuda", "variant: expected one of auto, xla, pallas, sparsecore, host, got 'cuda'"),
        ({"c": "xla"}, "variant: no table 'c' in the configuration"),
    ],
)
def test_an_unknown_variant_or_table_is_refused(variant, problem):
    with pytest.raises(ps.UsageError, match=problem):
        an_engine(variant=variant)


@pytest.mark.evidence
def test_the_doctor_runs_the_canaries_and_reports_the_variant_that_is_used(on_tpu):
    on_tpu(Kernel)
    assert "steps by 'pallas' (SGD, Adagrad, Adam, FTRL)" in doctor.devices().found

    def only_adam_fails(mesh, rule, *shape):
        return Kernel(mesh, rule, *shape, moves=rule.algorithm == "adam")

    on_tpu(only_adam_fails)
    shutil.rmtree(canary.verdicts())
    finding = doctor.devices()
    assert "steps by 'pallas' (SGD, Adagrad, FTRL) and 'xla' (Adam)" in finding.found
    assert finding.advice == "the kernel failed its canary, so XLA's program updates: Adam: step 0: the table moved"
    assert not finding.broken


def test_a_commit_of_shares_records_only_the_variants_that_all_have(monkeypatch, tmp_path):
    config = config_of()
    job = LocalJob(config, 2)
    job.engines[1] = ps.Engine(config, share=(1, 2), variant={"user": "xla"})
    job.commit(tmp_path)
    resumed = ps.Engine.restore(tmp_path)
    assert resumed.core.tables.programs.variants == {"user": "host", "item": "host"}
    (problem,) = resumed.core.tables.programs.problems
    assert problem.startswith("tables updated by 'auto' (shares differ) before the commit and by 'host' (penst")
    assert ") now (user): bits agree" in problem


def test_a_report_of_shares_names_each_variant_and_each_problem_once():
    assert joined_variants([{"a": "xla", "b": "host"}, {"a": "pallas", "b": "host"}]) == {
        "a": "pallas, xla",
        "b": "host",
    }
    assert joined_problems([[], ["x", "y"], ["y"]]) == ["share 1: x", "share 1: y"]
