"""What ``inspect.signature`` and ``help`` show of every public callable, as plain data."""

import inspect
import re

import penstock

PACKAGES = ("bridge", "functional", "updates")


def public_calls():
    """name → function or class, of every public name and every public method of a public class."""
    named = {name: getattr(penstock, name) for name in penstock.__all__ if name not in PACKAGES}
    for package in PACKAGES:
        module = getattr(penstock, package)
        named |= {f"{package}.{name}": getattr(module, name) for name in module.__all__}
    return with_methods(named)


def with_methods(named):
    """Those of these names that can be called, and the public methods of the classes among them."""
    calls = {}
    for name, value in named.items():
        calls[name] = value
        if inspect.isclass(value):
            kinds = [kind for kind in value.__mro__ if kind.__module__.startswith("penstock.")]
            attributes = {attribute for kind in kinds for attribute in vars(kind) if not attribute.startswith("_")}
            methods = {f"{name}.{attribute}": getattr(value, attribute) for attribute in attributes}
            calls |= {method: call for method, call in methods.items() if inspect.isroutine(call)}
    return {name: call for name, call in sorted(calls.items()) if callable(call)}


def signature_of(call):
    """Parameter → its kind and default. None for a class whose arguments Python cannot show."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return None
    return {
        parameter.name: [
            parameter.kind.description,
            None if parameter.default is parameter.empty else re.sub(r" at 0x\w+", "", repr(parameter.default)),
        ]
        for parameter in parameters
    }


def documented_in(call):
    """The parameters that the docstring explains, or those of a class that its ``__init__`` explains."""
    texts = [inspect.getdoc(call), inspect.getdoc(call.__init__) if inspect.isclass(call) else None]
    lists = re.findall(r"(?:^|; )[ *]*((?:\w+, )*\w+) :", "\n".join(filter(None, texts)), re.MULTILINE)
    return sorted(set(", ".join(lists).split(", ")) & set(signature_of(call) or ()))


def shown():
    """Of every public callable: its parameters, those that its help explains, and whether it has help at all."""
    return {
        name: {
            "parameters": signature_of(call),
            "explained": documented_in(call),
            "has_help": bool(inspect.getdoc(call)),
        }
        for name, call in public_calls().items()
    }
