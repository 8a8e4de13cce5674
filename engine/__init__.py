"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded on first use: importing penstock loads
neither jax nor pyarrow.
"""

__version__ = "0.1.0"

_modules: dict[str, str] = {}  # of public names, once one was asked for


def __getattr__(name: str) -> object:
    import importlib

    if name == "__all__":
        return sorted([*_modules_by_name(), *_optimizers()])
    if (module := _modules_by_name().get(name)) == "penstock":
        return importlib.import_module(f"penstock.{name}")
    if module is not None:
        value = getattr(importlib.import_module(module), name)
    elif name.startswith("_") or (value := _optimizers().get(name)) is None:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    globals()[name] = value
    return value


def _modules_by_name() -> dict[str, str]:
    """Return the module of every public name but the optimizers, as the stub lists them for type checkers."""
    import re

    if not _modules:
        with open(f"{__file__}i", encoding="utf-8") as stub:
            statements = re.findall(r"^from (\S+) import (\([^)]*|.*)", stub.read(), re.MULTILINE)
        _modules.update({name: module for module, names in statements for name in re.findall(r"(\w+) as", names)})
    return _modules


def _optimizers() -> dict[str, object]:
    """Return every optimizer's class by name. A class that its module lists needs no entry in the stub."""
    from penstock.updates import OPTIMIZERS

    return {optimizer.__name__: optimizer for optimizer in OPTIMIZERS.values()}


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})  # type: ignore[misc]
