import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from vicinal.benchmarks.spec import Expect, Row, Setting, Spec
from vicinal.errors import DataError
from vicinal.evaluation.record import Record
from vicinal.report.board import make_board, spec_of
from vicinal.report.expectations import check_expectations
from vicinal.report.naming import by_looks, telling_options
from vicinal.report.views import expectation

MakeRecord = Callable[..., Record]


def test_a_value_is_the_mean_over_targets_and_then_over_seeds(
    digits_spec: Spec, digits_records: list[Record]
) -> None:
    board = make_board(digits_spec, digits_records)
    cell = board.cell("Soft", "Batches of 20")
    mine = [r for r in digits_records if r.method == "soft" and r.batch_size == 20]
    seeds = np.array([[100 * r.accuracy for r in mine if r.seed == seed] for seed in range(5)])
    assert list(cell.values.values()) == pytest.approx(seeds.mean(axis=1))
    assert cell.summary.mean == pytest.approx(seeds.mean())
    assert cell.summary.std == pytest.approx(seeds.mean(axis=1).std(ddof=1))
    at_90 = np.array([100 * r.accuracy for r in mine if r.target == "90"])
    assert statistics.fmean(cell.of("90").values()) == pytest.approx(at_90.mean())
    erm = np.array(list(board.cell("ERM baseline", "Batches of 20").values.values()))
    assert cell.against.difference == pytest.approx((seeds.mean(axis=1) - erm).mean())
    assert cell.against.count == 5
    assert (cell.paper.value, cell.paper_by_target["90"].value) == (84.0, 85.5)


def test_a_joint_stream_is_taken_apart_into_its_domains(make: MakeRecord) -> None:
    shares = [{"30": 0.9, "45": 0.5}, {"30": 0.7, "45": 0.5}]
    records = [
        make(target="30+45", stream="mixed", seed=seed, protocol={"accuracy_by_domain": by_domain})
        for seed, by_domain in enumerate(shares)
    ]
    [column] = make_board(None, records).columns
    [cell] = column.cells.values()
    assert (column.targets, column.parts) == (("30+45",), ("30", "45"))
    assert statistics.fmean(cell.of("30").values()) == pytest.approx(80.0)
    assert cell.summary.mean == pytest.approx(50.0), "the stream's own, not the mean of its domains"


def test_rows_and_columns_are_the_specs(digits_spec: Spec, digits_records: list[Record]) -> None:
    board = make_board(digits_spec, digits_records[::-1])
    assert [column.name for column in board.columns] == ["Batches of 20", "Batches of 4"]
    assert board.rows == ("Cited et al.", "ERM baseline", "Soft", "This paper")
    assert [column.reference for column in board.columns] == ["ERM baseline"] * 2
    assert board.columns[0].cells["Cited et al."].records == ()
    assert "Cited et al." not in board.columns[1].cells
    assert "This paper" not in board.columns[1].cells
    assert board.ours == {"This paper"}


def test_a_seed_without_all_targets_does_not_count(digits_spec: Spec, digits_records: list[Record]) -> None:
    lost = [r for r in digits_records if (r.method, r.target) != ("vnl", "90") or r.seed < 3]
    cell = make_board(digits_spec, lost).cell("This paper", "Batches of 20")
    assert sorted(cell.values) == [0, 1, 2]
    assert (cell.seeds, cell.unfinished) == (3, 2)
    nothing = [r for r in digits_records if r.target == "0"]
    cell = make_board(digits_spec, nothing).cell("This paper", "Batches of 20")
    assert cell.summary is None, "a mean over one of two targets is not the column's mean"
    assert cell.unfinished == 5


def test_quick_runs_count_only_where_there_are_no_others(
    digits_spec: Spec, digits_records: list[Record]
) -> None:
    quick = [
        replace(
            r, accuracy=0.1, protocol=r.protocol | {"benchmark": r.protocol["benchmark"] | {"quick": True}}
        )
        for r in digits_records
    ]
    board = make_board(digits_spec, [*digits_records, *quick])
    assert not board.quick
    assert board.cell("Soft", "Batches of 20").summary.mean > 50
    board = make_board(digits_spec, quick)
    assert board.quick
    assert board.cell("Soft", "Batches of 20").summary.mean == pytest.approx(10)


def test_records_of_another_benchmark_or_row_are_refused(
    digits_spec: Spec, digits_records: list[Record], make: MakeRecord
) -> None:
    with pytest.raises(DataError, match="no record of benchmark 'digits_two'"):
        make_board(digits_spec, [make()])
    with pytest.raises(DataError, match="no records"):
        make_board(digits_spec, [])
    spoilt = replace(
        digits_records[0],
        protocol={"benchmark": digits_records[0].protocol["benchmark"] | {"row": "Gone"}},
    )
    with pytest.raises(DataError, match="'Gone'"):
        make_board(digits_spec, [*digits_records, spoilt])


def test_a_run_stands_in_every_column_that_differs_in_its_metric_alone(
    digits_spec: Spec, digits_records: list[Record]
) -> None:
    first = digits_spec.settings[0]
    again = replace(first, name="Again, ECE", metric="ece")
    spec = replace(digits_spec, settings=(*digits_spec.settings, again))
    board = make_board(spec, digits_records)
    own, shared = board.cell("Soft", first.name), board.cell("Soft", again.name)
    assert [r.ece for r in own.records] == [r.ece for r in shared.records] != []
    assert shared.summary.mean == pytest.approx(100 * statistics.fmean(r.ece for r in own.records))
    assert board.cell("Soft", "Batches of 4").records != own.records
    only = replace(digits_spec.row("Soft"), settings=(first.name,))
    fewer = replace(spec, rows=tuple(only if row.label == "Soft" else row for row in spec.rows))
    mine = [r for r in digits_records if r.method != "soft" or r.batch_size == 20]
    assert make_board(fewer, mine).cell("Soft", again.name) is None, "the row is not of that column"


def test_a_run_of_its_own_goes_before_one_that_is_shared(
    digits_spec: Spec, digits_records: list[Record]
) -> None:
    again = replace(digits_spec.settings[0], name="Again")
    spec = replace(digits_spec, settings=(*digits_spec.settings, again))
    one = next(
        r for r in digits_records if (r.method, r.batch_size, r.seed, r.target) == ("soft", 20, 0, "0")
    )
    place = one.protocol["benchmark"] | {"setting": "Again"}
    own = replace(one, accuracy=0.01, protocol=one.protocol | {"benchmark": place})
    for records in ([own, *digits_records], [*digits_records, own]):
        board = make_board(spec, records)
        assert board.cell("Soft", "Again").of("0")[0] == pytest.approx(1.0)
        assert board.cell("Soft", digits_spec.settings[0].name).of("0")[0] > 50


def test_the_benchmark_of_records(make: MakeRecord) -> None:
    def of(spec: str) -> Record:
        return make(protocol={"benchmark": {"spec": spec}})

    assert spec_of([make()]) is None
    assert spec_of([make(), of("compare")]) is None
    assert spec_of([of("rotated"), make()]).name == "rotated"
    with pytest.raises(DataError, match=r"several benchmarks \(ablation, rotated\)"):
        spec_of([of("rotated"), of("ablation")])
    with pytest.raises(DataError, match="'mine': give its file"):
        spec_of([of("mine")])


def test_streams_of_one_model_are_one_repetition(make: MakeRecord) -> None:
    drawn = [
        make(seed=100 * model + draw, accuracy=0.1 * draw + model, protocol={"provenance": {"seed": model}})
        for model in range(2)
        for draw in range(4)
    ]
    [column] = make_board(None, drawn).columns
    [cell] = column.cells.values()
    assert dict(cell.values) == pytest.approx({0: 15.0, 1: 115.0})


def test_records_of_no_benchmark_fall_in_columns_by_what_they_were_measured_on(make: MakeRecord) -> None:
    records = [make(stream=s, batch_size=b) for s in ("online", "label_shift") for b in (4, 20)]
    names = [column.name for column in make_board(None, records).columns]
    assert names == [
        "online stream, batch size 4",
        "online stream, batch size 20",
        "label shift stream, batch size 4",
        "label shift stream, batch size 20",
    ]
    assert [column.name for column in make_board(None, [make()]).columns] == ["digits"]


def test_options_that_one_seed_ran_side_by_side_are_rows_of_their_own(make: MakeRecord) -> None:
    def run(lr: float, seed: int) -> Record:
        return make(method="soft", seed=seed, protocol={"adapter": {"lr": lr, "seed": seed}})

    side_by_side = [run(lr, seed) for lr in (1e-3, 1e-4) for seed in range(2)]
    assert {one.row for one in by_looks(side_by_side)} == {"soft, lr 0.001", "soft, lr 0.0001"}
    chosen = [run(1e-3, 0), run(1e-4, 1)]
    assert {one.row for one in by_looks(chosen)} == {"soft"}
    assert list(telling_options(chosen).values()) == [[]]
    repeated = [run(1e-3, 0), replace(run(1e-3, 0), accuracy=0.9)]
    assert [one.record.accuracy for one in by_looks(repeated)] == [0.9]


def test_the_reference_of_plain_records_is_the_erm_model_alone(make: MakeRecord) -> None:
    records = [make(method="erm"), make(method="erm", statistics="batch"), make(method="tent")]
    [column] = make_board(None, records).columns
    assert column.reference == "ERM (source)"
    [column] = make_board(None, [make(method="tent")]).columns
    assert column.reference is None


def test_expectations(digits_spec: Spec, digits_records: list[Record]) -> None:
    outcomes = check_expectations(digits_spec, make_board(digits_spec, digits_records))
    assert [outcome.met for outcome in outcomes] == [True, True, False, None]
    assert outcomes[1].against.difference > 4


@pytest.mark.parametrize(
    ("bound", "met"),
    [
        ({"at_least": 50.0}, True),
        ({"at_least": 50.1}, False),
        ({"at_least": 50.4, "tolerance": 0.5}, True),
        ({"at_most": 50.0}, True),
        ({"at_most": 49.9}, False),
        ({"above": "Same"}, False),
        ({"above": "Same", "tolerance": 0.1}, True),
        ({"below": "Same"}, False),
        ({"above": "Lower"}, True),
        ({"below": "Lower"}, False),
        ({"above": "Nowhere"}, None),
    ],
)
def test_each_bound(make: MakeRecord, bound: dict[str, object], met: bool | None) -> None:
    rows = tuple(Row(label, "erm") for label in ("One", "Same", "Lower", "Nowhere"))
    spec = Spec(
        "s",
        "t",
        settings=(Setting("S", "digits", (("90",),)),),
        rows=rows,
        expects=(Expect("One", "S", **bound),),
    )
    records = [
        make(accuracy=value, protocol={"benchmark": {"spec": "s", "setting": "S", "row": label}})
        for label, value in (("One", 0.5), ("Same", 0.5), ("Lower", 0.4))
    ]
    [outcome] = check_expectations(spec, make_board(spec, records))
    assert outcome.met is met


def test_rows_are_compared_over_the_seeds_that_both_have(make: MakeRecord) -> None:
    """A hard seed that the other row lacks would otherwise decide, though ours is above wherever both ran."""
    rows = tuple(Row(label, "erm") for label in ("Ours", "Other", "Elsewhere"))
    expects = tuple(Expect("Ours", "S", above=name) for name in ("Other", "Elsewhere"))
    spec = Spec("s", "t", settings=(Setting("S", "digits", (("90",),)),), rows=rows, expects=expects)
    values = {("Ours", 0): 0.9, ("Ours", 1): 0.5, ("Other", 0): 0.8, ("Elsewhere", 2): 0.1}
    records = [
        make(accuracy=value, seed=seed, protocol={"benchmark": {"spec": "s", "setting": "S", "row": label}})
        for (label, seed), value in values.items()
    ]
    other, elsewhere = check_expectations(spec, make_board(spec, records))
    assert (other.met, other.seeds) == (True, 1)
    assert (other.value, other.bound) == pytest.approx((90.0, 80.0))
    assert elsewhere.met is None
    shown = [expectation(one, make_board(spec, records)) for one in (other, elsewhere)]
    assert [one.found.split(",")[0] for one in shown] == ["90.0% here (1 seed)", "no seed in common"]


def test_more_than_a_distance_is_said_so(make: MakeRecord) -> None:
    rows = (Row("Ours", "erm"), Row("Other", "erm"))
    expects = tuple(Expect("Ours", "S", above="Other", tolerance=-by) for by in (9.0, 11.0))
    spec = Spec("s", "t", settings=(Setting("S", "digits", (("90",),)),), rows=rows, expects=expects)
    records = [
        make(accuracy=value, protocol={"benchmark": {"spec": "s", "setting": "S", "row": label}})
        for label, value in (("Ours", 0.9), ("Other", 0.8))
    ]
    board = make_board(spec, records)
    near, far = (expectation(one, board) for one in check_expectations(spec, board))
    assert (near.met, near.what) == (True, "S: Ours above Other by more than 9")
    assert (far.met, far.what) == (False, "S: Ours above Other by more than 11")
