"""Loading and saving: four forms distinguished, nothing lost, one clear line for a file that is no configuration."""

import os
import re

import pytest
from text_configs import WORKED_BYTES

from penstock.base.errors import ConfigError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.features import FeatureConfig
from penstock.model.config.tables import TableConfig, Uniform
from penstock.model.updates import SGD, Adagrad, AdagradMomentum, Adam

PLAIN = """table_descriptor { name: "a" vocabulary_size: 10 dimension: 4
  optimization_parameters { adagrad { } learning_rate { constant: 0.5 } } }"""
ENGINE = f'tpu_embedding_configuration {{ {PLAIN} mode: TRAINING }} table {{ name: "a" constant {{ value: 1 }} }}'


def whole(config):
    return config.to_engine_proto().SerializeToString(deterministic=True)


def load(tmp_path, content):
    path = tmp_path / "c"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return EmbeddingConfig.load(path)


def refused(tmp_path, content):
    """The one line that refuses ``content``, without the path in front."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, content)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'c'}:")
    return message.removeprefix(f"{tmp_path / 'c'}:").strip()


def test_text_and_binary_of_both_messages_are_detected(tmp_path):
    plain, engine = load(tmp_path, PLAIN), load(tmp_path, ENGINE)
    binary = plain.to_proto().SerializeToString(deterministic=True)
    assert whole(load(tmp_path, binary)) == whole(plain)
    assert whole(load(tmp_path, whole(engine))) == whole(engine)
    assert len(engine.to_engine_proto().table) == 1


@pytest.mark.parametrize("name", ["tensorflow.tpu.TPUEmbeddingConfiguration", "penstock.tpu.TPUEmbeddingConfiguration"])
def test_a_proto_message_header_names_the_message(tmp_path, name):
    assert load(tmp_path, f"# proto-file: x.proto\n# proto-message: {name}\n{PLAIN}").table_names == ("a",)


def test_a_proto_message_header_overrides_the_detected_form(tmp_path):
    problem = refused(tmp_path, f"# proto-message: penstock.EngineConfig\n{PLAIN}")
    assert problem.startswith("2:1: EngineConfig has no field 'table_descriptor'")


def test_a_proto_message_header_of_another_message_is_refused(tmp_path):
    assert refused(tmp_path, f"\n# proto-message: my.Config\n{PLAIN}").startswith("2:1: proto-message is my.Config")


def test_a_byte_order_mark_is_skipped(tmp_path):
    assert load(tmp_path, b"\xef\xbb\xbf" + PLAIN.encode()).table_names == ("a",)


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"# nothing\n", "no tables"),
        (b"ARROW1\0\0\xff", "this is an Arrow file"),
        (b"\xff\xff\xff\xff\x10\0\0\0", "this is an Arrow stream"),
        (b"PAR1\x15\x04", "this is a Parquet file"),
        (b"\x1f\x8b\x08\0", "this is gzip-compressed"),
        (WORKED_BYTES[:-3], "neither text nor a whole binary"),
        (b"\x82\x7d\x00", "has no field of a TPUEmbeddingConfiguration"),
        (b"mode: TRAINING # caf\xe9", "1:21: not UTF-8"),
        (b"\n  tabel_descriptor { }", "2:3: TPUEmbeddingConfiguration has no field 'tabel_descriptor'; did you mean"),
        (b"mode: TRAIN", "1:7: Mode has no value 'TRAIN'; did you mean 'TRAINING'"),
        (b"mode: 1 mode: 2", "1:15: "),
        (b"table_descriptor { name: 3 }", "1:26: Expected string"),
        (b"table_descriptor { dimension: 99999999999 }", "1:31: Value out of range"),
        (
            b'tpu_embedding_configuration { mode: TRAINING } tabl { name: "a" }',
            "1:48: EngineConfig has no field 'tabl'",
        ),
        (b"}", "1:1: Expected identifier"),
        (b"gate { }", "no tables"),
        (b'{"table_descriptor": []}', "1:1: "),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path, content, start):
    assert refused(tmp_path, content).startswith(start)


def test_an_invalid_configuration_names_the_file(tmp_path):
    assert refused(tmp_path, PLAIN.replace("dimension: 4", "")).startswith("table 'a': dimension is 0")


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.pbtxt: no such file"):
        EmbeddingConfig.load(tmp_path / "none.pbtxt")
    with pytest.raises(ConfigError, match="is a directory"):
        EmbeddingConfig.load(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot be read: Not a directory|no such file"):
        EmbeddingConfig.load(os.path.join(__file__, "x"))
    with pytest.raises(ConfigError, match="cannot be read: embedded null"):
        EmbeddingConfig.load("a\0b")


# The worked example with field 77 = 5 in addition to the known ones, and field 99 = "x" in its first table.
UNKNOWN = b"\x0a\x2c" + WORKED_BYTES[2:42] + b"\x9a\x06\x01x" + WORKED_BYTES[42:] + b"\xe8\x04\x05"


@pytest.mark.promise("Fields of a newer configuration survive loading and saving")
@pytest.mark.parametrize("name", ["c.pb", "c.binpb", "c"])
def test_unknown_binary_fields_survive(tmp_path, name):
    config = load(tmp_path, UNKNOWN)
    assert config.to_proto().SerializeToString(deterministic=True) == UNKNOWN
    config.save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == UNKNOWN


def test_text_refuses_to_lose_unknown_fields(tmp_path):
    with pytest.raises(ConfigError, match=r"TPUEmbeddingConfiguration has fields .* ends in \.pb"):
        load(tmp_path, UNKNOWN).save(tmp_path / "c.pbtxt")
    with pytest.raises(ConfigError, match=r"table_descriptor\[0\] has fields"):
        load(tmp_path, UNKNOWN[:-3]).save(tmp_path / "c.pbtxt")
    assert not (tmp_path / "c.pbtxt").exists()


@pytest.mark.parametrize("name", ["c.pbtxt", "c.textproto", "c.txt", "c.pb"])
@pytest.mark.parametrize("content", [WORKED_BYTES, ENGINE])
def test_saved_configurations_load_again(tmp_path, name, content):
    config = load(tmp_path, content)
    config.save(tmp_path / name)
    assert whole(EmbeddingConfig.load(tmp_path / name)) == whole(config)
    assert sorted(os.listdir(tmp_path)) == sorted({"c", name})


def test_tensorflows_message_is_saved_where_it_suffices(tmp_path):
    tables = [TableConfig(10, 4, name="a")]
    EmbeddingConfig.from_tables(tables, Adagrad()).save(tmp_path / "plain.pbtxt")
    EmbeddingConfig.from_tables(tables, Adagrad(0.1, 0.5)).save(tmp_path / "whole.pbtxt")
    assert (tmp_path / "plain.pbtxt").read_text().startswith("# proto-message: tensorflow.tpu.TPUEmbedding")
    assert "# proto-message: penstock.EngineConfig\n" in (tmp_path / "whole.pbtxt").read_text()


def test_classes_survive_a_file(tmp_path):
    tables = [TableConfig(10, 4, Uniform(-0.1, 0.1), SGD(0.1, clipvalue=0.3)), TableConfig(2**40, 3, name="é\n\"'")]
    config = EmbeddingConfig.from_tables(tables, Adagrad(0.1, 0.7, clip_weight_max=-0.0), num_required=2)
    config.save(tmp_path / "c.pbtxt")
    assert EmbeddingConfig.load(tmp_path / "c.pbtxt").tables == config.tables


def test_a_callable_start_cannot_be_saved(tmp_path):
    config = EmbeddingConfig.from_tables([TableConfig(10, 4, lambda shape, dtype: None)], SGD())
    with pytest.raises(ConfigError, match="table 'table_0': its initializer is a Python callable"):
        config.save(tmp_path / "c.pb")


@pytest.mark.parametrize("suffix", ["pbtxt", "pb"])
@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        (SGD(1e39), "table 'a': learning rate is inf"),
        (SGD(float("nan")), "table 'a': learning rate is nan"),
        (SGD(weight_decay_factor=1e39), "table 'a': weight_decay_factor is inf"),
        (SGD(clip_weight_min=float("nan")), "table 'a': clipping_limits has a bound that is nan"),
        (AdagradMomentum(momentum=1e300), "table 'a': adagrad_momentum.momentum is inf"),
        (Adam(beta_1=float("nan")), "table 'a': adam.beta1 is nan"),
        (Adagrad(initial_accumulator_value=1e300), "settings of table 'a': slot 'accumulators' starts at inf"),
    ],
)
def test_configurations_that_load_would_refuse_are_not_saved(tmp_path, optimizer, problem, suffix):
    config = EmbeddingConfig.from_features([FeatureConfig(TableConfig(10, 4, name="a", optimizer=optimizer))], 2)
    path = tmp_path / f"c.{suffix}"
    path.write_bytes(b"as it was")
    with pytest.raises(ConfigError, match=re.escape(f"{path}: not saved, it could not be loaded again: {problem}")):
        config.save(path)
    assert path.read_bytes() == b"as it was"


def test_a_directory_that_does_not_exist_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path, PLAIN).save(tmp_path / "none" / "c.pb")
