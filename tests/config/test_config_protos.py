"""The protos are TensorFlow's on the wire and in text, under names of our own."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from text_configs import WORKED_BYTES

from penstock.config.engine_config_pb2 import DESCRIPTOR as ENGINE_FILE
from penstock.config.engine_config_pb2 import EngineConfig
from penstock.config.optimization_parameters_pb2 import DESCRIPTOR as PARAMETERS_FILE
from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.tpu_embedding_configuration_pb2 import DESCRIPTOR as CONFIGURATION_FILE
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

WORKED_TEXT = """
table_descriptor {
  name: "user" vocabulary_size: 1000 dimension: 16
  optimization_parameters {
    stochastic_gradient_descent { }
    gradient_clipping_limits { upper { value: 1.5 } }
    learning_rate { dynamic { } }
    weight_decay_factor: 0.01
    gradient_accumulation_status: ENABLED
    multiply_weight_decay_factor_by_learning_rate: true
  }
}
table_descriptor {
  name: "item" vocabulary_size: 50 dimension: 8
  optimization_parameters {
    adagrad { }
    learning_rate { constant: 0.25 }
    gradient_accumulation_status: ENABLED
  }
}
mode: TRAINING num_hosts: 2 num_tensor_cores: 4 pipeline_execution_with_tensor_core: true
feature_descriptor { name: "u" input_shape: 8 }
feature_descriptor { name: "i" table_id: 1 input_shape: 8 }
feature_descriptor { name: "seq" table_id: 1 input_shape: 8 input_shape: 4 }
"""


def without_json_names(file):
    """As text; protoc leaves these names out of the code that it generates."""
    return "".join(line for line in str(file).splitlines(keepends=True) if "json_name" not in line)


def serialized(message):
    return message.SerializeToString(deterministic=True)


def test_the_worked_example_has_the_same_bytes_and_text():
    message = text_format.Parse(WORKED_TEXT, TPUEmbeddingConfiguration())
    assert serialized(message) == WORKED_BYTES
    assert TPUEmbeddingConfiguration.FromString(WORKED_BYTES) == message


def test_every_algorithm_is_a_member_of_the_oneof():
    numbers = {
        field.name: field.number for field in OptimizationParameters.DESCRIPTOR.oneofs_by_name["parameters"].fields
    }
    assert numbers == {
        "adagrad": 3,
        "stochastic_gradient_descent": 4,
        "ftrl": 5,
        "adam": 6,
        "momentum": 8,
        "rms_prop": 9,
        "centered_rms_prop": 10,
        "mdl_adagrad_light": 11,
        "adadelta": 12,
        "proximal_adagrad": 14,
        "bounded_adagrad": 19,
        "online_yogi": 20,
        "proximal_yogi": 21,
        "frequency_estimator": 23,
        "user_defined_program": 24,
        "assign": 25,
        "adagrad_momentum": 26,
        "lion": 29,
        "frequency_aware_adagrad": 30,
    }


@pytest.mark.parametrize("file", [PARAMETERS_FILE, CONFIGURATION_FILE, ENGINE_FILE], ids=lambda file: file.name)
def test_registered_names_are_our_own(file):
    assert file.name.startswith("penstock/config/")
    assert file.package == ("penstock" if file is ENGINE_FILE else "penstock.tpu")


def test_a_program_is_kept_byte_for_byte():
    # Field 24 with program { 1: "hlo" }: TensorFlow's HloModuleProto, which our schema does not know.
    parameters = OptimizationParameters.FromString(b"\xc2\x01\x07\x0a\x05\x0a\x03hlo")
    assert parameters.WhichOneof("parameters") == "user_defined_program"
    assert serialized(parameters) == b"\xc2\x01\x07\x0a\x05\x0a\x03hlo"


@pytest.mark.parametrize("file", [PARAMETERS_FILE, CONFIGURATION_FILE, ENGINE_FILE], ids=lambda file: file.name)
def test_generated_code_is_that_of_the_proto_files(file, tmp_path):
    pytest.importorskip("grpc_tools")
    source = Path(__file__).resolve().parents[2] / "engine" / "config"
    out = tmp_path / "set"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-Ipenstock/config={source}", f"-o{out}", file.name], check=True
    )
    committed = FileDescriptorProto.FromString(file.serialized_pb)
    assert without_json_names(FileDescriptorSet.FromString(out.read_bytes()).file[0]) == str(committed)


def test_engine_settings_cannot_be_mistaken_for_tensorflows_fields():
    ours = {field.number for field in EngineConfig.DESCRIPTOR.fields}
    assert min(ours) > 1000 > max(field.number for field in TPUEmbeddingConfiguration.DESCRIPTOR.fields)
