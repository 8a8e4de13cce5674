"""The devices of an engine without a mesh: what jax finds, asked only where it may find an accelerator."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import penstock as ps
from penstock.rows.bridge import jax_devices, mesh_selection
from penstock.rows.bridge.devices import HostMesh
from penstock.rows.bridge.mesh_selection import make_mesh

CODE = """
import sys
{before}
import numpy as np
import penstock as ps
from penstock.rows.bridge.mesh_selection import default_mesh

config = ps.EmbeddingConfig.from_tables([ps.TableConfig(10, 2, ps.Constant(1.0), ps.SGD(1.0), name="t")])
engine = ps.Engine(config)
engine.apply({{"t": (np.array([3]), np.ones((1, 2), np.float32))}})
(device,) = engine.core.tables.devices
print(device.platform, engine.core.tables.programs.variants["t"], "jax" in sys.modules, default_mesh().reason, sep=";")
"""
# Files of fake plugins; none of them registers a device.
ENTRY_POINT = {
    "fake_chip.py": "def initialize(): pass\n",
    "fake_chip-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: fake-chip\nVersion: 1.0\n",
    "fake_chip-1.0.dist-info/entry_points.txt": "[jax_plugins]\nfake = fake_chip\n",
}
NAMESPACE = {"jax_plugins/fake_chip.py": "def initialize(): pass\n"}
LIBTPU = {"libtpu.py": "def get_library_path(): return '/no/such/libtpu.so'\n"}
NONE_INSTALLED = "False;no plugin of jax for accelerators is installed"
ASKED = "True;jax's default platform is cpu"


@pytest.mark.sampled("none", "namespace", "cpu")
@pytest.mark.parametrize(
    ("files", "variables", "before", "wanted"),
    [
        ({}, {}, "", NONE_INSTALLED),
        ({}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "", NONE_INSTALLED),
        (ENTRY_POINT, {}, "", ASKED),
        (NAMESPACE, {}, "", ASKED),
        (LIBTPU, {}, "", ASKED),
        ({}, {"TPU_LIBRARY_PATH": "libtpu.so"}, "import warnings; warnings.simplefilter('ignore')", ASKED),
        (NAMESPACE | ENTRY_POINT, {"JAX_PLATFORMS": "cpu"}, "", "False;JAX_PLATFORMS is 'cpu'"),
        (NAMESPACE, {"JAX_PLATFORMS": "cpu,cuda"}, "", "False;JAX_PLATFORMS is 'cpu,cuda'"),
        ({}, {}, "import jax", ASKED),
        ({}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, "import jax", ASKED),
    ],
    ids=[
        "none",
        "flags",
        "entry point",
        "namespace",
        "libtpu",
        "library",
        "cpu",
        "cpu first",
        "loaded",
        "loaded with flags",
    ],
)
def test_jax_is_asked_only_where_it_may_find_an_accelerator(files, variables, before, wanted, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PENSTOCK_", "TPU_"))}
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = inherited | {"PYTHONPATH": path} | variables
    code = CODE.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"cpu;host;{wanted}"), done.stderr


def test_a_gpu_without_a_plugin_of_jax_is_a_warning_and_a_note_of_doctor(monkeypatch, tmp_path, caplog, call):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(mesh_selection, "DEV", tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delitem(sys.modules, "jax")
    assert make_mesh() == HostMesh(1)
    wanted = f"no plugin of jax for accelerators is installed, and this machine has {tmp_path}/nvidia0"
    assert caplog.messages == [f"tables on 1 cpu: {wanted}"]
    text, report = call(0, "doctor")
    (result,) = (finding for finding in report["findings"] if finding["name"] == "devices")
    assert wanted in result["found"]
    assert "note: tables do not use the accelerator: install jax for it" in text


def test_a_platform_that_is_missing_is_no_silent_fallback_to_the_host():
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-c", CODE.format(before="")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    error = (
        "penstock.base.errors.UsageError: JAX_PLATFORMS is 'cuda' and there is no such device here: unset it, or set it"
    )
    assert done.stderr.splitlines()[-1].startswith(error)


def test_an_accelerator_of_a_loaded_jax_has_the_tables(monkeypatch):
    chips = [SimpleNamespace(id=number, platform="tpu", process_index=0) for number in range(2)]
    monkeypatch.setattr(jax, "local_devices", lambda: chips)
    monkeypatch.setattr(jax_devices, "Mesh", lambda devices, axes: SimpleNamespace(devices=devices, size=len(devices)))
    assert list(make_mesh().devices) == chips
    assert list(jax_devices.default_mesh(1).devices) == chips[:1]
    with pytest.raises(ps.UsageError, match="--devices 3: there are 2 TPU devices here"):
        jax_devices.default_mesh(3)


def test_parts_of_the_host_are_as_many_devices_of_jax_with_the_same_bits(mesh_of):
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(3000, 4, name="t")], ps.Adam(0.1))
    rng, hashes = np.random.default_rng(0), set()
    ids, gradients = rng.integers(0, 3000, 5000), rng.standard_normal((5000, 4)).astype(np.float32)
    for mesh in (None, HostMesh(3), mesh_of(3)):
        engine = ps.Engine(config, mesh)
        engine.apply({"t": (ids, gradients)})
        assert engine.core.tables.programs.variants == {"t": "host"}
        assert len(engine.core.tables.devices) == (1 if mesh is None else 3)
        assert np.asarray(engine.table("t")).tobytes() == engine.lookup("t", range(3000)).tobytes()
        hashes.add(engine.state_hash())
    assert len(hashes) == 1


def test_the_report_names_the_tables_on_the_host_that_xla_updates_and_why():
    tables = [
        ps.TableConfig(10, 2, name="program", optimizer=ps.UserDefinedProgram(lambda g, w: w - g)),
        ps.TableConfig(10, 5000, name="wide", optimizer=ps.RowWiseAdagrad(0.1)),
        ps.TableConfig(10, 2, name="placed", optimizer=ps.RowWiseAdagrad(0.1), placement=ps.Placement("host")),
        ps.TableConfig(10, 2, name="plain"),
    ]
    report = ps.Engine(ps.EmbeddingConfig.from_tables(tables, ps.SGD(0.1))).run([], table="plain")
    assert report.variants == {"program": "xla", "wide": "xla", "placed": "host", "plain": "host"}
    assert report.notes == (
        "table 'program': XLA updates the rows, since its rule is a program",
        "table 'wide': XLA updates the rows, since a row with a mean of squares has more than 4096 weights",
    )
    assert report.device_problems == 0
