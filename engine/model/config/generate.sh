#!/bin/sh
# Remake *_pb2.py and *_pb2.pyi from the .proto files; run from anywhere, needs grpcio-tools 1.75.
# PYTHON names the interpreter that has them. The generator decides the oldest protobuf runtime that can load the
# result (1.75 writes 6.31 code): a newer one would raise the lower bound in pyproject.toml.
set -eu
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# The virtual path makes the registered file names start with penstock/, so they cannot clash with TensorFlow's.
"${PYTHON:-python}" -m grpc_tools.protoc -I penstock/config=engine/config --python_out="$out" --pyi_out="$out" \
    penstock/config/optimization_parameters.proto \
    penstock/config/tpu_embedding_configuration.proto \
    penstock/config/engine_config.proto
# protoc leaves Mapping bare, which a strict type checker refuses.
for stub in "$out"/penstock/config/*_pb2.pyi; do
    sed 's/_Mapping\]/_Mapping[str, object]]/g' "$stub" > "engine/model/config/$(basename "$stub")"
done
cp "$out"/penstock/config/*_pb2.py engine/model/config/
