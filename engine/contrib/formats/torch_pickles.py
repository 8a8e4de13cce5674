"""Where a file of torch.save has an object that is not loaded, and what else it has. Nothing in it is imported."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from penstock.base.errors import listed
from penstock.io.table_formats.table_format import leaves

_TENSORS = "torch._utils._rebuild_"


class _Stub:
    """Stands for an object of any class, with its state. origin : of its class, or the function that makes it"""

    origin = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.state: Any = None
        self.parts: dict[Any, Any] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts[repr(key) if isinstance(key, _Stub) else key] = value

    def append(self, value: Any) -> None:
        self.parts[len(self.parts)] = value

    add = append

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)


class _StubUnpickler(pickle.Unpickler):
    """Unpickles with a stub in place of whatever the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Stub,), {"origin": f"{module}.{name}"})

    def persistent_load(self, _: Any) -> Any:
        return None  # the storage of a tensor


def refusal(path: Path, origin: str, names: tuple[str, ...]) -> str:
    """Return why a file of torch.save is refused, and how to save what it has.

    origin : of the object that is not loaded; names : in the archive, () if it is none
    """
    only = "whose class penstock does not load: only tensors, plain data and NumPy's"
    load = f"torch.load({str(path)!r}, weights_only=False)"
    try:
        state = _state(path, names)
        stubs = [(keys, value) for keys, value in leaves(state) if isinstance(value, _Stub)]
    except Exception:  # a stub may not do what the pickle expects
        return f"contains an object of {origin}, {only}; save a state_dict, with torch.save"
    place = next((keys for keys, value in stubs if f".{value.origin}".endswith(f".{origin}")), None)
    if place == ():
        advice = f"where you trust the file, torch.save({load}.state_dict(), NEW)"
        return f"a whole object of {origin}, such as a torch.nn.Module, {only}; {advice}"
    subject = "" if place is None else f"'{'.'.join(map(str, place))}' is "
    problem = f"{subject}an object of {origin}, {only}"
    if not isinstance(state, dict):
        return f"{problem}; save a state_dict, with torch.save"
    others = [key for key in state if place is None or key != place[0]]
    tensors = {keys[0] for keys, value in stubs if value.origin.startswith(_TENSORS)}
    with_tensors = [key for key in others if key in tensors]
    there = f"; the file also has {listed(map(str, others))}" if others else ""
    if not with_tensors:
        return f"{problem}{there}; save a state_dict, with torch.save"
    return f"{problem}{there}; where you trust it, torch.save({load}[{with_tensors[0]!r}], NEW)"


def _state(path: Path, names: tuple[str, ...]) -> Any:
    if not names:
        with path.open("rb") as file:
            for _ in range(3):  # torch's number, its version and the machine
                pickle.Unpickler.load(_StubUnpickler(file))
            return _StubUnpickler(file).load()
    with zipfile.ZipFile(path) as archive:
        (name, *_) = [name for name in names if name.endswith("/data.pkl")]
        return _StubUnpickler(io.BytesIO(archive.read(name))).load()
