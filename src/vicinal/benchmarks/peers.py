"""Every method on the same source models: the spec of a comparison on one data set.

Step sizes are chosen where target labels cannot be seen: on streams of left-out source domains, for every
method that takes steps, over the same multiples of its own paper's value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vicinal.adapters.methods import METHODS
from vicinal.benchmarks.check import check_spec
from vicinal.benchmarks.spec import Row, Setting, Spec
from vicinal.data.catalog import DATASETS
from vicinal.errors import ConfigError

COMPARE = "compare"  # what records of a comparison name as their benchmark; it has no file
# Trained for what they need at test time; every other method starts from the ERM model.
TRAINED_FOR = {
    "meta": ("vnl_paper",),
    "ttt": ("ttt",),
    "ttt_pp": ("ttt_pp",),
    "single_sample": ("single_sample",),
}
# On every source model, so that what its training is worth shows apart from the method.
REFERENCE = ("erm", "bn", "soft")
# Without these a small CPU run takes hours; the settings are in every record.
SMALLER = {"memo": {"views": 8}, "cotta": {"views": 8}}


@dataclass(frozen=True)
class Comparison:
    """What is compared, on what."""

    data: str
    methods: tuple[str, ...] = ()  # empty: all
    targets: tuple[str, ...] = ()  # empty: the data set's own
    seeds: int = 3
    statistics: tuple[str, ...] = ("own", "stream")  # the method's own choice, and the stream's
    batch_size: int = 20
    data_options: dict[str, str] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    out_of_fold: dict[str, Any] = field(default_factory=dict)


def comparison_spec(config: Comparison) -> Spec:
    """Return a spec with a row for every method, source model and kind of statistics, and one column."""
    if config.data not in DATASETS and not config.targets:
        raise ConfigError("say which domain of your own data to hold out with --target")
    names = config.methods or tuple(METHODS)
    setting = Setting(
        name=Path(config.data).name,
        data=config.data,
        targets=(config.targets,) if config.targets else (),
        data_options=config.data_options,
        batch_size=config.batch_size,
        training=config.training,
        out_of_fold=config.out_of_fold,
    )
    rows = [
        Row(label, method, algorithm, options)
        for algorithm in wanted_algorithms(names)
        for method in methods_on(algorithm, names)
        for label, options in _variants(method, algorithm, config.statistics)
    ]
    spec = Spec(
        name=COMPARE,
        title=f"All methods on {setting.name}",
        note="Step sizes of all methods: chosen on streams of left-out source domains, never on targets.",
        seeds=config.seeds,
        settings=(setting,),
        rows=tuple(rows),
    )
    check_spec(spec, COMPARE)
    return spec


def wanted_algorithms(names: Sequence[str]) -> list[str]:
    """Return the ways of training that the methods need; the ERM model, with phi for `neighbor`, always."""
    return ["neighbor", *(name for name, methods in TRAINED_FOR.items() if set(methods) & set(names))]


def methods_on(algorithm: str, names: Sequence[str]) -> list[str]:
    """Return the methods measured on a source model of this algorithm."""
    bound = {method for methods in TRAINED_FOR.values() for method in methods}
    if algorithm == "neighbor":
        return [name for name in names if name not in bound]
    here = (*REFERENCE, *TRAINED_FOR[algorithm], *(("vnl",) if algorithm == "meta" else ()))
    return [name for name in here if name in names]


def _variants(method: str, algorithm: str, statistics: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return a label and the options of a method for each kind of statistics."""
    own = METHODS[method].defaults.statistics.kind
    # The source model on other statistics is `bn`.
    asked = ("own",) if method == "erm" else statistics
    kinds = dict.fromkeys(own if kind == "own" else kind for kind in asked)
    model = "" if algorithm == "neighbor" else f", {algorithm} model"
    return [(f"{method}, {kind}{model}", {**SMALLER.get(method, {}), "statistics": kind}) for kind in kinds]
