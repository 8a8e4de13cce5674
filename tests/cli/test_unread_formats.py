"""Files that others write and penstock does not read: refused in one line, with the format's name and a way on."""

import gzip
import io
import json
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from cli import table

from penstock.io.sources.batch import arrow_errors

CONFIG = table("user", 30, 4) + "mode: TRAINING\n"
ROWS = np.random.default_rng(0).random((30, 4), np.float32)
LISTS = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.reshape(-1)), 4)
TABLE = pa.table({"id": pa.array(range(30)), "row": LISTS})


def zipped(**files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def tarred(name):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return out.getvalue()


def as_arrow(write):
    out = io.BytesIO()
    write(out)
    return out.getvalue()


TEXT = "".join(f"word{number} {' '.join(map(str, row))}\n" for number, row in enumerate(ROWS.tolist()))
FILES = {
    "empty": (b"", "an empty file"),
    "gzip": (gzip.compress(bytes(100)), "a file compressed with gzip; unpack it first: gunzip "),
    "zip": (zipped(a=b"1", b=b"2"), "a ZIP archive of a, b; unpack it first: unzip "),
    "tar": (tarred("model.pt"), "a tar archive; unpack it first: tar -xf "),
    "pickle": (pickle.dumps({"user": ROWS}), "a Python pickle, which could run any code and is never loaded"),
    "GloVe": (TEXT.encode(), "vectors in text, as GloVe writes them; save the rows, in the order of the ids, and give"),
    "word2vec": (f"30 4\n{TEXT}".encode(), "word2vec's vectors in text; save the rows, in the order of the ids"),
    "word2vec, binary": (b"30 4\nword " + ROWS[:1].tobytes(), "word2vec's vectors in binary form; save the rows"),
    "CSV": (b"id,a,b\n1,2,3\n", "a text file of columns, such as CSV; write it as Parquet with the columns id and row"),
    "JSON": (json.dumps({"a": 1}).encode(), "a JSON file, which holds no tables"),
    "Parquet": (as_arrow(lambda out: pa.parquet.write_table(TABLE, out)), "a single Parquet file; give a folder in"),
    "encrypted": (b"PARE" + bytes(20) + b"PARE", "encrypted Parquet, whose keys penstock does not have; decrypt it"),
    "Arrow": (as_arrow(lambda out: pa.feather.write_feather(TABLE, out)), "an Arrow IPC file; write it as Parquet"),
    "msgpack": (b"\x82\xa6params\x81\xa4user", "a msgpack file, such as those of flax.serialization; save its arrays"),
    "GGUF": (b"GGUF\x03\x00\x00\x00", "a GGUF file; export its tensors as safetensors"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_refused_with_the_name_of_its_format(tmp_path, config, refused, kind):
    content, problem = FILES[kind]
    (tmp_path / "source").write_bytes(content)
    line = refused(3, "import", tmp_path / "source", tmp_path / "c", "--config", config)
    assert f"source: {problem}" in line
    assert "damaged" not in line
    assert "--new-tables" not in line
    assert not (tmp_path / "c").exists()


def test_the_command_for_vectors_in_text_works(tmp_path, config, refused, call):
    source = tmp_path / "a PATH with FILE" / "glove's.txt"
    source.parent.mkdir()
    source.write_text(TEXT)
    line = refused(3, "import", source, tmp_path / "c", "--config", config)
    command = line[line.index("numpy.save(") :].strip().replace("TABLE.npy", f"{tmp_path}/user.npy")
    exec(command.replace("numpy.", "np."))
    _, result = call(0, "import", tmp_path / "user.npy", tmp_path / "c", "--config", config)
    assert result["tables"] == {"user": {"parameters": "user"}}


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("model.npz", b"", "holds a NumPy file, or a folder of them in model.npz; give what to read: "),
        ("config.json", b"{}", "tables in no known format; there: config.json; expected "),
        (
            "_delta_log/0.json",
            b"{}",
            "a Delta table; write it as Parquet with the columns id and row, TABLE.parquet in a",
        ),
        (
            "_versions/1.manifest",
            b"",
            "a Lance dataset; write it as Parquet with the columns id and row, TABLE.parquet",
        ),
        (
            "user/part-0.parquet",
            b"",
            "'user' is a folder of several files; write it as one: pyarrow.parquet.write_table(",
        ),
        ("user.parquet/part-0.parquet", b"", "'user.parquet' is a folder of several files; write it as one: "),
        ("data/train.parquet", b"", "no file for table 'user'; there: data"),
    ],
)
def test_a_folder_of_another_format_is_named_and_never_initial_rows(tmp_path, config, refused, file, content, problem):
    path = tmp_path / "source" / file
    path.parent.mkdir(parents=True)
    if file.endswith(".npz"):
        np.savez(path, user=ROWS)
    else:
        path.write_bytes(content)
    line = refused(3, "import", tmp_path / "source", tmp_path / "c", "--config", config)
    assert problem in line
    assert "--new-tables" not in line


def test_a_folder_of_tables_that_lacks_one_says_what_it_has(tmp_path, config, refused):
    (tmp_path / "source").mkdir()
    pa.parquet.write_table(TABLE, tmp_path / "source" / "item.parquet")
    line = refused(3, "import", tmp_path / "source", tmp_path / "c", "--config", config)
    assert "no file for table 'user'; there: item.parquet; --new-tables (new_tables=) keeps its initial rows" in line
    pa.parquet.write_table(pa.table({"a": [1]}), tmp_path / "source" / "user.parquet")
    line = refused(3, "import", tmp_path / "source", tmp_path / "c", "--config", config)
    assert "user.parquet: no column 'id' (has: a); a table has an id and a row, a list of 4 floats" in line


def test_encrypted_parquet_is_named_by_commands_that_read_streams(tmp_path, config, refused):
    (tmp_path / "log.parquet").write_bytes(b"PARE" + bytes(20) + b"PARE")
    for words in (["replay", config, tmp_path / "log.parquet"], ["inspect", tmp_path / "log.parquet"]):
        assert "log.parquet: encrypted Parquet, whose keys penstock does not have; decrypt it" in refused(3, *words)
    with pytest.raises(ValueError, match="log: encrypted Parquet"), arrow_errors("corrupt Parquet file", "log"):
        raise OSError("Cannot decrypt ColumnMetadata. FileDecryption is not setup correctly")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_and_single_files_of_numpy_are_read(tmp_path, config, call, save):
    save(tmp_path / "m.npz", **{"user": ROWS, "user/accumulators": ROWS + 1, "words": np.array([{}], object)})
    text, result = call(0, "import", tmp_path / "m.npz", tmp_path / "c", "--config", config)
    assert result["tables"] == {"user": {"parameters": "user", "accumulators": "user/accumulators"}}
    assert "skipped   words: Python objects, which are pickled and never loaded\n" in text
    call(0, "export", tmp_path / "c", tmp_path / "out")
    exported = pa.parquet.read_table(tmp_path / "out" / "user.parquet")
    np.testing.assert_array_equal(np.stack(exported["row"].to_numpy()), ROWS)


def test_damage_is_reported_where_a_checksum_or_a_length_shows_it(tmp_path, config, refused):
    np.savez(tmp_path / "m.npz", user=ROWS)
    whole = (tmp_path / "m.npz").read_bytes()
    changed = bytearray(whole)
    changed[whole.index(ROWS.tobytes()) + 7] ^= 1
    for content, problem in ((bytes(changed), "Bad CRC-32"), (whole[:-30], "not a zip file")):
        (tmp_path / "m.npz").write_bytes(content)
        line = refused(3, "import", tmp_path / "m.npz", tmp_path / "c", "--config", config)
        assert problem in line
        assert line.endswith("; it is damaged or incomplete\n")


def test_an_error_of_penstock_is_not_reported_as_damage(tmp_path, config, monkeypatch):
    """A fault in a reader is a bug, which a traceback shows, and not the loss of the user's file."""
    np.savez(tmp_path / "m.npz", user=ROWS)
    monkeypatch.setattr("penstock.contrib.formats.numpy_files.WholeTensor", lambda load: load.missing)
    from penstock.cli import main

    with pytest.raises(AttributeError, match="missing"):
        main(["import", str(tmp_path / "m.npz"), str(tmp_path / "c"), "--config", str(config)])


def test_inspect_lists_tensors_and_the_tables_they_are_named_like(tmp_path, call):
    arrays = {"model.user.weight": ROWS, "user.sum": ROWS, "opt_state/0/mu/item/embedding/value": ROWS, "bias": ROWS[0]}
    np.savez(tmp_path / "m.npz", **arrays, words=np.array([{}], object))
    text, result = call(0, "inspect", tmp_path / "m.npz")
    assert text == (
        f"{tmp_path}/m.npz: a NumPy file, or a folder of them, 4 tensors\n"
        "  model.user.weight: float32 (30, 4), parameters of a table 'user'\n"
        "  user.sum: float32 (30, 4), sum of a table 'user'\n"
        "  opt_state/0/mu/item/embedding/value: float32 (30, 4), mu of a table 'item'\n"
        "  bias: float32 (4,)\n"
        "  words: Python objects, which are pickled and never loaded\n"
    )
    assert (result["kind"], result["tensors"][3]["shape"]) == ("numpy", [4])


def test_the_state_of_optax_has_the_slots(tmp_path, call):
    (tmp_path / "t.pbtxt").write_text(
        table("user", 30, 4, "adam { beta1: 0.9 beta2: 0.99 epsilon: 1e-8 }") + "mode: TRAINING\n"
    )
    names = ("params/user/embedding", "opt_state/1/0/mu/user/embedding", "opt_state/1/0/nu/user/embedding")
    np.savez(tmp_path / "m.npz", **{name: ROWS + number for number, name in enumerate(names)})
    _, result = call(0, "import", tmp_path / "m.npz", tmp_path / "c", "--config", tmp_path / "t.pbtxt")
    assert result["tables"] == {"user": dict(zip(("parameters", "momenta", "velocities"), names, strict=True))}
    assert result["skipped"] == {}


def test_states_of_torch_are_of_the_table_that_they_are_named_like(tmp_path, call):
    np.savez(tmp_path / "m.npz", **{"optim.state.model.user.weight.exp_avg": ROWS})
    _, result = call(0, "inspect", tmp_path / "m.npz")
    assert [(tensor["table"], tensor["part"]) for tensor in result["tensors"]] == [("user", "exp_avg")]


def test_bfloat16_that_numpy_saves_without_its_name(tmp_path, config, refused):
    np.save(tmp_path / "user.npy", np.zeros((30, 4), "V2"))
    line = refused(3, "import", tmp_path / "user.npy", tmp_path / "c", "--config", config)
    assert "got void16; NumPy saves bfloat16 so: convert it to float32 first" in line


def test_pipes_and_devices_are_no_sources_of_tables(tmp_path, config, refused):
    os.mkfifo(tmp_path / "m.pt")
    for source in (tmp_path / "m.pt", "/dev/null"):
        line = refused(3, "import", source, tmp_path / "c", "--config", config)
        assert f"{source}: a pipe or a device; give a file" in line
