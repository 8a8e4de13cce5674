"""Where a file of torch.save has an object that is not loaded, and what else it has. Nothing in it is imported."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import listed

_TENSORS = "torch._utils._rebuild_"
_DEEPEST = 20


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
    load = f"torch.load('{path}', weights_only=False)"
    try:
        state = _state(path, names)
    except Exception:  # whatever a pickle causes that no class of its own reads
        return f"contains an object of {origin}, {only}; save a state_dict, with torch.save"
    found = ((at, value) for at, value in _walk(state) if isinstance(value, _Stub))
    at = next((at for at, value in found if f".{value.origin}".endswith(f".{origin}")), None)
    if at == ():
        advice = f"where you trust the file, torch.save({load}.state_dict(), NEW)"
        return f"a whole object of {origin}, such as a torch.nn.Module, {only}; {advice}"
    where = "" if at is None else f"'{'.'.join(map(str, at))}' is "
    problem = f"{where}an object of {origin}, {only}"
    if not isinstance(state, dict):
        return f"{problem}; save a state_dict, with torch.save"
    keys = [key for key, value in state.items() if at is None or key != at[0]]
    best = next((key for key in keys if any(_is_tensor(value) for _, value in _walk(state[key]))), None)
    there = f"; the file also has {listed(map(str, keys))}" if keys else ""
    if best is None:
        return f"{problem}{there}; save a state_dict, with torch.save"
    return f"{problem}{there}; where you trust it, torch.save({load}[{best!r}], NEW)"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, _Stub) and value.origin.startswith(_TENSORS)


def _state(path: Path, names: tuple[str, ...]) -> Any:
    if not names:
        with path.open("rb") as file:
            for _ in range(3):  # the magic number, the version and the machine
                pickle.Unpickler.load(_StubUnpickler(file))
            return _StubUnpickler(file).load()
    with zipfile.ZipFile(path) as archive:
        (name, *_) = [name for name in names if name.endswith("/data.pkl")]
        return _StubUnpickler(io.BytesIO(archive.read(name))).load()


def _walk(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path to each value, and the value, from the outside in."""
    yield at, value
    if len(at) == _DEEPEST:
        return
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return
    for key, item in items:
        yield from _walk(item, (*at, key))
