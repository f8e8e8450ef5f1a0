import gzip
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vicinal.benchmarks.spec import Figure, Row, Setting, Spec
from vicinal.errors import ConfigError, DataError, UnknownNameError
from vicinal.evaluation.record import Record
from vicinal.report.export import Cell, Table, results_table, spec_table
from vicinal.report.select import read_all

MakeRecord = Callable[..., Record]
DIGITS = Path(__file__).parents[2] / "results" / "digits" / "records.jsonl.gz"


def cells(table: Table) -> dict[tuple[str, str], Cell]:
    """Return the cells by label of the row and heading of the column."""
    return {
        (row.label, column.heading): cell
        for row in table.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
    }


def seeded(make: MakeRecord, method: str, values: list[float], **fields: Any) -> list[Record]:
    return [make(method=method, seed=seed, accuracy=value, **fields) for seed, value in enumerate(values)]


def test_targets_are_averaged_within_a_seed_then_seeds(make: MakeRecord) -> None:
    values = np.array([[0.5, 0.7], [0.6, 0.9], [0.55, 0.2]])
    records = [make(seed=s, target=t, accuracy=values[s, i]) for s in range(3) for i, t in enumerate("ab")]
    [cell] = cells(results_table(records)).values()
    means = 100 * values.mean(axis=1)
    assert cell.mean == pytest.approx(means.mean())
    assert cell.std == pytest.approx(means.std(ddof=1))
    assert cell.count == 3
    assert (cell.complete, cell.unfinished) == (True, 0)


def test_streams_of_one_model_are_averaged_not_counted(make: MakeRecord) -> None:
    records = [
        make(seed=100 * model + draw, accuracy=value, protocol={"provenance": {"seed": model}})
        for model, values in enumerate(([0.1, 0.3], [0.5, 0.7], [0.9, 0.9]))
        for draw, value in enumerate(values)
    ]
    [cell] = cells(results_table(records)).values()
    assert (cell.mean, cell.count) == (pytest.approx(100 * np.mean([0.2, 0.6, 0.9])), 3)
    assert cell.std == pytest.approx(100 * np.std([0.2, 0.6, 0.9], ddof=1))


@pytest.mark.parametrize(
    ("metric", "value", "best"),
    [
        ("accuracy", 60.0, "tent"),
        ("error", 40.0, "tent"),
        ("ece", 30.0, "none"),
        ("nll", 2.5, "none"),
        ("brier", 0.9, "none"),
        ("seconds", 7.0, "none"),
    ],
)
def test_every_metric_in_its_unit_and_direction(
    make: MakeRecord, metric: str, value: float, best: str
) -> None:
    tent = make(method="tent", accuracy=0.6, ece=0.3, nll=2.5, brier=0.9, seconds=7.0)
    table = results_table([make(), tent], metric=metric)
    found = {label: cell for (label, _), cell in cells(table).items()}
    assert found["tent"].mean == pytest.approx(value)
    assert [label for label, cell in found.items() if cell.rank == 0] == [best]
    assert table.rows[0].label == best


def test_a_metric_that_records_do_not_have_is_one_line(make: MakeRecord) -> None:
    with pytest.raises(DataError, match="do not say their training_seconds"):
        results_table([make()], metric="training_seconds")
    with pytest.raises(UnknownNameError, match="unknown metric 'f1': choose from accuracy, brier"):
        results_table([make()], metric="f1")


def test_a_column_for_every_target_and_their_mean(make: MakeRecord) -> None:
    records = [
        make(method=m, target=t, seed=s, accuracy=(i + j + s) / 20)
        for i, m in enumerate(("none", "tent"))
        for j, t in enumerate(("90", "0", "105"))
        for s in range(2)
    ]
    table = results_table(records, per_target=True)
    assert [column.heading for column in table.columns] == ["0", "105", "90", "mean"]
    found = cells(table)
    assert found["none", "90"].mean == pytest.approx(100 * (0 / 20 + 1 / 20) / 2)
    assert found["tent", "mean"].mean == pytest.approx(
        100 * np.mean([(1 + j + s) / 20 for j in range(3) for s in range(2)])
    )


def test_conditions_are_columns(make: MakeRecord) -> None:
    records = [make(stream=kind, accuracy=value) for kind, value in (("online", 0.5), ("label_shift", 0.25))]
    table = results_table(records)
    assert {key[1]: cell.mean for key, cell in cells(table).items()} == {
        "online stream": 50.0,
        "label_shift stream": 25.0,
    }
    assert table.title == "accuracy, %: digits, cnn, batches of 20"


def test_a_row_that_lacks_a_target_neither_competes_nor_compares(make: MakeRecord) -> None:
    records = [make(method=m, target=t, accuracy=0.5) for m in ("none", "same") for t in "ab"]
    records += [make(method="part", target="b", accuracy=0.9)]
    found = {label: cell for (label, _), cell in cells(results_table(records, baseline="none")).items()}
    assert (found["part"].complete, found["part"].unfinished) == (False, 1)
    assert (found["part"].mean, found["part"].rank, found["part"].versus) == (90.0, None, None)
    assert (found["none"].rank, found["same"].rank) == (0, 0)
    assert found["same"].difference == 0.0


def test_a_seed_that_lacks_a_target_does_not_count(make: MakeRecord) -> None:
    records = [make(method=m, target=t, seed=s) for m in ("none", "tent") for t in "ab" for s in range(2)]
    records += [make(method="tent", target="a", seed=2, accuracy=1.0), make(seed=2, target="a")]
    records += [make(seed=2, target="b")]
    found = {label: cell for (label, _), cell in cells(results_table(records, baseline="none")).items()}
    assert (found["tent"].complete, found["tent"].unfinished, found["tent"].count) == (True, 1, 2)
    assert (found["tent"].mean, found["tent"].rank) == (50.0, 0)
    assert found["tent"].versus is not None
    assert (found["tent"].difference, found["tent"].versus.count) == (0.0, 2)


def test_the_difference_to_the_baseline_is_paired(make: MakeRecord) -> None:
    ours, base = [0.6, 0.7, 0.5, 0.8, 0.9, 0.65], [0.5, 0.65, 0.4, 0.7, 0.85, 0.6]
    records = [*seeded(make, "tent", ours), *seeded(make, "none", base), make(method="few", accuracy=0.7)]
    found = {label: cell for (label, _), cell in cells(results_table(records, baseline="none")).items()}
    assert found["tent"].difference == pytest.approx(100 * np.mean(np.subtract(ours, base)))
    assert found["tent"].p == 2 / 2**6  # all six differences have one sign
    assert found["none"].versus is None
    assert (found["few"].difference, found["few"].p) == (pytest.approx(20.0), None)


def test_an_unknown_baseline_lists_the_labels(make: MakeRecord) -> None:
    records = [make(method="bn", statistics=s) for s in ("batch", "stream")] + [make()]
    with pytest.raises(
        UnknownNameError, match=r"baseline 'bn': choose from bn \(batch\), bn \(stream\), none"
    ):
        results_table(records, baseline="bn")


def test_rows_are_best_first_or_in_the_order_of_their_names(make: MakeRecord) -> None:
    records = [
        make(method=m, batch_size=b, accuracy=v)
        for m, b, v in (("x", 128, 0.3), ("x", 20, 0.6), ("y", 8, 0.5), ("z", 1, math.nan))
    ]
    by_size = results_table(records, by=["batch_size", "method"])
    assert [row.names for row in by_size.rows] == [("1", "z"), ("8", "y"), ("20", "x"), ("128", "x")]
    best = results_table([r for r in records if r.batch_size != 128], by=[])
    assert best.headings == ("method",)
    same = [replace(record, batch_size=20) for record in records[1:]]
    assert [row.label for row in results_table(same).rows] == ["x", "y", "z"]


def test_rows_that_would_mix_are_refused(make: MakeRecord) -> None:
    records = [make(algorithm="erm"), make(algorithm="meta")]
    with pytest.raises(ConfigError, match=r"average over algorithm \(erm, meta\): add algorithm to --by"):
        results_table(records, by=["method"])
    with pytest.raises(ConfigError, match="unknown field 'streem'"):
        results_table(records, by=["streem"])


def test_a_broken_run_never_wins(make: MakeRecord) -> None:
    records = [
        *seeded(make, "tent", [math.nan, 0.9]),
        *seeded(make, "a", [0.5, 0.6]),
        *seeded(make, "b", [0.5, 0.5]),
    ]
    found = {label: cell for (label, _), cell in cells(results_table(records)).items()}
    assert math.isnan(found["tent"].mean or 0)
    assert {label: cell.rank for label, cell in found.items()} == {"a": 0, "b": 1, "tent": None}


def test_the_stored_digits_against_a_plain_loop() -> None:
    lines = [json.loads(line) for line in gzip.decompress(DIGITS.read_bytes()).splitlines()]
    wanted = [r for r in lines if (r["algorithm"], r["method"], r["stream"]) == ("erm", "vnl", "label_shift")]
    models = sorted({r["protocol"]["provenance"]["seed"] for r in wanted})
    values = [
        100
        * np.mean(
            [
                np.mean(
                    [
                        r["accuracy"]
                        for r in wanted
                        if (r["protocol"]["provenance"]["seed"], r["target"]) == (m, t)
                    ]
                )
                for t in ("0", "90")
            ]
        )
        for m in models
    ]
    records = [r for r in read_all([DIGITS]) if r.algorithm == "erm"]
    found = results_table(records)
    shifted = next(i for i, c in enumerate(found.columns) if c.heading.startswith("label_shift"))
    cell = next(row.cells[shifted] for row in found.rows if row.label == "vnl")
    assert len(models) == cell.count > 5
    assert (cell.mean, cell.std) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values, ddof=1)))


SPEC = Spec(
    name="small",
    title="A small table",
    settings=(
        Setting("MNIST", "rotated_mnist"),
        Setting("Cost", "rotated_mnist", metric="parameters", batch_size=64),
    ),
    rows=(Row("ERM", "erm"), Row("Cited"), Row("Ours", "vnl", ours=True)),
    figures=(
        Figure("ERM", "MNIST", 93.5),
        Figure("Cited", "MNIST", 95.0, 0.25),
        Figure("ERM", "MNIST", 91.0, target="0"),
        Figure("Ours", "Cost", 11.96),
    ),
)


def measured(
    make: MakeRecord, row: str, setting: str = "MNIST", quick: bool = False, **fields: Any
) -> Record:
    place = {"spec": "small", "setting": setting, "row": row, "quick": quick}
    return make(protocol={"benchmark": place, "parameters": 11_200_000}, **fields)


def spec_records(make: MakeRecord) -> list[Record]:
    return [
        measured(make, row, seed=seed, target=target, accuracy=0.9 + gain + seed / 100)
        for row, gain in (("ERM", 0.0), ("Ours", 0.03))
        for seed in range(5)
        for target in ("0", "90")
    ]


def test_the_papers_figures_stand_beside_ours(make: MakeRecord) -> None:
    records = [*spec_records(make), measured(make, "Ours", "Cost", quick=False)]
    found = cells(spec_table(SPEC, records, baseline="ERM"))
    assert (found["ERM", "MNIST"].paper, found["ERM", "MNIST"].mean) == (93.5, pytest.approx(92.0))
    assert (found["Cited", "MNIST"].paper, found["Cited", "MNIST"].paper_std) == (95.0, 0.25)
    assert found["Cited", "MNIST"].measured is None
    assert found["Ours", "MNIST"].paper is None
    assert (found["Ours", "MNIST"].difference, found["Ours", "MNIST"].p) == (pytest.approx(3.0), 0.0625)
    assert found["Ours", "Cost"].mean == pytest.approx(11.2)
    assert found["Ours", "Cost"].paper == 11.96
    assert found["Ours", "MNIST"].rank == 0


def test_the_papers_figures_of_single_targets(make: MakeRecord) -> None:
    table = spec_table(SPEC, spec_records(make), per_target=True)
    found = cells(table)
    assert [column.heading for column in table.columns] == ["0", "90", "mean"]
    assert (found["ERM", "0"].paper, found["ERM", "90"].paper, found["ERM", "mean"].paper) == (
        91.0,
        None,
        93.5,
    )


def test_quick_runs_stand_alone_and_say_so(make: MakeRecord) -> None:
    quick = [measured(make, "ERM", quick=True, seed=9, accuracy=0.1)]
    assert any("--quick" in note for note in spec_table(SPEC, quick).notes)
    both = spec_table(SPEC, [*quick, *spec_records(make)])
    assert both.notes == ()
    assert cells(both)["ERM", "MNIST"].mean == pytest.approx(92.0)


def test_a_cell_of_unlike_runs_is_refused(make: MakeRecord) -> None:
    records = [*spec_records(make), measured(make, "ERM", seed=7, backbone="other", target="0")]
    with pytest.raises(DataError, match=r"'ERM' in 'MNIST' has runs that differ in backbone \(cnn, other\)"):
        spec_table(SPEC, records)
