"""Data sets as tables: what there is, what is missing, what a check found."""

from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from vicinal.data.check import Check
from vicinal.data.entries import DatasetEntry, Tree
from vicinal.data.find import Status

COLOURS = {"found": "green", "built in": "green", "incomplete": "yellow", "missing": "red"}


def catalog_table(entries: Iterable[DatasetEntry]) -> Table:
    """Return one row for each data set that is known by name."""
    table = Table(title="Data sets known by name")
    table.add_column("name", no_wrap=True)
    for name in ("images", "classes", "px"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("domains", "licence as stated", "where"):
        table.add_column(name, overflow="fold")
    for entry in entries:
        table.add_row(
            entry.name,
            f"{entry.images:,}",
            str(len(entry.classes)),
            str(entry.size),
            _few(entry.domains),
            entry.licence,
            entry.home,
        )
    return table


def status_table(statuses: Iterable[Status]) -> Table:
    """Return what there is of each data set, domain by domain, against the catalog."""
    table = Table(title="Data sets on this machine")
    for name in ("name", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("where", "layout", "split", "images found / expected"):
        table.add_column(name, overflow="fold")
    for status in statuses:
        state = f"[{COLOURS[status.state]}]{status.state}[/]"
        counts = _counts(status) if status.found else ""
        table.add_row(status.entry.name, state, escape(status.where), status.layout, status.split, counts)
    return table


def _counts(status: Status) -> str:
    expected, found = status.entry.counts, status.found
    differing = [domain for domain in expected if found.get(domain, 0) != expected[domain]]
    total = f"{sum(found.values()):,} / {status.entry.images:,}"
    if not differing:
        return total
    lines = [f"{domain} {found.get(domain, 0):,} / {expected[domain]:,}" for domain in differing]
    return "\n".join([total, *lines])


def check_table(check: Check) -> Table:
    """Return the counts of each domain: its parts, and its classes where they are few or differ."""
    table = Table(title=f"{escape(check.name)}: {sum(sum(d.found) for d in check.domains):,} images decoded")
    table.add_column("domain", no_wrap=True)
    for name in ("images", "catalog", "train", "val", "test"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("classes", overflow="fold")
    for domain in check.domains:
        expected = "" if domain.expected is None else f"{sum(domain.expected):,}"
        mark = "" if domain.complete else "[red]differs: [/]"
        table.add_row(
            escape(domain.name),
            f"{sum(domain.found):,}",
            expected,
            *(f"{count:,}" for count in domain.parts),
            mark + escape(_class_counts(check.classes, domain.found, domain.expected)),
        )
    return table


def _class_counts(classes: Sequence[str], found: Sequence[int], expected: Sequence[int] | None) -> str:
    if expected is not None and len(expected) == len(found) and tuple(expected) != tuple(found):
        pairs = zip(classes, found, expected, strict=True)
        return ", ".join(f"{name} {have} of {want}" for name, have, want in pairs if have != want)
    shown = [f"{name} {count}" for name, count in zip(classes, found, strict=True)]
    return _few(shown, 10)


def _few(names: Sequence[str], most: int = 7) -> str:
    rest = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def catalog_markdown(entries: Iterable[DatasetEntry]) -> str:
    """Return the catalog as a Markdown table, as docs/data.md has it."""
    lines = [
        "| name | images | classes | px | domains | split | licence as stated |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for entry in entries:
        cells = (
            f"`{entry.name}`",
            f"{entry.images:,}",
            str(len(entry.classes)),
            str(entry.size),
            _few(entry.domains),
            _split_rule(entry),
            entry.licence,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _split_rule(entry: DatasetEntry) -> str:
    """Return in a few words how a data set is divided."""
    if not isinstance(entry.source, Tree):
        return "by base image, seeded"
    rule = entry.source.split
    share = f"seeded, {rule.val_fraction:.0%} of every class for validation"
    if rule.lists is None:
        return share
    if not rule.lists.needed:
        return f"official lists say what belongs to it; {share}"
    return "official lists"
