import io
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from vicinal.errors import DataError
from vicinal.evaluation.record import Record
from vicinal.report.tables import (
    Row,
    best,
    difference,
    labels,
    latest,
    percent,
    points,
    reference,
    rich_table,
    spread,
    summarise,
)

MakeRecord = Callable[..., Record]


def printed(rows: list[Row], width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(rich_table(rows))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_targets_are_averaged_within_a_seed_then_seeds(make: MakeRecord) -> None:
    values = np.array([[0.5, 0.7], [0.6, 0.9], [0.55, 0.2]])
    records = [
        make(
            seed=s,
            target=t,
            accuracy=values[s, i],
            ece=values[s, i] / 10,
            nll=1 + s,
            images_per_second=10 * s,
        )
        for s in range(3)
        for i, t in enumerate(("a", "b"))
    ]
    [row] = summarise(records)
    means = values.mean(axis=1)
    assert (row.seeds, row.complete) == (3, True)
    assert row.accuracy_mean == pytest.approx(means.mean())
    assert row.accuracy_std == pytest.approx(means.std(ddof=1))
    assert row.ece_mean == pytest.approx(means.mean() / 10)
    assert row.ece_std == pytest.approx(means.std(ddof=1) / 10)
    assert (row.nll_mean, row.brier_mean, row.images_per_second) == pytest.approx((2, 0.75, 10))
    assert row.per_target == pytest.approx({"a": values[:, 0].mean(), "b": values[:, 1].mean()})


def test_streams_drawn_for_one_model_are_averaged_and_not_seeds(make: MakeRecord) -> None:
    records = [
        make(seed=draw, accuracy=accuracy, protocol={"provenance": {"seed": model}})
        for model, accuracies in ((4, (0.5, 0.7)), (5, (0.8, 0.9)))
        for draw, accuracy in enumerate(accuracies)
    ]
    [row] = summarise(records)
    assert (row.seeds, row.complete) == (2, True)
    assert row.accuracy_mean == pytest.approx(np.mean([0.6, 0.85]))
    assert row.accuracy_std == pytest.approx(np.std([0.6, 0.85], ddof=1))


def test_one_seed_has_no_spread(make: MakeRecord) -> None:
    [row] = summarise([make()])
    assert (row.accuracy_std, row.ece_std) == (0.0, 0.0)
    assert spread(row.accuracy_mean, row.accuracy_std, row.seeds) == "50.0"
    assert spread(0.5, 0.012, 2) == "50.0 ± 1.2"


def test_every_part_of_a_setup_makes_a_row_of_its_own(make: MakeRecord) -> None:
    base = make()
    others = [
        replace(base, **{field: "other"})
        for field in ("algorithm", "method", "statistics", "predict", "stream")
    ]
    assert len(summarise([base, *others])) == 6


def test_erm_comes_first_and_streams_stand_together(make: MakeRecord) -> None:
    records = [
        make(method="tent"),
        make(method="tent", stream="label_shift"),
        make(method="t3a"),
        make(),
        make(stream="label_shift"),
    ]
    assert [(row.stream, row.method) for row in summarise(records)] == [
        ("online", "none"),
        ("online", "tent"),
        ("online", "t3a"),
        ("label_shift", "none"),
        ("label_shift", "tent"),
    ]


def test_of_a_repeated_run_the_last_counts(make: MakeRecord) -> None:
    again = make(accuracy=0.75)
    assert latest([make(), again]) == [again]
    [row] = summarise([make(), again])
    assert (row.seeds, row.accuracy_mean) == (1, 0.75)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dataset": "pacs"}, "datasets"),
        ({"backbone": "big"}, "backbones"),
        ({"batch_size": 1, "seed": 1}, "batch sizes"),
    ],
)
def test_what_no_mean_should_mix_is_an_error(make: MakeRecord, change: dict[str, object], says: str) -> None:
    with pytest.raises(DataError, match=says):
        summarise([make(), make(**change)])


def test_two_setups_may_differ_in_batch_size(make: MakeRecord) -> None:
    assert len(summarise([make(), make(method="none", statistics="batch", batch_size=64)])) == 2


def test_a_broken_run_shows_as_nan_and_never_wins(make: MakeRecord) -> None:
    broken = [make(method="tent", seed=s, accuracy=math.nan, nll=math.nan) for s in range(2)]
    rows = summarise(
        [*broken, *(make(seed=s) for s in range(2)), *(make(method="t3a", seed=s) for s in range(2))]
    )
    tent = next(row for row in rows if row.method == "tent")
    assert math.isnan(tent.accuracy_mean)
    assert math.isnan(tent.accuracy_std)
    assert tent not in best(rows)
    assert "NaN ± NaN" in printed(rows)


def test_the_reference_is_the_unadapted_erm_model_on_source_statistics(make: MakeRecord) -> None:
    rows = summarise(
        [
            make(statistics="batch"),
            make(algorithm="meta"),
            make(method="tent"),
            make(stream="label_shift", method="tent"),
            make(),
        ]
    )
    erm = reference(rows, "online")
    assert erm is not None
    assert (erm.algorithm, erm.method, erm.statistics) == ("erm", "none", "source")
    assert reference(rows, "label_shift") is None


def test_differences_need_the_same_targets_and_seeds(make: MakeRecord) -> None:
    erm, same, fewer, other = summarise(
        [make(target=t, seed=s) for t in "ab" for s in range(2)]
        + [make(method="same", accuracy=0.625, target=t, seed=s) for t in "ab" for s in range(2)]
        + [make(method="fewer", accuracy=0.9, target=t, seed=s) for t, s in (("a", 0), ("a", 1), ("b", 0))]
        + [make(method="other", accuracy=0.9, target="a", seed=s) for s in range(2)]
    )
    assert difference(same, erm) == pytest.approx(0.125)
    assert math.isnan(difference(fewer, erm))
    assert math.isnan(difference(other, erm))
    assert math.isnan(difference(same, None))
    assert not fewer.complete
    assert best([erm, same, fewer, other]) == [same]


def test_best_is_per_stream_as_printed_and_needs_a_rival(make: MakeRecord) -> None:
    rows = summarise(
        [
            make(accuracy=0.50001),
            make(method="tent", accuracy=0.50004),
            make(method="t3a", accuracy=0.4),
            make(method="t3a", accuracy=0.1, stream="label_shift"),
            make(method="tent", accuracy=0.2, stream="label_shift"),
            make(method="t3a", accuracy=0.9, stream="alone"),
        ]
    )
    assert {(row.stream, row.method) for row in best(rows)} == {
        ("online", "none"),
        ("online", "tent"),
        ("label_shift", "tent"),
    }


def test_labels_are_unique_and_say_only_what_tells_apart(make: MakeRecord) -> None:
    rows = summarise(
        [
            make(),
            make(method="tent", statistics="batch"),
            make(method="vnl", statistics="stream"),
            make(method="vnl", statistics="stream", predict="labels"),
            make(algorithm="meta"),
        ]
    )
    names = labels(row.setup for row in rows)
    assert list(names.values()) == ["ERM", "tent", "vnl (own)", "vnl (labels)", "meta, not adapted"]


def test_numbers_as_printed() -> None:
    assert [percent(x) for x in (0.12345, 1.0, math.nan)] == ["12.3", "100.0", "NaN"]
    assert [points(x) for x in (0.0123, -0.0123, 0.0001, -0.0001, math.nan)] == [
        "+1.2",
        "\N{MINUS SIGN}1.2",
        "0.0",
        "0.0",
        "",
    ]


def test_the_terminal_table_holds_every_row_and_survives_brackets(make: MakeRecord) -> None:
    rows = summarise(
        [make(), make(method="[red]tent[/]", accuracy=0.6234), make(method="t3a", stream="label_shift")]
    )
    text = printed(rows)
    assert "[red]tent[/]" in text
    for part in ("ERM", "62.3", "+12.3", "t3a", "online stream", "label_shift stream", "1,234"):
        assert part in text
    assert "measured on every target" not in text


def test_the_terminal_table_fits_a_narrow_terminal(make: MakeRecord) -> None:
    rows = summarise([make(seed=s, method=m) for s in range(3) for m in ("none", "tent")])
    assert "…" not in printed(rows, width=80)


def test_a_row_that_lacks_runs_is_marked_and_explained(make: MakeRecord) -> None:
    rows = summarise(
        [make(target=t) for t in "ac"]
        + [make(method="part", target="c", seed=s, accuracy=0.9) for s in range(2)]
        + [make(method="part", target="a", accuracy=0.9)]
    )
    text = printed(rows)
    assert "90.0 ± 0.0 *" in text
    assert "* not every seed was measured on every target" in " ".join(text.split())
