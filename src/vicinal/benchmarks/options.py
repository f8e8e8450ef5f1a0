"""Options as a file can write them -> options as training and methods take them."""

from collections.abc import Mapping
from typing import Any

from vicinal.adapters.statistics import StatisticsConfig
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import ConfigError


def real_options(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with tuples for lists, and objects where a method or a training takes one.

    `augment`: false for none, true for the default crop and flip, "augmix", or a table of what differs from
    the default. `statistics`: the name of a kind, or a table.
    """
    return {name: _real(name, value) for name, value in table.items()}


def _real(name: str, value: Any) -> Any:
    if name == "augment":
        return _augment(value)
    if name == "statistics" and isinstance(value, Mapping):
        return _filled(StatisticsConfig, name, value)
    return tuple(value) if isinstance(value, list) else value


def _augment(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _filled(Augment, "augment", value)
    if isinstance(value, str) and value != "augmix":
        raise ConfigError(f'augment must be true, false, "augmix" or a table, not {value!r}')
    if isinstance(value, str):
        return AugMix()
    if isinstance(value, bool):
        return Augment() if value else None
    return value


def _filled(kind: Any, name: str, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}") from None
