"""What README and docs/experiments.md, sections 53 and 60, claim of later runs is what their records say."""

import re
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from vicinal.evaluation.record import Record
from vicinal.report.select import read_all

ROOT = Path(__file__).parents[2]
TABLE, LONGER, RIVALS = "pacs-resnet50_v1", "pacs-longer", "pacs-rivals"
DOUBT = "`vnl` (with the anchor's doubt -> without)"
SURE = "vnl, entropy alone, as sure as it agrees"
COLUMNS = ("Batches of 64", "Dirichlet 0.5", "Dirichlet 1")
RIVALRY = {  # the lines of the table of rivals: whose row, which figure
    "stream statistics, no update": ("Stream statistics", "accuracy"),
    "votes, no update": ("vnl, no update", "accuracy"),
    "entropy alone, with votes": ("vnl, entropy alone", "accuracy"),
    "`vnl`": ("vnl", "accuracy"),
    "ECE of entropy alone with votes, as sure as it is": ("vnl, entropy alone", "ece"),
    "the same, as sure as it agrees": (SURE, "ece"),
    "ECE of `vnl`": ("vnl", "ece"),
}
ERM_ROWS = {  # the lines of the table of longer training: the row of the table of PACS, of 4,000 iterations
    "no adaptation": ("ERM baseline", "No adaptation, ERM"),
    "stream statistics": ("Stream statistics", "Stream statistics, ERM"),
    "`soft`, our steps": (
        "Soft pseudo label, stream statistics, steps as ours",
        "Soft pseudo label, stream statistics, steps as ours, ERM",
    ),
    DOUBT: ("vnl, on the ERM model", "vnl, ERM"),
}
META_ROWS = {
    "no adaptation": ("No adaptation, meta-trained", "No adaptation"),
    "stream statistics": ("Stream statistics, meta-trained", "Stream statistics"),
    "`soft`, our steps": (
        "Soft pseudo label, stream statistics, steps as ours, meta-trained",
        "Soft pseudo label, stream statistics, steps as ours",
    ),
    "entropy alone with votes": ("vnl, entropy alone", "vnl, entropy alone"),
    DOUBT: ("vnl", "vnl"),
}

pytestmark = pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="not a checkout")


@cache
def records(folder: str) -> list[Record]:
    return read_all([ROOT / "results" / folder])


def figures(folder: str, row: str, column: str, name: str = "accuracy") -> dict[str, float]:
    """Return a figure in percent by target, of the first seed."""
    return {
        record.target: 100 * getattr(record, name)
        for record in records(folder)
        if record.model_seed == 0
        and (record.protocol["benchmark"]["row"], record.protocol["benchmark"]["setting"]) == (row, column)
    }


def cells(part: str, start: str) -> list[str]:
    """Return the cells of a line of section 60 in one of its parts, by its first cell."""
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    text = text[text.index("\n## 60. ") : text.index("\n## 61. ")]
    longer, rivals = text.split("\n*Result*, rivals")
    text = {LONGER: longer, RIVALS: rivals}[part]
    (line,) = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


@pytest.mark.parametrize("start", RIVALRY)
def test_rivals(start: str) -> None:
    row, name = RIVALRY[start]
    found = [figures(RIVALS, row, column, name) for column in COLUMNS]
    assert [len(one) for one in found] == [4, 4, 4]
    assert cells(RIVALS, start) == [f"{mean(f.values()):.1f}" for f in found]


@pytest.mark.parametrize(("rows", "place"), [(ERM_ROWS, 0), (META_ROWS, 1)], ids=["erm", "meta"])
def test_longer_training(rows: dict[str, tuple[str, str]], place: int) -> None:
    column = ("ERM, 4,000", "meta, 4,000")[place]
    for start, (before, after) in rows.items():
        old, new = figures(TABLE, before, "Batches of 20"), figures(LONGER, after, column)
        domains = ("art_painting", "sketch")
        told = " -> ".join(" ".join(f"{of[name]:.1f}" for name in domains) for of in (old, new))
        gain = mean(new[name] - old[name] for name in domains)
        assert cells(LONGER, start)[place] == f"{told}, {gain:+.1f}".replace("+0.0", "0.0"), start


def test_what_votes_leave_of_the_lead_where_classes_are_drawn() -> None:
    ours, entropy, votes = (
        [mean(figures(RIVALS, row, column).values()) for column in COLUMNS]
        for row in ("vnl", "vnl, entropy alone", "vnl, no update")
    )
    by_entropy, by_votes = ([a - b for a, b in zip(ours, of, strict=True)] for of in (entropy, votes))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    behind = "entropy minimisation is {:.1f} and {:.1f} behind `vnl`, no update {:.1f} and {:.1f}"
    assert behind.format(*by_entropy[1:], *by_votes[1:]) in text
    assert f"with votes entropy minimisation is {-by_entropy[0]:.1f} above `vnl`" in text


def test_garments() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    by_seed: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for record in records("compare-rotated_fashion"):
        rows = by_seed.setdefault(record.algorithm, {}).setdefault((record.method, record.statistics), {})
        rows[record.seed] = rows.get(record.seed, 0.0) + 50 * record.accuracy
    leads = {}
    for algorithm in ("erm", "meta"):
        ranked = sorted(by_seed[algorithm].items(), key=lambda row: -mean(row[1].values()))
        (first, ours), (_, theirs) = ranked[:2]
        assert first == ("vnl", "stream")
        leads[algorithm] = [ours[seed] - theirs[seed] for seed in sorted(ours)]
    told = ", ".join(f"{lead:+.1f}" for lead in leads["erm"])
    assert f"it is {mean(leads['erm']):.1f} above the next from ERM models (SHOT-IM; {told} by seed" in text
    assert f"{mean(leads['meta']):.1f} from meta-trained ones, where four others run" in text
