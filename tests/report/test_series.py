from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from vicinal.benchmarks.spec import Spec
from vicinal.evaluation.metrics import chance_ece
from vicinal.evaluation.record import Record
from vicinal.report.board import make_board
from vicinal.report.series import batch_sizes_of, costs_of, curves_of, errors_of, reliabilities_of

MakeRecord = Callable[..., Record]


def test_curves_are_means_over_seeds_against_images(make: MakeRecord) -> None:
    runs = {0: [0.2, 0.4, 0.6], 1: [0.4, 0.4, 0.8, 0.9]}
    records = [make(seed=s, curve=c, protocol={"images": 20 * len(c) - 5}) for s, c in runs.items()]
    [curve] = curves_of(make_board(None, records).columns[0])
    assert curve.images == [20, 40, 55]
    both = 100 * np.array([runs[0], runs[1][:3]])
    assert curve.mean == pytest.approx(both.mean(axis=0))
    assert curve.std == pytest.approx(both.std(axis=0, ddof=1))
    [alone] = curves_of(make_board(None, records[:1]).columns[0])
    assert alone.std is None


def test_streams_of_one_model_are_averaged_before_the_band(make: MakeRecord) -> None:
    records = [
        make(
            seed=10 * model + draw, curve=[0.1 * model + 0.2 * draw], protocol={"provenance": {"seed": model}}
        )
        for model in range(2)
        for draw in range(2)
    ]
    [curve] = curves_of(make_board(None, records).columns[0])
    assert curve.mean == pytest.approx([15.0])
    assert curve.std == pytest.approx([np.std([10, 20], ddof=1)])
    assert curve.seeds == 2


def test_batch_sizes_join_columns_that_differ_in_nothing_else(
    digits_spec: Spec, digits_records: list[Record]
) -> None:
    [family] = batch_sizes_of(make_board(digits_spec, digits_records))
    assert set(family.lines) == {"ERM baseline", "Soft"}, "This paper has one size only"
    assert [(point.x, point.paper) for point in family.lines["Soft"]] == [(4, 70.0), (20, 84.0)]
    mine = [100 * r.accuracy for r in digits_records if r.method == "erm" and r.batch_size == 4]
    assert family.lines["ERM baseline"][0].y.mean == pytest.approx(np.mean(mine))
    other = [replace(r, backbone=f"net{r.batch_size}") for r in digits_records]
    assert batch_sizes_of(make_board(digits_spec, other)) == []
    assert batch_sizes_of(make_board(digits_spec, [r for r in digits_records if r.batch_size == 20])) == []


def test_costs_errors_and_bins(digits_spec: Spec, digits_records: list[Record]) -> None:
    column = make_board(digits_spec, digits_records).columns[0]
    costs = {point.row: point for point in costs_of(column)}
    assert costs["Soft"].x == pytest.approx(1 / 2000)
    mine = [100 * r.accuracy for r in digits_records if r.method == "soft" and r.batch_size == 20]
    assert costs["Soft"].y.mean == pytest.approx(np.mean(mine))
    errors = errors_of(column)
    assert errors["Soft"].found.mean == pytest.approx(7.0)
    record = next(r for r in digits_records if r.method == "soft" and r.batch_size == 20)
    assert errors["Soft"].by_chance == pytest.approx(100 * chance_ece(record.reliability))
    bins = {one.row: one for one in reliabilities_of(column)}
    assert bins["Soft"].count == [10.0, 0.0, 30.0]
    assert bins["Soft"].accuracy == pytest.approx([0.0, 0.0, 1.0])
    assert "Cited et al." not in costs.keys() | bins.keys()


def test_records_without_bins_have_no_reliability(make: MakeRecord) -> None:
    record = make(reliability={"count": [], "confidence": [], "accuracy": []})
    assert reliabilities_of(make_board(None, [record]).columns[0]) == []
