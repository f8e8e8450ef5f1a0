"""Calls of one object that are taken one after another, whatever threads they come from."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

C = TypeVar("C", bound=Callable[..., Any])


def in_turn(call: C) -> C:
    """Return a method that waits until no other thread is in one of those of its object.

    The object has a `lock` that whoever holds it may take again.
    """

    @wraps(call)
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return call(self, *args, **kwargs)

    return cast(C, held)
