from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")

def call_under(lock: AbstractContextManager[Any], work: Callable[[], T]) -> T: ...
