"""Formats of tables that penstock does not read: by what they begin with, each with the way to one that it reads."""

from __future__ import annotations

import re
import shlex
import zipfile
from pathlib import Path

from penstock.base.errors import listed

_TO_PARQUET = "write it as Parquet with the columns id and row, TABLE.parquet in a folder: "
_WRITE = "pyarrow.parquet.write_table"
_START = 4096
_SAVE = "save the rows, in the order of the ids, and give that file: "
ENCRYPTED_PARQUET = "encrypted Parquet, whose keys penstock does not have; decrypt it first, with pyarrow.parquet"

# What a file begins with → what it is, and the way to a format that is read. FILE is its path for a shell, PATH for
# Python.
_STARTS: tuple[tuple[bytes, str], ...] = (
    (b"PAR1", "a single Parquet file; give a folder in which it is called TABLE.parquet, with the columns id and row"),
    (b"PARE", ENCRYPTED_PARQUET),
    (b"ARROW1", f"an Arrow IPC file; {_TO_PARQUET}{_WRITE}(pyarrow.feather.read_table(PATH), NEW)"),
    (b"\xff\xff\xff\xff", f"an Arrow IPC stream; {_TO_PARQUET}{_WRITE}(pyarrow.ipc.open_stream(PATH).read_all(), NEW)"),
    (b"\x1f\x8b", "a file compressed with gzip; unpack it first: gunzip FILE"),
    (b"BZh", "a file compressed with bzip2; unpack it first: bunzip2 FILE"),
    (b"\xfd7zXZ\x00", "a file compressed with xz; unpack it first: unxz FILE"),
    (b"\x28\xb5\x2f\xfd", "a file compressed with zstd; unpack it first: unzstd FILE"),
    (b"GGUF", "a GGUF file; export its tensors as safetensors"),
    (b"ORC", "an ORC file; " + _TO_PARQUET + "pyarrow.orc.read_table(PATH)"),
    (b"Obj\x01", "an Avro file; write it as Parquet with the columns id and row, TABLE.parquet in a folder"),
)


def unread(path: Path) -> str | None:
    """Return what a file is, and what to do; None: unknown. Raises OSError."""
    with path.open("rb") as file:
        start = file.read(_START)
    if not start:
        return "an empty file"
    for mark, text in _STARTS:
        if start.startswith(mark):
            return _with_path(text, path)
    if re.match(rb"\x80[\x02-\x05]", start):
        return (
            "a Python pickle, which could run any code and is never loaded; where you trust it, save its arrays with "
            "numpy.savez('tables.npz', TABLE=array)"
        )
    if re.match(rb"(?:[\x81-\x8f]|\xde..)[\xa0-\xbf\xd9]", start, re.DOTALL):
        return _with_path(
            "a msgpack file, such as those of flax.serialization; save its arrays: numpy.savez('tables.npz', "
            "**flax.traverse_util.flatten_dict(flax.serialization.msgpack_restore(open(PATH, 'rb').read()), sep='/'))",
            path,
        )
    if start.startswith(b"PK\x03\x04"):
        return _zip(path)
    if start[257:262] == b"ustar":
        return _with_path("a tar archive; unpack it first: tar -xf FILE", path)
    if start[4:8] == b"TFL3":
        return "a TensorFlow Lite model, which may be quantized; give the checkpoint or SavedModel of its training"
    if (vectors := re.match(rb"(\d+) (\d+)\s*\n", start)) is not None:
        if _is_text(start):
            return f"word2vec's vectors in text; {_load_text(path, int(vectors[2]), 1)}"
        load = _with_path("gensim.models.KeyedVectors.load_word2vec_format(PATH, binary=True).vectors", path)
        return f"word2vec's vectors in binary form; {_SAVE}numpy.save('TABLE.npy', {load})"
    return _text(path, start) if _is_text(start) else None


def other_format(path: Path) -> str | None:
    """Return ``unread`` of a file that is no text, which a configuration would be."""
    with path.open("rb") as file:
        is_text = _is_text(file.read(_START))
    return None if is_text else unread(path)


def other_folder(path: Path) -> str | None:
    """Return which format of a folder penstock does not read, and what to do; None: none of them."""
    kinds = (
        ("_delta_log", "a Delta table", "deltalake.DeltaTable(PATH).to_pyarrow_table()"),
        ("_versions", "a Lance dataset", "lance.dataset(PATH).to_table()"),
        ("metadata/*.metadata.json", "an Iceberg table", "its scan().to_arrow()"),
    )
    for mark, title, read in kinds:
        if any(path.glob(mark)):
            return _with_path(f"{title}; {_TO_PARQUET}{_WRITE}({read}, NEW)", path)
    if path.name.endswith(".orbax-checkpoint-tmp") or ".orbax-checkpoint-tmp-" in path.name:
        return "an Orbax checkpoint that was not completed: Orbax renames the folder when it is"
    return None


def _zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        return f"a ZIP archive that cannot be read: {error}; it is damaged or incomplete"
    parts = {part for name in names for part in name.split("/")}
    if {"archive_format", "archive_version"} & parts:
        save = "torch.save(torch.export.load(PATH).state_dict, NEW)"
        return _with_path(f"a program of torch.export; save its state_dict: {save}", path)
    return _with_path(f"a ZIP archive of {listed(names)}; unpack it first: unzip FILE", path)


def _with_path(text: str, path: Path) -> str:
    texts = {"FILE": shlex.quote(str(path)), "PATH": repr(str(path))}
    return re.sub(r"\b(FILE|PATH)\b", lambda match: texts[match[0]], text)


def _is_text(start: bytes) -> bool:
    try:
        text = start.decode() if len(start) < _START else start[:-3].decode(errors="ignore")
    except UnicodeDecodeError:
        return False
    return all(char.isprintable() or char in "\t\r\n" for char in text)


def _text(path: Path, start: bytes) -> str:
    first = start.decode(errors="ignore").partition("\n")[0].strip()
    if first[:1] in "{[":
        return "a JSON file, which holds no tables; give the file or the folder of the tensors"
    words = first.split()
    if len(words) > 2 and all(re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) for word in words[1:]):
        return f"vectors in text, as GloVe writes them; {_load_text(path, len(words) - 1, 0)}"
    if "," in first or "\t" in first:
        return _with_path(
            f"a text file of columns, such as CSV; {_TO_PARQUET}pyarrow.csv.read_csv(PATH) reads it", path
        )
    return "a text file, which holds no tables in a known format"


def _load_text(path: Path, dim: int, header: int) -> str:
    skip = f", skiprows={header}" if header else ""
    load = f"numpy.loadtxt(PATH, usecols=range(1, {dim + 1}), comments=None, encoding='utf-8'{skip})"
    return _with_path(f"{_SAVE}numpy.save('TABLE.npy', {load})", path)
