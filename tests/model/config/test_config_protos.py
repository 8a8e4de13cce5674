"""The protos are TensorFlow's on the wire and in text, under names of our own."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from text_configs import serialized

from penstock.model.config.engine_config_pb2 import DESCRIPTOR as ENGINE_FILE
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.optimization_parameters_pb2 import DESCRIPTOR as PARAMETERS_FILE
from penstock.model.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.model.config.tpu_embedding_configuration_pb2 import DESCRIPTOR as CONFIGURATION_FILE
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration


def without_json_names(file):
    """As text; protoc leaves these names out of the code that it generates."""
    return "".join(line for line in str(file).splitlines(keepends=True) if "json_name" not in line)


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
    source = Path(__file__).resolve().parents[3] / "engine" / "model" / "config"
    out = tmp_path / "set"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-Ipenstock/config={source}", f"-o{out}", file.name], check=True
    )
    committed = FileDescriptorProto.FromString(file.serialized_pb)
    assert without_json_names(FileDescriptorSet.FromString(out.read_bytes()).file[0]) == str(committed)


def test_engine_settings_cannot_be_mistaken_for_tensorflows_fields():
    ours = {field.number for field in EngineConfig.DESCRIPTOR.fields}
    assert min(ours) > 1000 > max(field.number for field in TPUEmbeddingConfiguration.DESCRIPTOR.fields)
