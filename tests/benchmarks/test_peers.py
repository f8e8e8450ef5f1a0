import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import METHODS
from vicinal.benchmarks.peers import (
    TRAINED_FOR,
    Comparison,
    comparison_spec,
    methods_on,
    wanted_algorithms,
)
from vicinal.benchmarks.place import Place
from vicinal.benchmarks.plan import plan
from vicinal.benchmarks.run import records_of, run_plan
from vicinal.benchmarks.store import Store
from vicinal.errors import ConfigError, UnknownNameError


def test_every_method_is_measured_on_its_own_source_model() -> None:
    rows = comparison_spec(Comparison("digits")).rows
    assert {row.method for row in rows} == set(METHODS)
    for algorithm, methods in TRAINED_FOR.items():
        for method in methods:
            assert {row.algorithm for row in rows if row.method == method} == {algorithm}


def test_only_the_trainings_that_are_needed() -> None:
    assert wanted_algorithms(("erm", "soft")) == ["neighbor"]
    assert wanted_algorithms(("erm", "vnl_paper")) == ["neighbor", "meta"]
    assert methods_on("meta", ("erm", "soft", "hard", "vnl_paper", "vnl")) == [
        "erm",
        "soft",
        "vnl_paper",
        "vnl",
    ]
    made = plan(comparison_spec(Comparison("digits", ("erm", "vnl_paper"), seeds=2))).trainings
    assert [(run.algorithm, run.seed) for run in made] == [
        ("neighbor", 0),
        ("meta", 0),
        ("neighbor", 1),
        ("meta", 1),
    ]


def test_both_statistics_are_planned_and_what_is_done_is_not() -> None:
    spec = comparison_spec(Comparison("digits", ("erm", "soft"), seeds=2))
    runs = plan(spec).measures
    wanted = [("erm", "source"), ("soft", "batch"), ("soft", "stream")]
    assert [(run.entry.method, run.entry.options["statistics"], run.seed) for run in runs] == [
        (*one, seed) for seed in (0, 1) for one in wanted
    ]
    done = {(run.key, target) for run in (runs[0], runs[5]) for target in ("0", "90")}
    # One target is not all of them.
    assert plan(spec, done=done | {(runs[1].key, "0")}).measures == runs[1:5]


def test_step_sizes_are_left_to_the_left_out_domains_but_for_methods_without_any() -> None:
    runs = plan(comparison_spec(Comparison("digits", ("erm", "soft", "vnl", "memo"), seeds=1))).measures
    assert {run.entry.method for run in runs if run.chooses} == {"soft"}
    memo = next(run for run in runs if run.entry.method == "memo")
    assert memo.entry.options["views"] == 8


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="--target"):
        comparison_spec(Comparison("some/folder"))
    with pytest.raises(ConfigError, match="unknown dataset 'nowhere'"):
        comparison_spec(Comparison("nowhere", targets=("a",)))
    with pytest.raises(ConfigError, match="unknown option angle"):
        comparison_spec(Comparison("rotated_mnist", data_options={"angle": "1"}))
    with pytest.raises(UnknownNameError, match="soff"):
        comparison_spec(Comparison("digits", ("soff",)))


def guard_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "guard.py"
    found = importlib.util.spec_from_file_location("guard_benchmark", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_small_comparison_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    small = Comparison(
        "digits",
        methods=("erm", "soft"),
        seeds=1,
        training={"iterations": 4},
        out_of_fold={"stream_images": 40, "epochs": 2, "step_sizes": [1e-3]},
    )
    whole, place = plan(comparison_spec(small)), Place(tmp_path)
    steps: list[tuple[str, int, int]] = []
    assert run_plan(whole, place, ["cpu"], lambda who, what, *step: steps.append((who, *step))) == []
    first = records_of(whole, Store(tmp_path))
    assert [(r.method, r.statistics) for r in first].count(("soft", "stream")) == 2  # two targets
    assert ("trainings", 1, 1) in steps
    assert steps.index(("rules", 1, 1)) < steps.index(("step sizes", 1, 2))
    scales = [METHODS["soft"].defaults.lr * scale for scale in (0.1, 1, 10)]
    assert {r.protocol["adapter"]["lr"] for r in first if r.method == "soft"} <= set(scales)
    again: list[object] = []
    assert run_plan(whole, place, ["cpu"], lambda *step: again.append(step)) == []
    assert again == []
    assert len(records_of(whole, Store(tmp_path))) == len(first) == 6
    # benchmarks/guard.py finds the models of a comparison, and the step sizes that were chosen there.
    guard = guard_benchmark()
    ((seed, folder),) = guard.models_of(tmp_path, guard.source_of("soft"))
    chosen = guard.with_step_sizes(None, guard.Job("soft", folder, seed, False))
    assert {kind: options["lr"] for kind, options in chosen.items()} == {
        r.statistics: r.protocol["adapter"]["lr"] for r in first if r.method == "soft"
    }
