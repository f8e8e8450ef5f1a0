import math
from collections.abc import Callable

import pytest

from vicinal.evaluation.record import Record
from vicinal.report.content import as_text, choice_table, facts, headline, result_table, shared
from vicinal.report.plots import line_styles
from vicinal.report.tables import labels, summarise

MakeRecord = Callable[..., Record]


def said(records: list[Record]) -> str:
    rows = summarise(records)
    line = headline(rows, "online", labels(row.setup for row in rows))
    return f"{line.winner}: {line.rest}"


def test_the_headline_says_who_won_and_by_how_much(make: MakeRecord) -> None:
    tent, t3a = make(method="tent", accuracy=0.623), make(method="t3a", accuracy=0.6)
    assert said([make(), tent, t3a]) == (
        "tent: has the highest mean accuracy, 62.3%, 12.3 points above ERM (50.0%)."
    )
    assert said([tent, t3a]) == "tent: has the highest mean accuracy, 62.3%."
    assert said([tent, make(method="t3a", accuracy=0.623)]) == (
        "tent and t3a: have the highest mean accuracy, 62.3%."
    )
    assert said([make(), make(method="t3a", accuracy=0.4)]) == ": nothing is above ERM (50.0%)."
    assert said([tent]) == ": there are no two results to compare."


def test_the_result_table_prints_every_number(make: MakeRecord) -> None:
    records = [make(seed=s, target=t) for s in range(2) for t in ("a", "b")]
    records += [make(method="tent", seed=s, target="a", accuracy=0.5 + s / 10) for s in range(2)]
    table = result_table(summarise(records), "online", line_styles(records))
    assert (table.targets, table.has_reference, table.has_spread, table.complete) == (
        ["a", "b"],
        True,
        True,
        True,
    )
    erm, tent = table.lines
    assert (erm.name, erm.detail, erm.is_reference) == ("ERM", "erm · source statistics · own output", True)
    assert (erm.accuracy, erm.accuracy_std, erm.difference) == ("50.0", "± 0.0", "")
    assert (erm.ece, erm.nll, erm.brier, erm.speed) == ("10.0", "1.500", "0.750", "1,234")
    assert (tent.accuracy, tent.accuracy_std, tent.difference, tent.targets) == (
        "55.0",
        "± 7.1",
        "",
        ["55.0", ""],
    )


def test_facts_name_what_was_measured(make: MakeRecord) -> None:
    found = dict(facts([make(), make(seed=1), make(target="75", seed=1)]))
    assert found == {
        "dataset": "digits",
        "targets": "90, 75",
        "backbone": "cnn",
        "batch size": "20",
        "seeds": "2",
        "runs": "3",
    }


def test_the_choice_table_aligns_decimals_and_marks_the_chosen() -> None:
    table = choice_table(
        [
            {"rule": "none", "step_size": 0.0, "accuracy": 0.7},
            {"rule": "tent", "step_size": 3e-5, "accuracy": 0.71239, "chosen": True, "why": "best"},
        ]
    )
    assert table.columns == [("rule", False), ("step size", True), ("accuracy", True), ("why", False)]
    assert table.lines == [
        (False, ["none", "0", "0.700", "-"]),
        (True, ["tent", "3e-05", "0.712", "best"]),
    ]
    assert choice_table([]).lines == []


def test_settings_that_differ_are_listed() -> None:
    runs = [{"adapter": {"step_size": 10.0**-i}, "epochs": 3} for i in range(8)]
    assert shared(runs) == [
        ("adapter.step_size", "1 | 0.1 | 0.01 | 0.001 | 0.0001 | 1e-05 | and 2 more"),
        ("epochs", "3"),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (False, "no"),
        (3, "3"),
        (1 / 3, "0.3333"),
        (math.nan, "NaN"),
        ([1, "a"], "1, a"),
    ],
)
def test_values_as_text(value: object, text: str) -> None:
    assert as_text(value) == text
