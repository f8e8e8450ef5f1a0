from collections.abc import Callable
from typing import Any

import pytest

from vicinal.errors import ConfigError
from vicinal.evaluation.record import Record
from vicinal.report.grouping import CHOSEN, Run, checked_groups, clash, default_by, grouped, places

MakeRecord = Callable[..., Record]


def run(make: MakeRecord, *, lr: float | None = None, model: int | None = None, **fields: Any) -> Run:
    protocol: dict[str, Any] = {"adapter": {} if lr is None else {"lr": lr}}
    if model is not None:
        protocol["provenance"] = {"seed": model}
    return Run(make(**{"protocol": {**protocol, **fields.pop("protocol", {})}, **fields}))


def sizes(runs: list[Run], *by: str) -> dict[tuple[Any, ...], int]:
    return {key: len(members) for key, members in grouped(runs, by).items()}


def test_rows_are_the_combinations_of_their_names(make: MakeRecord) -> None:
    runs = [run(make, method=m, statistics=s, seed=n) for m in "ab" for s in "xy" for n in range(3)]
    assert sizes(runs, "method", "statistics") == {(m, s): 3 for m in "ab" for s in "xy"}


def test_of_a_repeated_run_the_last_counts(make: MakeRecord) -> None:
    runs = [run(make, accuracy=0.1), run(make, accuracy=0.2), run(make, seed=1, accuracy=0.3)]
    [members] = grouped(runs, ["method"]).values()
    assert [one.record.accuracy for one in members] == [0.2, 0.3]


def test_streams_drawn_for_one_model_are_no_repeats(make: MakeRecord) -> None:
    runs = [run(make, model=5, seed=500 + draw) for draw in range(3)]
    [members] = grouped(runs, ["method"]).values()
    assert [one.seed for one in members] == [5, 5, 5]


def test_an_option_chosen_model_by_model_is_one_row(make: MakeRecord) -> None:
    runs = [run(make, lr=lr, seed=seed) for seed, lr in enumerate((1e-3, 1e-3, 2e-3))]
    assert sizes(runs, "method", "lr") == {("none", CHOSEN): 3}
    assert clash(grouped(runs, ["method"]), ["method"]) is None
    assert default_by(runs) == ("method",)


def test_an_option_that_was_searched_is_a_row_a_value(make: MakeRecord) -> None:
    searched = [run(make, lr=lr, seed=seed) for seed in range(2) for lr in (1e-3, 2e-3)]
    chosen = [run(make, method="vnl", lr=lr, seed=seed) for seed, lr in enumerate((1e-3, 5e-3))]
    runs = [*searched, *chosen]
    assert clash(grouped(runs, ["method"]), ["method"]) == ("lr", [1e-3, 2e-3])
    assert default_by(runs) == ("method", "lr")
    assert sizes(runs, "method", "lr") == {("none", 1e-3): 2, ("none", 2e-3): 2, ("vnl", CHOSEN): 2}


def test_an_option_that_is_the_same_everywhere_reads_as_it_is(make: MakeRecord) -> None:
    assert sizes([run(make, lr=1e-3, seed=seed) for seed in range(3)], "method", "lr") == {("none", 1e-3): 3}


def test_a_search_on_some_seeds_is_a_search(make: MakeRecord) -> None:
    runs = [run(make, lr=1e-3), run(make, lr=2e-3), run(make, lr=1e-3, seed=1)]
    assert sizes(runs, "method", "lr") == {("none", 1e-3): 2, ("none", 2e-3): 1}


def test_who_predicts_is_told_before_the_step_size(make: MakeRecord) -> None:
    runs = [run(make, lr=1e-3, predict="own"), run(make, lr=1e-4, predict="labels")]
    assert default_by(runs) == ("method", "predict")


@pytest.mark.parametrize("name", ["algorithm", "statistics", "method"])
def test_a_row_never_averages_over_who_was_measured(make: MakeRecord, name: str) -> None:
    # On different seeds: nothing repeats, and yet the mean would be of two things.
    runs = [run(make, seed=0, **{name: "a"}), run(make, seed=1, **{name: "b"})]
    by = ["predict"]
    assert clash(grouped(runs, by), by) == (name, ["a", "b"])
    with pytest.raises(ConfigError, match=rf"over {name} \(a, b\): add {name} to --by, or --where {name}=a"):
        checked_groups(runs, by)
    checked_groups(runs, [*by, name])


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (
            {"training": {"train": {"iterations": 1}}},
            {"training": {"train": {"iterations": 2}}},
            "iterations",
        ),
        ({"provenance": {"data_options": {"test": "9"}}}, {}, "provenance.data_options.test"),
    ],
)
def test_a_row_never_averages_over_trainings_or_data(
    make: MakeRecord, one: Any, other: Any, name: str
) -> None:
    runs = [run(make, seed=0, protocol=one), run(make, seed=1, protocol=other)]
    found = clash(grouped(runs, ["method"]), ["method"])
    assert found is not None
    assert name in found[0]
    assert found[0] in default_by(runs)


def test_seeds_and_the_algorithm_behind_a_theta_do_not_clash(make: MakeRecord) -> None:
    runs = [
        run(make, seed=seed, protocol={"training": {"train": {"seed": seed, "algorithm": name}}})
        for seed, name in enumerate(("erm", "neighbor"))
    ]
    assert clash(grouped(runs, ["method"]), ["method"]) is None


@pytest.mark.parametrize(
    ("method", "scales", "told_apart"), [("erm", None, False), ("soft", [1.0], True), ("vnl", None, True)]
)
def test_left_out_models_tell_runs_apart_that_took_something_from_them(
    make: MakeRecord, method: str, scales: list[float] | None, told_apart: bool
) -> None:
    about = {"method": method, "step_sizes": scales}
    protocols = [{"training": {"out_of_fold": {"epochs": 3}}}, {"training": {}}]
    runs = [
        run(make, seed=seed, method=method, protocol={**protocol, "benchmark": {"row": "A", "about": about}})
        for seed, protocol in enumerate(protocols)
    ]
    assert (clash(grouped(runs, ["row"]), ["row"]) is not None) == told_apart


def test_conditions_are_columns_unless_rows_are_made_of_them(make: MakeRecord) -> None:
    runs = [run(make, batch_size=size, stream=kind) for size in (1, 20) for kind in ("online", "mixed")]
    assert clash(grouped(runs, ["method"]), ["method"]) is None
    assert list(places(runs, ["method"]).values()) == [
        "online stream, batches of 1",
        "mixed stream, batches of 1",
        "online stream, batches of 20",
        "mixed stream, batches of 20",
    ]
    assert list(places(runs, ["method", "batch_size"]).values()) == ["online stream", "mixed stream"]
    assert list(places(runs[:1], ["method"]).values()) == [""]


def test_settings_of_a_benchmark_go_by_their_names(make: MakeRecord) -> None:
    def measured(setting: str, **fields: Any) -> Run:
        return run(make, protocol={"benchmark": {"spec": "s", "setting": setting, "row": "r"}}, **fields)

    runs = [measured("MNIST", dataset="m"), measured("Fashion", dataset="f", batch_size=64)]
    assert list(places(runs, ["row"]).values()) == ["MNIST", "Fashion"]
    assert default_by(runs) == ("row",)
    runs.append(measured("MNIST", dataset="m", backbone="other"))
    assert list(places(runs, ["row"]).values()) == ["MNIST, cnn", "Fashion, cnn", "MNIST, other"]
