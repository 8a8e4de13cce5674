"""The names of a stream's columns in a configuration, and what else a TableConfig can say."""

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from cli import ONE_TABLE, error_line, outcome
from ipc import stream

import penstock as ps

COLUMNS = 'columns { role: "id" name: "key" }\ncolumns { role: "gradient" name: "grad" }\n'


def log(ids="key", gradient="grad"):
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 2)
    return pa.RecordBatch.from_pydict({ids: [1, 2, 3, 1, 2, 3], gradient: values, "step": [0, 0, 0, 1, 1, 1]})


@pytest.fixture
def files(tmp_path):
    """A configuration with the names of columns, and a log that has them."""
    (tmp_path / "tables.pbtxt").write_text(f"tpu_embedding_configuration {{ {ONE_TABLE} }}\n{COLUMNS}")
    (tmp_path / "log.arrows").write_bytes(stream([log()]))
    return tmp_path / "tables.pbtxt", tmp_path / "log.arrows"


def test_every_command_reads_the_columns_that_the_configuration_names(files, capsys):
    for command in ("replay", "validate"):
        code, report, _ = outcome(capsys, command, *files)
        assert (command, code, report["rows"]) == (command, 0, 6)


def test_a_flag_and_a_keyword_take_precedence(files, tmp_path, capsys):
    (tmp_path / "other.arrows").write_bytes(stream([log(ids="id")]))
    assert "no column 'key' for the role 'id'" in error_line(capsys, 3, "replay", files[0], tmp_path / "other.arrows")
    assert outcome(capsys, "replay", files[0], tmp_path / "other.arrows", "--column", "id=id")[0] == 0
    config = ps.EmbeddingConfig.load(files[0])
    assert ps.Engine(config).run(log(ids="id"), columns={"id": "id"}).rows == 6


def test_python_saves_and_loads_them(tmp_path):
    columns = {"id": "key", "gradient": "grad"}
    tables = [ps.TableConfig(50, 2, optimizer=ps.SGD(0.1), name="user")]
    config = ps.EmbeddingConfig.from_tables(tables, columns=columns)
    config.save(tmp_path / "tables.pbtxt")
    loaded = ps.EmbeddingConfig.load(tmp_path / "tables.pbtxt")
    assert config.columns == loaded.columns == columns
    assert ps.Engine(loaded).run(log()).rows == 6
    features = ps.EmbeddingConfig.from_features({"f": ps.FeatureConfig(tables[0])}, batch_size=1, columns=columns)
    assert features.columns == columns
    with pytest.raises(ps.ConfigError, match="columns must be a mapping role → name, got"):
        ps.EmbeddingConfig.from_tables(tables, columns=["id"])


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ('columns { role: "ids" name: "key" }', "role 'ids' does not exist"),
        ('columns { role: "id" }', "name is empty"),
        ('columns { role: "id" name: "a" } columns { role: "id" name: "b" }', "role 'id' is given twice"),
    ],
)
def test_wrong_ones_are_findings(tmp_path, columns, problem, capsys):
    (tmp_path / "tables.pbtxt").write_text(f"tpu_embedding_configuration {{ {ONE_TABLE} }}\n{columns}")
    assert problem in error_line(capsys, 4, "replay", tmp_path / "tables.pbtxt", "log")


def test_a_checkpoint_resumes_with_names_that_were_added_to_the_configuration(files, tmp_path):
    tables = [ps.TableConfig(50, 2, optimizer=ps.SGD(0.1), name="user")]
    ps.Engine(ps.EmbeddingConfig.from_tables(tables)).run(log("id", "gradient"), checkpoint=tmp_path / "c", limit=1)
    config = ps.EmbeddingConfig.from_tables(tables, columns={"id": "key", "gradient": "grad"})
    engine = ps.Engine.restore(tmp_path / "c", config=config)
    assert engine.run(log(), checkpoint=tmp_path / "c", resume=True).steps == 1


def test_a_table_config_stores_16_bits_as_the_text_configuration_does(tmp_path):
    table = ps.TableConfig(50, 2, optimizer=ps.SGD(0.1), name="user", dtype="bfloat16")
    config = ps.EmbeddingConfig.from_tables([table])
    config.save(tmp_path / "tables.pbtxt")
    assert "storage_dtype: BFLOAT16" in (tmp_path / "tables.pbtxt").read_text()
    rows = ps.Engine(config).lookup("user", range(50)).view(np.uint32)
    assert not (rows & 0xFFFF).any()
    assert config.table("user").storage_dtype == "bfloat16"
