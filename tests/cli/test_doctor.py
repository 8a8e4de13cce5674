"""``penstock doctor``: what it finds, and what it says of machines that are not this one."""

import pytest

from penstock.cli import doctor, main


def test_doctor_passes_on_this_machine(tmp_path, call):
    text, report = call(0, "doctor", "--checkpoint", tmp_path / "later")
    names = [finding["name"] for finding in report["findings"]]
    assert report["passed"]
    assert names[:6] == ["versions", "optional", "devices", "kernels", "threads", "memory"]
    assert names[6:] == ["huge pages", "compile cache", "checkpoints"]
    assert all(f"{name} " in text for name in names)
    assert not (tmp_path / "later").exists()


def test_no_device_is_exit_1_and_says_why(monkeypatch, capsys):
    def refuse(_):
        raise doctor.PenstockError("jax finds no device: none of them")

    monkeypatch.setattr(doctor, "make_devices", refuse)
    assert main(["doctor"]) == 1
    assert "BROKEN: jax finds no device: none of them" in capsys.readouterr().out


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
