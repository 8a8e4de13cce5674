"""A method that takes one value of options, called with the options as arguments of its own."""

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from penstock.base.validation import check_known
from penstock.model.command_options import OPTIONS

Arguments = ParamSpec("Arguments")
Given = TypeVar("Given")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def with_options(
    kind: Callable[Arguments, Given],
) -> Callable[[Callable[[Owner, Given], Result]], Callable[Concatenate[Owner, Arguments], Result]]:
    """Return a decorator: the arguments of a method are the fields of the dataclass that it takes.

    ``{options}`` in its docstring, in a numpydoc section Parameters, lists the options that the docstring does not
    explain itself. A call raises UsageTypeError for an unknown keyword.
    """

    def decorated(method: Callable[[Owner, Given], Result]) -> Callable[Concatenate[Owner, Arguments], Result]:
        call, text = method.__qualname__.removesuffix(".__init__"), inspect.getdoc(method) or ""
        plain, fields = inspect.signature(method), inspect.signature(kind).parameters
        owner_itself, _ = plain.parameters.values()
        signature = plain.replace(parameters=[owner_itself, *fields.values()])

        @functools.wraps(method)
        def called(owner: Owner, /, *arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
            check_known(call, keywords, fields)
            signature.bind(owner, *arguments, **keywords)  # raises TypeError, in the words of Python
            return method(owner, kind(*arguments, **keywords))

        lines = [
            f"{option} : {given.annotation}, default {given.default!r}\n"
            + textwrap.fill(OPTIONS[option].described, 112, initial_indent="    ", subsequent_indent="    ")
            for option, given in fields.items()
            if option in OPTIONS and f"\n{option} : " not in text
        ]
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__doc__ = text.replace("{options}", "\n".join(lines))
        return called

    return decorated
