"""Records to one self-contained page: no script, no file beside it, nothing fetched."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vicinal.errors import DataError
from vicinal.evaluation.record import Record
from vicinal.report import content
from vicinal.report.examples import Example, image_data_uri
from vicinal.report.plots import LineStyle, curves, figure_data_uri, line_styles, reliability_diagram
from vicinal.report.tables import Setup, labels, latest, summarise
from vicinal.versions import versions


@dataclass(frozen=True)
class Panel:
    """One picture: its caption, its data URI and what it shows, for those who cannot see it."""

    caption: str
    uri: str
    alt: str


@dataclass(frozen=True)
class StreamFigures:
    """The pictures of one kind of stream."""

    stream: str
    curves: list[Panel]
    reliability: list[Panel]


def write_report(
    records: Sequence[Record],
    examples: Sequence[Example],
    path: Path,
    title: str,
    notes: Sequence[str],
    *,
    choices: Sequence[Mapping[str, Any]] = (),
    highlight: Sequence[str] = (),
) -> None:
    """Return once `path` holds the page; it is replaced whole, so a reader never meets half of it.

    `choices` are the candidates a rule was chosen from, one mapping each, with the figures behind the choice;
    a true "chosen" marks the winner. `highlight` names the methods to draw; without it the most accurate ones
    are.
    """
    if not records:
        raise DataError("no records to report: run an evaluation first")
    records = latest(records)
    html = (
        environment()
        .get_template("template.html.j2")
        .render(
            title=title,
            notes=notes,
            examples=[_shown(example) for example in examples],
            choices=content.choice_table(choices),
            written_by=versions()["vicinal"],
            **_results(records, highlight),
        )
    )
    replace_text(path, html)


def environment() -> Environment:
    """Return what renders a page: every text is escaped, a missing value is an error."""
    made = Environment(
        loader=PackageLoader("vicinal.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Long names of methods have no other place to break at than their underscores.
    made.filters["breakable"] = lambda text: escape(text).replace("_", Markup("_<wbr>"))
    return made


def _results(records: Sequence[Record], highlight: Sequence[str]) -> dict[str, Any]:
    """Return the template's values that come from the records."""
    rows = summarise(records)
    names = labels(row.setup for row in rows)
    styles = line_styles(records, highlight)
    streams = list(dict.fromkeys(record.stream for record in records))
    return {
        "facts": content.facts(records),
        "headlines": [content.headline(rows, stream, names) for stream in streams],
        "tables": [content.result_table(rows, stream, styles) for stream in streams],
        "figures": [_figures(records, stream, styles) for stream in streams],
        "legend": list(styles.values()),
        "spread": any(row.seeds > 1 for row in rows),
        "undrawn": len(names) - len(styles),
        "protocol": content.shared(record.protocol for record in records),
        "versions": content.shared(record.versions for record in records),
    }


def _figures(records: Sequence[Record], stream: str, styles: Mapping[Setup, LineStyle]) -> StreamFigures:
    """Return a picture per target and one per setup.

    Apart, they can stand in as many columns as a screen has room for.
    """
    name = content.stream_name(stream)
    along = [
        Panel(
            caption=target,
            uri=figure_data_uri(curves(members, styles, bare=True)),
            alt=f"Cumulative accuracy along the {name} stream of target {target}",
        )
        for target, members in content.by_target(records, stream).items()
    ]
    by_setup = content.by_setup(records, stream)
    trust = [
        Panel(
            caption=style.label,
            uri=figure_data_uri(reliability_diagram(by_setup[setup], {setup: style}, bare=True)),
            alt=f"Accuracy against confidence of {style.label} on the {name} stream",
        )
        for setup, style in styles.items()
        if setup in by_setup
    ]
    return StreamFigures(name, along, trust)


def _shown(example: Example) -> dict[str, Any]:
    """Return an example as printed."""
    return {
        "uri": image_data_uri(example.image),
        "truth": example.truth,
        "target": example.target,
        "predictions": [
            ("before", example.before, f"{example.before_confidence:.0%}", example.before == example.truth),
            ("after", example.after, f"{example.after_confidence:.0%}", example.after == example.truth),
        ],
    }


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
