"""``penstock doctor``: what it finds, and what it says of machines that are not this one."""

import re
import sys
import tomllib

import pytest
from scripts import ROOT

from penstock.cli import doctor, main


def test_doctor_passes_on_this_machine(tmp_path, call):
    text, report = call(0, "doctor", "--checkpoint", tmp_path / "later")
    names = [finding["name"] for finding in report["findings"] if finding["name"] != "missing"]
    assert report["passed"]
    assert names[:7] == ["versions", "optional", "compiler", "devices", "kernels", "threads", "memory"]
    assert names[7:] == ["huge pages", "compile cache", "checkpoints"]
    assert all(f"{name} " in text for name in names)
    assert not (tmp_path / "later").exists()


def test_no_device_is_exit_1_and_says_why(monkeypatch, capsys):
    def refuse(_):
        raise doctor.PenstockError("jax finds no device: none of them")

    monkeypatch.setattr(doctor, "make_devices", refuse)
    assert main(["doctor"]) == 1
    assert "BROKEN: jax finds no device: none of them" in capsys.readouterr().out


def test_doctor_says_what_needs_an_extra_that_is_not_installed(monkeypatch):
    def version(package):
        if package == "redis":
            raise doctor.PackageNotFoundError
        return "1.2.3"

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", lambda _: [])
    optional, missing = doctor.extras()
    assert "shtab 1.2.3, prometheus-client 1.2.3" in optional.found
    assert missing == doctor.CheckResult("missing", "for follow into Redis: pip install 'penstock[redis]'")


REQUIREMENTS = [
    "jax>=0.10.2",
    "numpy>=2.1",
    "protobuf<8,>=6.31.1",
    "pyarrow>=23",
    'flax>=0.12.7; extra == "flax"',
    "jax[tpu]>=0.11; extra == 'tpu-aot'",
    'torch==2.0; extra == "bench-peers"',
    'torch>=2.13; extra == "torch"',
]
SUPPORTED = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.1.0", "protobuf": "7.36.2", "pyarrow": "23.0.0"}


@pytest.fixture
def installed(monkeypatch):
    """Package → version: what doctor finds installed, next to a penstock with REQUIREMENTS."""
    versions = dict(SUPPORTED)

    def version(package):
        if package not in versions:
            raise doctor.PackageNotFoundError
        return versions[package]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", lambda _: REQUIREMENTS)
    return versions


def test_doctor_advises_to_replace_libraries_of_unsupported_versions(installed):
    assert doctor.versions().advice == ""
    installed.update(jax="0.10.0", protobuf="8.1")
    finding = doctor.versions()
    assert not finding.broken
    assert finding.advice == (
        "jax 0.10.0 is not supported, jax>=0.10.2 is; protobuf 8.1 is not supported, protobuf<8,>=6.31.1 is: "
        "pip install penstock"
    )


def test_doctor_reports_a_missing_library_that_every_engine_needs(installed):
    del installed["pyarrow"]
    finding = doctor.versions()
    assert finding.broken
    assert "pyarrow" not in finding.found
    assert finding.advice == "pyarrow missing: pip install penstock"
    assert [finding.name for finding in doctor.examine(ROOT) if finding.name != "missing"][2:] == ["compiler"]


@pytest.mark.parametrize(
    ("flax", "supported"), [("0.12.6", False), ("0.12.7", True), ("0.12.7.1", True), ("0.13", True), ("1.0rc1", True)]
)
def test_doctor_says_what_needs_another_version_of_an_extra(flax, supported, installed):
    installed.update(flax=flax, torch="2.13.0+cpu")
    others = [finding.found for finding in doctor.extras() if finding.name == "unsupported"]
    wanted = f"flax {flax}, not flax>=0.12.7, for tables in a step of Flax: pip install 'penstock[flax]'"
    assert others == ([] if supported else [wanted])


def test_doctor_knows_no_bounds_of_a_source_tree_that_is_not_installed(installed, monkeypatch):
    def requires(_):
        raise doctor.PackageNotFoundError

    monkeypatch.setattr(doctor, "requires", requires)
    installed["jax"] = "0.1"
    assert doctor.versions().advice == ""


def test_doctor_lists_every_extra_that_a_part_of_penstock_needs():
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_developers = {"bench-peers", "dev", "docs", "examples", "neighbours", "tpu-aot"}
    assert {extra.name for extra in doctor.EXTRAS} == optional.keys() - of_developers
    for extra in doctor.EXTRAS:
        assert any(re.match(r"[\w-]+", requirement)[0] == extra.package for requirement in optional[extra.name])


def test_doctor_says_what_a_build_from_source_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/missing/cc -pthread")
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda _: tmp_path)
    wanted = f"missing for a build from source: a C compiler and Python's headers ({tmp_path}/Python.h)"
    assert doctor.compiler() == doctor.CheckResult("compiler", wanted)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", sys.executable)
    assert doctor.compiler().found == f"{sys.executable}, with Python's headers"


@pytest.mark.parametrize(
    ("setting", "advised"),
    [
        ("always [madvise] never", ""),
        ("[always] madvise never", ""),
        ("always madvise [never]", "echo madvise"),
        ("", "slower"),
    ],
)
def test_doctor_advises_on_huge_pages(setting, advised):
    advice = doctor.huge_pages(setting).advice
    assert advised in advice
    assert bool(advice) == bool(advised)


def test_doctor_reports_a_cpu_without_avx2_and_a_single_cpu(monkeypatch):
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert "no AVX2" in doctor.kernels(["baseline"]).advice
    assert doctor.kernels(["avx2", "baseline"]).advice == ""
    assert doctor.threads(1).advice
    assert not doctor.threads(8).advice
    assert doctor.threads(2, 1.5).found.endswith("CPUs are ours; its control group has a quota of 1.5")


MOUNTS = """/dev/vda / ext4 rw 0 0
tmpfs {0}/memory tmpfs rw 0 0
host:/x {0}/far nfs4 rw 0 0
/dev/b {0}/a\\040b xfs rw 0 0
"""


def test_doctor_reports_the_file_system_of_a_checkpoint(tmp_path):
    mounts = MOUNTS.format(tmp_path)
    for name in ("memory", "far", "a b"):
        (tmp_path / name).mkdir()
    assert "lost with the machine" in doctor.file_system(tmp_path / "memory" / "run1", mounts).advice
    assert "network" in doctor.file_system(tmp_path / "far", mounts).advice
    assert ": xfs," in doctor.file_system(tmp_path / "a b", mounts).found
    assert ": ext4," in doctor.file_system(tmp_path / "run1", mounts).found
    assert "unknown file system" in doctor.file_system(tmp_path, "").found


def test_doctor_reports_the_compile_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "a-cache").write_bytes(b"12345")
    assert "1 programs, 5 bytes" in doctor.cache(tmp_path).found
    assert "PENSTOCK_COMPILE_CACHE" in doctor.cache(None).advice
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)  # root may write everywhere
    assert "cannot be written" in doctor.cache(tmp_path / "elsewhere").advice
