from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_T = TypeVar("_T")

def call_under(lock: AbstractContextManager[Any], work: Callable[..., _T], *arguments: Any) -> _T: ...
