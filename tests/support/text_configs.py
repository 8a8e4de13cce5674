"""Configurations in text format, as TensorFlow's message and as penstock's, and their parts."""

import base64

from google.protobuf import text_format

from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

# What TensorFlow 2.21 writes for two tables (SGD with everything set, Adagrad) and three features.
WORKED_BYTES = base64.b64decode(
    "CigKBHVzZXIQ6AcYECobIgA6BxIFDQAAwD9qAhIAhQEK1yM8iAEBsAEBChgKBGl0ZW0QMhgIKgwaAGoFDQAAgD6IAQEQAiACKAQ4AVIGCgF1GgEI"
    "UggKAWkQARoBCFILCgNzZXEQARoCCAQ="
)
TABLE = """table_descriptor { name: "%s" vocabulary_size: 10 dimension: 4
  optimization_parameters { %s { } learning_rate { %s } } }"""
PLAIN = TABLE % ("a", "adagrad", "constant: 0.5")
GOOD = """
table_descriptor {
  name: "a"
  vocabulary_size: 10
  dimension: 4
  optimization_parameters {
    adagrad { }
    learning_rate { constant: 0.5 }
  }
}
mode: TRAINING
"""
FEATURE = 'feature_descriptor { name: "f" input_shape: 8 }'


def engine_text(settings, tables=PLAIN):
    """A configuration with settings of an engine, as text."""
    return f"tpu_embedding_configuration {{ {tables} }} {settings}"


def plain(text):
    """The configuration of TensorFlow's message, from text."""
    return EmbeddingConfig.from_proto(text_format.Parse(text, TPUEmbeddingConfiguration()))


def engine(settings, tables=PLAIN):
    """The configuration of such a text."""
    return EmbeddingConfig.from_proto(text_format.Parse(engine_text(settings, tables), EngineConfig()))


def serialized(message):
    """A message as bytes."""
    return message.SerializeToString(deterministic=True)
