"""TensorFlow and penstock in one process: either order, each other's bytes, the same schema, the same messages.

Runs where TensorFlow is installed. Each test is a separate process, because the order of imports matters.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
from limits import HANG_S

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: nothing to share a process with",
)

TENSORFLOW = "import tensorflow as tf"
PENSTOCK = (
    "import penstock; from penstock.model.config import engine_config_pb2, tpu_embedding_configuration_pb2 as ours"
)

EACH_OTHERS_BYTES = """
from tensorflow.core.protobuf.tpu import tpu_embedding_configuration_pb2 as theirs
table = penstock.TableConfig(100, 8, name="user", quantization_config=penstock.QuantizationConfig(16, -1.0, 2.5))
config = penstock.EmbeddingConfig.from_features(
    {"u": penstock.FeatureConfig(table, 3, name="u")}, 8, penstock.Adam(lambda: 0.5, clipvalue=(None, 1.0)), num_hosts=2
)
content = config.to_proto().SerializeToString(deterministic=True)
message = theirs.TPUEmbeddingConfiguration.FromString(content)
assert message.table_descriptor[0].optimization_parameters.adam.use_sum_inside_sqrt
assert message.SerializeToString(deterministic=True) == content
again = penstock.EmbeddingConfig.from_proto(message)
assert again.to_proto().SerializeToString(deterministic=True) == content
from google.protobuf import text_format
assert text_format.MessageToString(message) == text_format.MessageToString(config.to_proto())
print("parsed")
"""

SAME_SCHEMA = """
from tensorflow.core.protobuf.tpu import optimization_parameters_pb2, tpu_embedding_configuration_pb2
from penstock.model.config import optimization_parameters_pb2 as our_parameters
def fields(message):
    return {
        (f.name, f.number, f.type, f.is_repeated, f.containing_oneof.name if f.containing_oneof else None)
        for f in message.fields
    }
def enums(owner):
    return {(e.name, v.name, v.number) for e in owner.enum_types_by_name.values() for v in e.values}
def compare(their, our):
    assert fields(their) == fields(our), (their.full_name, fields(their) ^ fields(our))
    assert enums(their) == enums(our), their.full_name
    assert their.nested_types_by_name.keys() == our.nested_types_by_name.keys(), their.full_name
    for name, nested in their.nested_types_by_name.items():
        compare(nested, our.nested_types_by_name[name])
compared = 0
for their, our in ((optimization_parameters_pb2, our_parameters), (tpu_embedding_configuration_pb2, ours)):
    for name, message in their.DESCRIPTOR.message_types_by_name.items():
        compare(message, our.DESCRIPTOR.message_types_by_name[name])
        compared += 1
assert compared > 25, compared
print("same schema")
"""

SAME_CLASSES = """
import inspect
from tensorflow.core.protobuf.tpu import optimization_parameters_pb2
from penstock.model.config.optimizer_protos import optimization_parameters
theirs = tf.tpu.experimental.embedding
for name in ("SGD", "Adagrad", "AdagradMomentum", "FTRL", "Adam"):
    their, our = getattr(theirs, name), getattr(penstock, name)
    signatures = [
        [(p.name, p.default) for p in inspect.signature(cls.__init__).parameters.values()][1:] for cls in (their, our)
    ]
    assert signatures[0] == signatures[1], (name, signatures)
    for arguments in ({}, {"learning_rate": 0.3, "clip_weight_max": 0.0, "weight_decay_factor": 0.1, "clipvalue": 2.0}):
        message = optimization_parameters_pb2.OptimizationParameters()
        message.learning_rate.constant = their(**arguments).learning_rate
        their(**arguments)._set_optimization_parameters(message)
        mine = optimization_parameters(our(**arguments), None)
        assert mine.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True), name
for name in ("TableConfig", "FeatureConfig", "QuantizationConfig", "RowIdInitializer"):
    their, our = (list(inspect.signature(getattr(m, name).__init__).parameters) for m in (theirs, penstock))
    # Their arguments first, in their order: a program of theirs may pass them by position.
    own = ["dynamic", "placement", "trainable", "on_gradient", "until_step"] if name == "TableConfig" else []
    assert our == their + own, (name, their, our)
rows = theirs.RowIdInitializer(3)((4, 2), tf.float32).numpy()
assert (penstock.RowIdInitializer(3)((4, 2), tf.float32) == rows).all()
table = penstock.TableConfig(10, 4, initializer=tf.keras.initializers.Ones(), dtype=tf.float32)
assert penstock.FeatureConfig(table, output_shape=tf.TensorShape([None, 3])).output_shape == (None, 3)
assert penstock.FeatureConfig(table, output_shape=tf.TensorShape(None)).output_shape is None
print("same classes")
"""


def run(*lines):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[-2]


@pytest.mark.parametrize("order", [(TENSORFLOW, PENSTOCK), (PENSTOCK, TENSORFLOW)], ids=["tensorflow", "penstock"])
def test_either_can_be_imported_first_and_they_parse_each_others_bytes(order):
    assert run(*order, EACH_OTHERS_BYTES) == "parsed"


def test_every_message_has_tensorflows_fields_numbers_and_enums():
    assert run(TENSORFLOW, PENSTOCK, SAME_SCHEMA) == "same schema"


def test_the_classes_have_tensorflows_signatures_and_write_its_messages():
    assert run(TENSORFLOW, PENSTOCK, SAME_CLASSES) == "same classes"
