"""What the fields of settings may hold: values of the types that stand beside them, whoever wrote these."""

import math
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from vicinal.errors import ConfigError

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a word",
    NoneType: "none",
}


def check_fields(settings: Any) -> None:
    """Raise a ConfigError if a field of a dataclass holds what its annotation does not allow.

    Which of several words it may be is left to who lists them.
    """
    for name, hint in _hints(settings.__class__).items():
        value = getattr(settings, name)
        if not fits(value, hint):
            raise ConfigError(f"{name} is {described(hint)}, not {value!r:.60}")


def fits(value: object, hint: Any) -> bool:
    """Return whether a value is of an annotated type: True is no number, numbers finite, literals words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str)
    if origin in (tuple, list):
        return isinstance(value, tuple | list) and all(fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if hint is bool or isinstance(value, bool):
        return hint in (bool, Any) and isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral)
    if hint is float:
        return isinstance(value, Real) and math.isfinite(value)
    return hint is Any or isinstance(value, hint)


def described(hint: Any) -> str:
    """Return in words what an annotation allows."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(described(one) for one in inner)
    if origin is Literal:
        return WORDS[str]
    if origin in (tuple, list):
        return f"a list, each {described(inner[0])}"
    return WORDS.get(hint) or (origin or hint).__name__


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields."""
    found = get_type_hints(kind)
    return {name: hint for name, hint in found.items() if get_origin(hint) is not ClassVar}
