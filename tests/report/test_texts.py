import pytest

from vicinal.benchmarks.metric import METRICS
from vicinal.benchmarks.spec import Spec
from vicinal.evaluation.record import Record
from vicinal.evaluation.statistics import Paired, Summary
from vicinal.report.board import make_board
from vicinal.report.texts import best_rows, difference_to_paper, difference_to_reference, printed_cell

ACCURACY, ECE = METRICS["accuracy"], METRICS["ece"]


@pytest.mark.parametrize(
    ("paper", "metric", "text", "word"),
    [
        (84.0, ACCURACY, "+1.0", "better"),
        (84.0, ECE, "+1.0", "worse"),
        (86.0, ACCURACY, "\N{MINUS SIGN}1.0", "worse"),
        (86.0, ECE, "\N{MINUS SIGN}1.0", "better"),
        (84.7, ACCURACY, "+0.3", "unclear"),
        (85.04, ACCURACY, "0.0", "equal"),
    ],
)
def test_a_difference_to_the_paper_has_a_sign_and_a_word(
    paper: float, metric: object, text: str, word: str
) -> None:
    ours = Summary(85.0, 0.6, 84.5, 85.5, 5)
    found = difference_to_paper(ours, paper, metric)
    assert (found.text, found.word) == (text, word)
    assert found.kind == (word if word in ("better", "worse") else "plain")


def test_one_seed_gives_a_difference_and_no_verdict() -> None:
    found = difference_to_paper(Summary(85.0, None, None, None, 1), 80.0, ACCURACY)
    assert (found.text, found.word, found.kind) == ("+5.0", "", "plain")
    found = difference_to_reference(Paired(5.0, None, None, None, 1), ACCURACY)
    assert (found.text, found.word, found.detail) == ("+5.0", "", "")


@pytest.mark.parametrize(
    ("against", "word", "detail"),
    [
        (Paired(2.0, 1.0, 3.0, 0.0625, 5), "better", "+1.0 to +3.0, p 0.062"),
        (Paired(-2.0, -3.0, -1.0, 0.0001, 14), "worse", "\N{MINUS SIGN}3.0 to \N{MINUS SIGN}1.0, p < 0.001"),
        (Paired(2.0, -1.0, 3.0, 0.5, 6), "unclear", "\N{MINUS SIGN}1.0 to +3.0, p 0.50"),
        (Paired(2.0, 1.0, 3.0, None, 3), "better", "+1.0 to +3.0, untested"),
    ],
)
def test_a_difference_to_the_reference_says_what_was_tested(against: Paired, word: str, detail: str) -> None:
    found = difference_to_reference(against, ACCURACY)
    assert (found.word, found.detail) == (word, detail)


def test_a_cell_in_print(digits_spec: Spec, digits_records: list[Record]) -> None:
    column = make_board(digits_spec, digits_records).columns[0]
    cell = printed_cell(column.cells["ERM baseline"], column)
    assert (cell.paper, cell.paper_to_reference, cell.to_reference, cell.seeds) == (
        "80.0 ± 0.25",
        "",
        None,
        5,
    )
    cell = printed_cell(column.cells["Soft"], column)
    assert (cell.paper, cell.paper_to_reference) == ("84.0", "+4.0")
    cited = printed_cell(column.cells["Cited et al."], column)
    assert (cited.value, cited.paper, cited.to_paper, cited.paper_to_reference) == (
        "",
        "77.7",
        None,
        "\N{MINUS SIGN}2.3",
    )
    assert best_rows(column) == {"This paper"}
