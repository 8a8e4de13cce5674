"""The first hour of an accelerator: a machine without one says so, and a fault is on the page and an exit code."""

import jax
import numpy as np
import pytest

from penstock.bench import device, device_own_steps, device_runs
from penstock.rows.bridge import canary

SMALL = ("--any", "--rows", "5000", "--unique", "256")


@pytest.fixture
def small(monkeypatch):
    rules = device.rules()
    monkeypatch.setattr(device, "rules", lambda: {name: rules[name] for name in ("SGD", "Adagrad", "RowWiseAdagrad")})
    monkeypatch.setattr(device, "TIMED", ("Adagrad",))
    monkeypatch.setattr(device, "DIMS", (8,))
    monkeypatch.setattr(device, "CHECKED_ROWS", 128)
    monkeypatch.setattr(device, "LONG", 3)
    monkeypatch.setattr(device, "copy_bandwidth", lambda num_bytes: 1e9)
    monkeypatch.setattr(device_runs, "FRAME_ROWS", 512)
    monkeypatch.setattr(device_runs, "ROWS", 4000)
    monkeypatch.setattr(device_runs, "CACHED_BYTES", 320_000)


def test_without_an_accelerator_it_says_so(capsys):
    assert device.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no accelerator: jax sees only CPUs")


def test_a_plugin_without_its_device_is_one_line(capsys, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'tpu': no TPU\nmore of it")

    monkeypatch.setattr(jax, "devices", devices)
    assert device.main([]) == 2
    assert capsys.readouterr().err == "no accelerator: Unable to initialize backend 'tpu': no TPU\n"


@pytest.mark.evidence
def test_the_page_has_canaries_bits_times_and_a_trace(small, tmp_path, capsys):
    assert device.main([*SMALL, "--trace", str(tmp_path / "trace")]) == 0
    page = capsys.readouterr().out
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("##")]
    assert titles == ["Canaries", "Bits", "Engines", "Steps, writes and reads", "Steps of your own", "Trace"]
    assert "- xla: 3 of 3 optimizers have the same bits twice, 3 are within 2 units" in page
    rows = [line for line in page.splitlines() if line.startswith("| Adagrad | 8 | xla |")]
    assert [row.count("M/s, ") for row in rows] == [4, 1]
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert page.endswith("Every check passed.\n")


@pytest.mark.evidence
def test_a_step_of_your_own_repeats_its_bits_and_sums_by_gathers_in_the_documented_order(small, mesh_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_SUMS", "gathers")
    faults = []
    line, *_ = device.own_steps(mesh_of(1), faults, 1e9, 1000, 512)
    assert line == "- xla: 3 of 3 optimizers have the same bits twice, and sums are those of NumPy in the same order"
    monkeypatch.setattr(device_own_steps, "RUN", 3)
    next(device.own_steps(mesh_of(1), faults, 1e9, 1000, 512))
    assert faults == ["xla: the sums of a step of your own are not in the documented order"]


@pytest.mark.evidence
def test_other_bits_than_a_cpus_and_failed_canaries_are_exit_code_1(small, monkeypatch, capsys, tmp_path):
    right = device.on_cpu
    monkeypatch.setattr(
        device, "on_cpu", lambda *arguments: (right(*arguments)[0] + np.float32(1), right(*arguments)[1])
    )
    monkeypatch.setattr(device, "canaries", lambda mesh, faults: faults.append("canary of pallas: SGD 8") or [])
    assert device.main([*SMALL, "--trace", str(tmp_path)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("canary of pallas: SGD 8; xla, SGD: ")
    assert "units of the last place from a CPU's weights" in last


@pytest.mark.evidence
def test_engines_that_differ_in_settings_only_have_equal_states(small, mesh_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")  # as on a device, where rows are not in penstock's own memory
    faults = []
    lines = list(device_runs.checks(mesh_of(1), faults))
    assert [line for line in lines if not line.endswith(": equal states")] == []
    assert len(lines) == 9
    assert not faults


def test_engines_whose_states_differ_or_that_fail_are_faults(small, mesh_of, monkeypatch):
    def state(run):
        if run.dtype == "bfloat16":
            raise RuntimeError("the device is gone\nmore of it")
        return str(run.threads)

    monkeypatch.setattr(device_runs.EngineRun, "state", state)
    faults = []
    lines = list(device_runs.checks(mesh_of(1), faults))
    assert faults == [
        "one and four threads: states differ",
        "weights of 16 bits, and restored: the device is gone",
    ]
    assert all(any(line == f"- {fault}" for line in lines) for fault in faults)


def test_canaries_run_for_every_kernel_rule_and_dim_of_a_tpu(small, mesh_of, monkeypatch):
    from penstock.rows.bridge import backends
    from penstock.rows.bridge.mesh_selection import make_mesh

    mesh = make_mesh(mesh_of(1))
    monkeypatch.setattr(device, "on_tpu", lambda mesh: True)
    monkeypatch.setattr(backends, "lanes", lambda mesh: 128)
    tried = []
    monkeypatch.setattr(
        canary, "failure", lambda mesh, rule, line, variant: tried.append((variant, rule.algorithm)) or ""
    )
    lines = list(device.canaries(mesh, []))
    assert lines == ["- pallas: 2 pass, 0 fail", "- sparsecore: 3 pass, 0 fail"]
    assert {variant for variant, _ in tried} == {"pallas", "sparsecore"}
