from collections.abc import Callable
from typing import Any

import pytest

from vicinal.evaluation.record import Record

MakeRecord = Callable[..., Record]


@pytest.fixture(scope="session")
def make() -> MakeRecord:
    """Return a maker of records: the unadapted ERM model unless told otherwise."""

    def build(**changes: Any) -> Record:
        values: dict[str, Any] = {
            "dataset": "digits",
            "target": "90",
            "backbone": "cnn",
            "algorithm": "erm",
            "method": "none",
            "statistics": "source",
            "predict": "own",
            "stream": "online",
            "seed": 0,
            "batch_size": 20,
            "accuracy": 0.5,
            "ece": 0.1,
            "nll": 1.5,
            "brier": 0.75,
            "curve": [0.25, 0.5, 0.5],
            "seconds": 2.0,
            "images_per_second": 1234.0,
            "reliability": {
                "count": [1.0, 0.0, 3.0],
                "confidence": [0.2, 0.0, 0.9],
                "accuracy": [0.0, 0.0, 1.0],
            },
            "protocol": {"step_size": 1e-4},
            "versions": {"torch": "2.6"},
        }
        return Record(**(values | changes))

    return build
