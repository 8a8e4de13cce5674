"""Options as the keywords of a call: their defaults, its signature and its docstring."""

import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penstock.options import options_of
from penstock.validation import check_known

Called = TypeVar("Called", bound=Callable[..., Any])


def with_defaults(call: str, mode: str, concerns: tuple[type, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with the defaults of the others. Raise UsageTypeError for an unknown one."""
    options = options_of(mode, *concerns)
    check_known(call, keywords, options)
    return {name: option.default_in(mode) for name, option in options.items()} | dict(keywords)


def with_keywords(mode: str, *concerns: type) -> Callable[[Called], Called]:
    """Return a decorator: the signature of a function, and ``{options}`` in its docstring, list a mode's keywords.

    ``{options}`` stands in a numpydoc section Parameters.
    """

    def decorated(function: Called) -> Called:
        options = options_of(mode, *concerns).values()
        signature = inspect.signature(function)
        named = [value for value in signature.parameters.values() if value.kind is not value.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        named += [
            inspect.Parameter(option.name, kind, default=option.default_in(mode), annotation=option.hint)
            for option in options
        ]
        function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        texts = [
            f"{option.name} : {option.hint}, default {option.default_in(mode)!r}\n"
            + textwrap.fill(option.described, 112, initial_indent="    ", subsequent_indent="    ")
            for option in options
        ]
        function.__doc__ = (inspect.getdoc(function) or "").replace("{options}", "\n".join(texts))
        return function

    return decorated
