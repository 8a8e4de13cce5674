#!/bin/sh
# Remake *_pb2.py and *_pb2.pyi from the .proto files; run from anywhere, needs grpcio-tools 1.75.
# PYTHON names the interpreter that has them. The generator decides the oldest protobuf runtime that can load the
# result (1.75 writes 6.31 code): a newer one would raise the lower bound in pyproject.toml.
set -eu
cd "$(dirname "$0")/../../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# The virtual path makes the registered file names start with penstock/, so they cannot clash with TensorFlow's.
"${PYTHON:-python}" -m grpc_tools.protoc -I penstock/config=engine/model/config --python_out="$out" --pyi_out="$out" \
    penstock/config/optimization_parameters.proto \
    penstock/config/tpu_embedding_configuration.proto \
    penstock/config/engine_config.proto
# protoc leaves Mapping and **kwargs bare, which a strict type checker refuses, and takes the virtual path for the
# package.
for made in "$out"/penstock/config/*_pb2.py*; do
    sed -e 's/_Mapping\]/_Mapping[str, object]]/g' -e 's/\*\*kwargs)/**kwargs: object)/' -e 's/^from penstock.config import/from penstock.model.config import/' \
        -e "s/'penstock.config\./'penstock.model.config./" "$made" > "engine/model/config/$(basename "$made")"
done
