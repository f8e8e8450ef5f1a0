"""What the page says: records to plain texts and numbers as printed, without any markup."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vicinal.evaluation.record import Record
from vicinal.report.plots import LineStyle
from vicinal.report.tables import (
    Row,
    Setup,
    base_name,
    best,
    decimal,
    difference,
    percent,
    points,
    reference,
    setup_of,
)

_MAX_VALUES = 6
_PREDICTS = {
    "own": "own output",
    "labels": "neighbor labels",
    "neighbors": "votes of nearest neighbors",
    "chosen": "own output or labels, as chosen",
}


@dataclass(frozen=True)
class Line:
    """One row of the page's result table, as printed."""

    name: str
    detail: str
    style: LineStyle | None
    is_reference: bool
    is_best: bool
    complete: bool
    accuracy: str
    accuracy_std: str
    difference: str
    ece: str
    ece_std: str
    nll: str
    brier: str
    targets: list[str]
    speed: str
    seeds: int


@dataclass(frozen=True)
class ResultTable:
    """The results on one kind of stream."""

    stream: str
    targets: list[str]
    lines: list[Line]
    has_reference: bool
    has_spread: bool
    complete: bool


@dataclass(frozen=True)
class Headline:
    """The outcome on one kind of stream in a sentence: `winner` is set in bold between the two halves."""

    stream: str
    winner: str
    rest: str


def stream_name(stream: str) -> str:
    """Return the kind of stream in plain words."""
    return stream.replace("_", " ")


def facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return what was measured, as pairs of name and value."""

    def values(field: str) -> list[Any]:
        return list(dict.fromkeys(getattr(record, field) for record in records))

    return [
        ("dataset", ", ".join(values("dataset"))),
        ("targets", ", ".join(values("target"))),
        ("backbone", ", ".join(values("backbone"))),
        ("batch size", ", ".join(map(str, values("batch_size")))),
        ("seeds", str(len(values("model_seed")))),
        ("runs", str(len(records))),
    ]


def headline(rows: Sequence[Row], stream: str, names: Mapping[Setup, str]) -> Headline:
    """Return who did best on a stream, and by how much against ERM."""
    of_stream = [row for row in rows if row.stream == stream]
    erm, winners = reference(of_stream, stream), best(of_stream)
    if not winners:
        return Headline(stream_name(stream), "", "there are no two results to compare.")
    if erm in winners:
        return Headline(
            stream_name(stream), "", f"nothing is above ERM ({percent(winners[0].accuracy_mean)}%)."
        )
    rest = f"has the highest mean accuracy, {percent(winners[0].accuracy_mean)}%"
    gain = points(difference(winners[0], erm))
    if erm is not None and gain:
        rest += f", {gain.removeprefix('+')} points above ERM ({percent(erm.accuracy_mean)}%)"
    winner = " and ".join(names[row.setup] for row in winners)
    return Headline(
        stream_name(stream), winner, (rest.replace("has", "have", 1) if winners[1:] else rest) + "."
    )


def result_table(rows: Sequence[Row], stream: str, styles: Mapping[Setup, LineStyle]) -> ResultTable:
    """Return the rows of one stream as printed."""
    of_stream = [row for row in rows if row.stream == stream]
    targets = list(dict.fromkeys(target for row in of_stream for target in row.per_target))
    erm, winners = reference(of_stream, stream), best(of_stream)
    return ResultTable(
        stream=stream_name(stream),
        targets=targets,
        lines=[_line(row, styles.get(row.setup), targets, erm, row in winners) for row in of_stream],
        has_reference=erm is not None,
        has_spread=any(row.seeds > 1 for row in of_stream),
        complete=all(row.complete for row in of_stream),
    )


def _line(row: Row, style: LineStyle | None, targets: Sequence[str], erm: Row | None, is_best: bool) -> Line:
    several = row.seeds > 1
    predicts = _PREDICTS.get(row.predict, row.predict)
    return Line(
        name=base_name(row.setup),
        detail=f"{row.algorithm} · {row.statistics} statistics · {predicts}",
        style=style,
        is_reference=row is erm,
        is_best=is_best,
        complete=row.complete,
        accuracy=percent(row.accuracy_mean),
        accuracy_std=f"± {percent(row.accuracy_std)}" if several else "",
        difference="" if row is erm else points(difference(row, erm)),
        ece=percent(row.ece_mean),
        ece_std=f"± {percent(row.ece_std)}" if several else "",
        nll=decimal(row.nll_mean),
        brier=decimal(row.brier_mean),
        targets=[percent(row.per_target[t]) if t in row.per_target else "" for t in targets],
        speed=f"{row.images_per_second:,.0f}",
        seeds=row.seeds,
    )


def by_target(records: Sequence[Record], stream: str) -> dict[str, list[Record]]:
    """Return the records of one stream by target."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.stream == stream:
            found.setdefault(record.target, []).append(record)
    return found


def by_setup(records: Sequence[Record], stream: str) -> dict[Setup, list[Record]]:
    """Return the records of one stream by setup."""
    found: dict[Setup, list[Record]] = {}
    for record in records:
        if record.stream == stream:
            found.setdefault(setup_of(record), []).append(record)
    return found


@dataclass(frozen=True)
class Choices:
    """The candidates a rule was chosen from: (name, is numeric) per column, (was chosen, texts) per line."""

    columns: list[tuple[str, bool]]
    lines: list[tuple[bool, list[str]]]


def choice_table(choices: Sequence[Mapping[str, Any]]) -> Choices:
    """Return the choice table as printed; a column is numeric where all its values are numbers."""
    names = list(dict.fromkeys(key for choice in choices for key in choice if key != "chosen"))
    columns, texts = [], []
    for name in names:
        values = [choice.get(name) for choice in choices]
        columns.append((name.replace("_", " "), all(_is_number(v) for v in values if v is not None)))
        texts.append(_column(values))
    lines = [
        (bool(choice.get("chosen")), [column[i] for column in texts]) for i, choice in enumerate(choices)
    ]
    return Choices(columns, lines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _column(values: Sequence[Any]) -> list[str]:
    """Return a column's texts: as many decimals in each, unless step sizes or the like need exponents."""
    floats = [abs(v) for v in values if isinstance(v, float) and math.isfinite(v) and v != 0]
    if floats and all(0.001 <= v < 1e5 for v in floats):
        return [f"{v:.3f}" if isinstance(v, float) and math.isfinite(v) else as_text(v) for v in values]
    return [as_text(v) for v in values]


def shared(mappings: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return every setting with its value; where runs differ, the values in order of first appearance."""
    values: dict[str, list[str]] = {}
    for mapping in mappings:
        for key, value in flat(mapping):
            text = as_text(value)
            if text not in values.setdefault(key, []):
                values[key].append(text)
    return [(key, _several(texts)) for key, texts in sorted(values.items())]


def _several(texts: Sequence[str]) -> str:
    more = len(texts) - _MAX_VALUES
    return " | ".join(texts[:_MAX_VALUES]) + (f" | and {more} more" if more > 0 else "")


def flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield every value with its dotted name."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_text(value: Any) -> str:
    """Return a setting or figure as printed: floats to four digits, lists joined, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "NaN"
    if isinstance(value, list | tuple):
        return ", ".join(map(as_text, value))
    return str(value)
