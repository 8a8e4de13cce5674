"""The seam through which everything goes that must survive a crash: whole or absent, whatever fails."""

import errno
import io
import os

import pytest
from faults.operations import Watched, failing, short_write

from penstock.base.filesystem import atomic_files


@pytest.fixture
def use(monkeypatch):
    """use(operations): what the seam calls from here on."""
    return lambda operations: monkeypatch.setattr(atomic_files, "operations", operations) or operations


def write(path, data=b"new"):
    with atomic_files.publishing(path) as file:
        file.write(data)


def test_a_file_appears_whole_and_on_disk(tmp_path, use):
    watched = use(Watched())
    write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert watched.calls == ["create", "write", "sync", "rename", "sync_folder"]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_files.publishing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_an_error_inside_leaves_everything_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), atomic_files.publishing(path) as file:
        file.writelines([b"new", None])
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("number", range(1, 6))
def test_if_any_operation_fails_the_file_is_old_or_new_and_the_error_names_it(tmp_path, use, number):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    use(failing(number, errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as caught:
        write(path)
    assert str(tmp_path) in str(caught.value.filename)
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == (b"new" if number == 5 else b"old")  # renamed, only not known to be on disk


def test_a_short_write_is_continued(tmp_path, use):
    use(Watched(lambda n, name, args: (lambda file, data: os.write(file, data[:1])) if name == "write" else None))
    write(tmp_path / "file", b"abc")
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_a_disk_that_fills_up_leaves_no_file(tmp_path, use):
    use(short_write(2))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_large_writes_go_through_whole_and_small_ones_are_gathered(tmp_path, use):
    watched = use(Watched())
    data = bytes(range(256)) * (4 * atomic_files.BUFFER_BYTES // 256)
    with atomic_files.publishing(tmp_path / "file") as file:
        assert isinstance(file, io.BufferedIOBase)
        for start in range(0, len(data), 1000):
            file.write(data[start : start + 1000])
    assert (tmp_path / "file").read_bytes() == data
    assert watched.calls.count("write") <= 6


def test_folders_are_made_with_all_above_them_and_are_on_disk(tmp_path, use):
    watched = use(Watched())
    atomic_files.make_folders(tmp_path / "a" / "b")
    atomic_files.make_folders(tmp_path / "a" / "b")
    assert watched.calls == ["make_folder", "sync_folder"] * 2


def test_a_file_in_place_of_a_folder_is_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="a"):
        atomic_files.make_folders(tmp_path / "a" / "b")


def test_removing_a_missing_file_is_no_error(tmp_path):
    atomic_files.remove(tmp_path / "nothing")


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path):
    for folder in ("named", "stored"):
        (tmp_path / folder).mkdir()
    link, target = tmp_path / "named" / "file", tmp_path / "stored" / "data"
    link.symlink_to("../stored/data")
    for data in (b"new", b"newer"):  # the link dangles first
        write(link, data)
        assert (link.is_symlink(), target.is_symlink(), target.read_bytes()) == (True, False, data)
    assert os.listdir(tmp_path / "named") == ["file"]
    assert os.listdir(tmp_path / "stored") == ["data"]


def test_a_failure_at_a_symbolic_link_leaves_its_target(tmp_path, use):
    (tmp_path / "data").write_bytes(b"old")
    (tmp_path / "file").symlink_to("data")
    use(failing(4, errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "file")
    assert (tmp_path / "data").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["data", "file"]


def test_a_folder_a_pipe_or_a_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    for name, problem in (("pipe", "is a pipe or a device"), ("link", "is a pipe"), ("folder", "Is a directory")):
        with pytest.raises(OSError, match=problem) as caught:
            write(tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]
