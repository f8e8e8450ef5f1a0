"""Records and headers of two runs compared: they agree in all but times."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIMES = ("seconds", "images_per_second", "training_seconds")


@pytest.fixture
def untimed() -> Callable[[Any], Any]:
    """Return a function that takes the times out of a value."""
    return without_times


@pytest.fixture
def lines() -> Callable[[Path], list[dict[str, Any]]]:
    """Return a function that reads the records of a folder."""
    return records_in


def without_times(value: Any) -> Any:
    """Return a value without the fields that hold times, at any depth."""
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if name not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def records_in(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a folder's records, without times, in an order of their own."""
    read = [without_times(json.loads(line)) for line in (folder / "records.jsonl").read_text().splitlines()]
    return sorted(read, key=lambda one: (one["protocol"]["benchmark"]["key"], one["target"]))
