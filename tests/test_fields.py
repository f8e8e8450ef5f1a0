from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from vicinal.adapters.methods import METHODS
from vicinal.errors import ConfigError
from vicinal.fields import check_fields, described, fits


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Told:
    rate: float = 0.1
    steps: int = 1
    rested: bool = False
    horizon: float | None = None
    kind: Literal["one", "two"] = "one"
    names: tuple[str, ...] = ()
    inner: Inner | None = None
    shared: ClassVar[Mapping[str, int]] = MappingProxyType({})  # of the class: nobody tells it


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"rate": 1},
        {"rate": np.float32(0.5), "steps": np.int64(3)},
        {"horizon": 5.0, "names": ("a", "b"), "inner": Inner(2)},
        {"names": ["a"]},
        {"kind": "three"},  # who lists the words refuses it
    ],
)
def test_what_a_field_may_hold(given: dict[str, Any]) -> None:
    check_fields(Told(**given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rate": "much"}, "rate is a finite number, not 'much'"),
        ({"rate": True}, "rate is a finite number, not True"),
        ({"rate": float("nan")}, "rate is a finite number, not nan"),
        ({"rate": float("inf")}, "rate is a finite number, not inf"),
        ({"rate": 1j}, "rate is a finite number, not 1j"),
        ({"steps": 1.5}, "steps is a whole number, not 1.5"),
        ({"steps": True}, "steps is a whole number, not True"),
        ({"steps": None}, "steps is a whole number, not None"),
        ({"rested": 1}, "rested is true or false, not 1"),
        ({"horizon": "far"}, "horizon is a finite number or none, not 'far'"),
        ({"kind": 3}, "kind is a word, not 3"),
        ({"names": "ab"}, "names is a list, each a word, not 'ab'"),
        ({"names": (1,)}, r"names is a list, each a word, not \(1,\)"),
        ({"inner": 3}, "inner is Inner or none, not 3"),
    ],
)
def test_what_it_may_not(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        check_fields(Told(**given))


def test_what_is_wrong_is_shown_in_short() -> None:
    with pytest.raises(ConfigError) as caught:
        check_fields(Told(rate="x" * 1000))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 100


def test_what_json_holds() -> None:
    assert fits({"a": [1.0, 2]}, dict[str, list[float]])
    assert not fits({"a": ["1"]}, dict[str, list[float]])
    assert fits(object(), Any)
    assert fits(True, Any)
    assert described(dict[str, int]) == "dict"


@pytest.mark.parametrize("method", METHODS)
def test_the_defaults_of_every_method_are_what_their_fields_say(method: str) -> None:
    check_fields(METHODS[method].defaults)
