"""What a table can be about: each metric as a number of a record, in the unit that tables print."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vicinal.evaluation.record import Record


@dataclass(frozen=True)
class Metric:
    """How a table reads a record, in what unit, and which way is better."""

    value: Callable[[Record], float]
    unit: str
    higher_is_better: bool = False
    decimals: int = 1  # as printed; two means that print alike count as equal


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": Metric(lambda record: 100 * record.accuracy, "%", higher_is_better=True),
        "error": Metric(lambda record: 100 * (1 - record.accuracy), "%"),
        "ece": Metric(lambda record: 100 * record.ece, "%"),
        "nll": Metric(lambda record: record.nll, "", decimals=3),
        "brier": Metric(lambda record: record.brier, "", decimals=3),
        "seconds": Metric(lambda record: record.seconds, "s"),
        "training_seconds": Metric(lambda record: float(record.protocol["training_seconds"]), "s"),
        "parameters": Metric(lambda record: record.protocol["parameters"] / 1e6, "M", decimals=2),
    }
)
