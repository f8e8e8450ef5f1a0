from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vicinal.benchmarks.spec import Expect, Figure, Row, Setting, Spec
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


@pytest.fixture(scope="session")
def digits_spec() -> Spec:
    """Return a benchmark of two columns, batches of 20 and of 4, with a row that only the paper has."""
    return Spec(
        "digits_two",
        "Digits at two batch sizes",
        paper="Table 9",
        note="Two columns.",
        seeds=5,
        settings=(
            Setting("Batches of 20", "digits", (("0", "90"),)),
            Setting("Batches of 4", "digits", (("0", "90"),), batch_size=4),
        ),
        rows=(
            Row("Cited et al.", None),
            Row("ERM baseline", "erm"),
            Row("Soft", "soft"),
            Row("This paper", "vnl", ours=True),
        ),
        figures=(
            Figure("Cited et al.", "Batches of 20", 77.7),
            Figure("ERM baseline", "Batches of 20", 80.0, std=0.25),
            Figure("Soft", "Batches of 20", 84.0),
            Figure("Soft", "Batches of 20", 85.5, target="90"),
            Figure("Soft", "Batches of 4", 70.0),
        ),
        expects=(
            Expect("This paper", "Batches of 20", at_least=85.0),
            Expect("This paper", "Batches of 20", above="Soft"),
            Expect("Soft", "Batches of 4", at_least=99.0, tolerance=0.5),
            Expect("Cited et al.", "Batches of 20", at_least=1.0),
        ),
    )


ACCURACIES = {
    ("ERM baseline", 20): 0.80,
    ("Soft", 20): 0.84,
    ("This paper", 20): 0.90,
    ("ERM baseline", 4): 0.80,
    ("Soft", 4): 0.70,
}


@pytest.fixture(scope="session")
def digits_records(make: MakeRecord) -> list[Record]:
    """Return the benchmark's runs: five seeds, but one of Soft at 4; there is no run of This paper at 4."""
    methods = {"ERM baseline": "erm", "Soft": "soft", "This paper": "vnl"}
    rng = np.random.default_rng(0)
    return [
        make(
            target=target,
            method=methods[row],
            batch_size=size,
            seed=seed,
            accuracy=level + (0.02 if target == "90" else -0.01) + float(rng.normal(0, 0.01)),
            ece=0.05 + 0.01 * seed,
            curve=[0.5, 0.6, level],
            images_per_second=100.0 * size,
            protocol={
                "benchmark": {
                    "spec": "digits_two",
                    "setting": f"Batches of {size}",
                    "row": row,
                    "key": f"{row}-{size}-{seed}",
                    "model": "m",
                    "quick": False,
                },
                "images": 3 * size - 1,
                "adapter": {"lr": 1e-4 * (seed + 1)},
                "provenance": {"seed": seed},
                "shared_fact": "same for all",
            },
        )
        for (row, size), level in ACCURACIES.items()
        for target in ("0", "90")
        for seed in range(1 if (row, size) == ("Soft", 4) else 5)
    ]
