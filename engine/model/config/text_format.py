"""Read and write configuration files: a TPUEmbeddingConfiguration or an EngineConfig, as text or as binary.

Reading recognizes the message and its encoding by the content; writing chooses the encoding by the suffix of the path.
This module converts bytes to messages and back, and validates no message. Bad content is a ConfigError of one line
that names the file and, in a text, the location. A path that cannot be written is an OSError.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.base.errors import ConfigError
from penstock.base.filesystem import atomic_files
from penstock.model.config import engine_config_pb2
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.lint.findings import near
from penstock.model.config.lint.source_text import Scan, scan
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

TEXT_SUFFIXES = (".pbtxt", ".textproto", ".txtpb", ".txt")

MAX_BYTES = 2**31 - 1  # protobuf's limit for one message
READ_BYTES = 1 << 24  # at a time: Python allocates as many bytes as a read asks for, even for a small file

# The first bytes of files that users pass by mistake → the kind of file.
MAGIC = {
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "gzip-compressed",
    b"PK\x03\x04": "a zip archive",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}

# Bytes that no text contains. A binary table always contains 0x10 and 0x18, the tags of vocabulary_size and dimension.
CONTROL = bytes(c for c in range(32) if c not in b"\t\n\v\f\r")

# The comment that names the message type. It counts only above the first field: below, it is the header of a message
# that was pasted into this one.
HEADER = re.compile(r"\A(?:[ \t]*(?:#[^\n]*)?\r?\n)*?[ \t]*#[ \t]*proto-message:[ \t]*(\S+)")
# Errors truncate words of this many characters or more, so that they stay one readable line.
_WORD_LENGTH = 200
_WORD = re.compile(rf"\w{{{_WORD_LENGTH},}}")
KINDS: dict[str, type[TPUEmbeddingConfiguration] | type[EngineConfig]] = {
    "TPUEmbeddingConfiguration": TPUEmbeddingConfiguration,
    "EngineConfig": EngineConfig,
}


def read(path: str | os.PathLike[str]) -> tuple[EngineConfig, Scan | None]:
    """Read a file into an EngineConfig, which is not validated. Also return the scan of a text; None if it is binary.

    Raises ConfigError.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = file.read(8)
            for magic, kind in MAGIC.items():
                if content.startswith(magic):
                    raise ConfigError(f"{name}: this is {kind}; a configuration is a text or binary proto message")
            while piece := file.read(READ_BYTES):
                content += piece
                if len(content) > MAX_BYTES:
                    raise ConfigError(f"{name}: is larger than a proto message can be; is it another kind of file?")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file; give the path of a configuration") from None
    except IsADirectoryError:
        raise ConfigError(f"{name}: is a directory; give the path of a configuration file") from None
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(_line(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}")) from None
    if not content.strip():
        raise ConfigError(f"{name}: is empty; a configuration needs at least one table_descriptor")
    is_text = len(content.translate(None, CONTROL)) == len(content)
    try:
        return _parse_text(_decode(content)) if is_text else (parse_binary(content), None)
    except _LocatedError as error:
        raise ConfigError(_line(f"{name}:{error.line}:{error.column}: {error}")) from None
    except ConfigError as error:
        raise ConfigError(_line(f"{name}: {error}")) from None


class _LocatedError(ConfigError):
    """A problem in a text. line, column : where it is, from 1 on"""

    def __init__(self, problem: str, line: int, column: int) -> None:
        super().__init__(problem)
        self.line, self.column = line, column


def _line(text: str) -> str:
    return " ".join(text.split())


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        column = error.start - (before.rfind(b"\n") + 1) + 1
        raise _LocatedError("not UTF-8; save the text as UTF-8", before.count(b"\n") + 1, column) from None


def parse_binary(content: bytes) -> EngineConfig:
    """Parse a binary TPUEmbeddingConfiguration or EngineConfig into an EngineConfig, with its unknown fields.

    Raises ConfigError.
    """
    try:
        engine = EngineConfig.FromString(content)
        if engine.ListFields():
            return engine
        config = TPUEmbeddingConfiguration.FromString(content)
    except (DecodeError, UnicodeDecodeError):  # protobuf's pure-Python runtime raises UnicodeDecodeError
        raise ConfigError(
            "neither text nor a whole binary TPUEmbeddingConfiguration or EngineConfig; "
            "is it another kind of file, or cut off?"
        ) from None
    if not config.ListFields():
        raise ConfigError("has no field of a TPUEmbeddingConfiguration or EngineConfig; is it another kind of file?")
    return EngineConfig(tpu_embedding_configuration=config)


def _parse_text(text: str) -> tuple[EngineConfig, Scan]:
    kinds = list(KINDS.values())
    header = HEADER.search(text)
    if header is not None:
        kind = KINDS.get(header[1].rsplit(".", 1)[-1])
        if kind is None:
            line = text.count("\n", 0, header.end()) + 1
            raise _LocatedError(f"proto-message is {header[1]}; expected {' or '.join(KINDS)}", line, 1)
        kinds = [kind]
    failures = []
    for kind in kinds:
        try:
            message = text_format.Parse(text, kind())
        except text_format.ParseError as error:
            failures.append(_located(error, text))
        except Exception as error:  # the parser does not convert every built-in exception to a ParseError
            failures.append(_LocatedError(f"cannot be parsed: {error}", 1, 1))
        else:
            config = message if isinstance(message, EngineConfig) else EngineConfig(tpu_embedding_configuration=message)
            return config, scan(text, kind)
    # Report the type whose parse got furthest: most likely the author intended that one.
    raise max(failures, key=lambda failure: (failure.line, failure.column))


def _located(error: text_format.ParseError, text: str) -> _LocatedError:
    """Return the parser's error with its location and, for an unknown name, similar names; without the source line."""
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    problem = str(error).removeprefix(f"{line}:{column} : ")
    source = text.split("\n")[line - 1] if line <= text.count("\n") + 1 else ""
    problem = problem.removeprefix(f"'{source}': ").rstrip(".")
    field = re.search(r'Message type "([\w.]+)" has no field named "(\w+)', problem)
    value = re.search(r'Enum type "([\w.]+)" has no value named (\w+)', problem)
    if field is not None and (message := _descriptor(field[1])) is not None:
        problem = f"{message.name} has no field '{field[2]}'; " + near(field[2], message.fields_by_name)
    elif value is not None and (owner := _descriptor(value[1].rsplit(".", 1)[0])) is not None:
        enum = owner.enum_types_by_name[value[1].rsplit(".", 1)[1]]
        problem = f"{enum.name} has no value '{value[2]}'; " + near(value[2], enum.values_by_name)
    problem = _WORD.sub(lambda word: f"{word[0][:_WORD_LENGTH]}…", problem)
    return _LocatedError(problem.replace("penstock.tpu.", ""), line, column)


def _descriptor(name: str) -> Descriptor | None:
    """Return the message type with this full name; None if the schema has none."""
    pool = engine_config_pb2.DESCRIPTOR.pool
    with contextlib.suppress(KeyError):
        return pool.FindMessageTypeByName(name)
    return None


def parse_stored(content: bytes) -> EngineConfig:
    """Parse the bytes of an EngineConfig that a commit stores. Raises ValueError if they are no such message."""
    try:
        return EngineConfig.FromString(content)
    except DecodeError as error:
        raise ValueError(f"its configuration cannot be read: {error}") from None


def write(message: EngineConfig, path: str | os.PathLike[str]) -> None:
    """Write ``message`` to a file, atomically and durably.

    The file is a TPUEmbeddingConfiguration (TensorFlow's message) if ``message`` sets nothing else, else an
    EngineConfig. It is text if the path ends in one of TEXT_SUFFIXES, else binary.
    Raises ConfigError if text would lose a field, OSError if the path cannot be written.
    """
    name = os.fspath(path)
    settings = EngineConfig()
    settings.CopyFrom(message)
    settings.ClearField("tpu_embedding_configuration")
    to_write: Message = message if settings.ByteSize() else message.tpu_embedding_configuration
    is_text = Path(name).suffix.lower() in TEXT_SUFFIXES
    content = _text(name, to_write).encode() if is_text else to_write.SerializeToString(deterministic=True)
    with atomic_files.publishing(Path(name)) as file:
        file.write(content)


def _text(name: str, message: Message) -> str:
    """Return a message as text. name : of the file, for errors. Raises ConfigError if text would lose a field."""
    path = unknown_fields(message)
    if path is not None:
        problem = f"{path} has fields that this version does not know, which text would lose"
        raise ConfigError(_line(f"{name}: {problem}; save as binary, to a path that ends in .pb"))
    if isinstance(message, EngineConfig):
        header = f"# proto-file: {engine_config_pb2.DESCRIPTOR.name}\n# proto-message: penstock.EngineConfig\n"
    else:
        header = "# proto-message: tensorflow.tpu.TPUEmbeddingConfiguration\n"
    return header + text_format.MessageToString(message)


def unknown_fields(message: Message, path: str = "") -> str | None:
    """Return the path of the first message that has a field outside the schema; None if there is none.

    path : of ``message``; "": it is the whole configuration
    """
    if len(UnknownFieldSet(message)):
        return path or message.DESCRIPTOR.name
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        singular = isinstance(value, Message)
        for index, child in enumerate([value] if singular else value):
            step = f"{path}.{field.name}".lstrip(".") + ("" if singular else f"[{index}]")
            unknown = unknown_fields(child, step)
            if unknown is not None:
                return unknown
    return None
