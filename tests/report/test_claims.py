"""What README and docs/experiments.md, section 52, claim of PACS is what its records say."""

import re
from functools import cache
from pathlib import Path

import pytest

from vicinal.benchmarks.spec import load_spec
from vicinal.report.board import Board, Cell, make_board
from vicinal.report.select import read_all
from vicinal.report.series import Error, errors_of

ROOT = Path(__file__).parents[2]
DRAWN = ("Dirichlet 0.5", "Dirichlet 1")
NO_UPDATE, AS_IT_IS = "Stream statistics, meta-trained", "No adaptation, meta-trained"
ERM = "Soft pseudo label, stream statistics, steps as ours"
SOFT = f"{ERM}, meta-trained"
ABLATION = {  # how a line of the table begins, and the rows without that part
    "statistics of the stream": ["vnl, batch statistics"],
    "labels by votes": ["vnl, own output", "vnl, labels by phi"],
    "rounds and two views": ["vnl, one round of votes", "vnl, by own features"],
    "the anchor": ["vnl, entropy alone"],
    "entropy": ["vnl, shares alone"],
    "any update": ["vnl, no update"],
    "meta-training": ["vnl, on the ERM model"],
    "sureness": ["vnl, as sure as it is"],
}

pytestmark = pytest.mark.skipif(not (ROOT / "results").is_dir(), reason="not a checkout")


@cache
def board() -> Board:
    spec = load_spec(str(ROOT / "benchmarks" / "pacs.toml"))
    return make_board(spec, read_all([ROOT / "results" / "pacs-resnet50_v1"]))


def cell(row: str, column: str = "Batches of 20") -> Cell:
    found = board().cell(row, column)
    assert found is not None
    assert found.seeds == 3
    return found


def mean(row: str, column: str = "Batches of 20") -> str:
    found = cell(row, column).summary
    assert found is not None
    return f"{found.mean:.1f}"


def ahead(row: str, of: str, column: str) -> list[float]:
    """Return by how much a row is ahead of another on each stream of a column."""
    ours, others = cell(row, column).values_by_target, cell(of, column).values_by_target
    return [value - others[target][seed] for target, seeds in ours.items() for seed, value in seeds.items()]


@cache
def errors(column: str) -> dict[str, Error]:
    [found] = [one for one in board().columns if one.name == column]
    return errors_of(found)


def readme() -> str:
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def section_52() -> str:
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    return text[text.index("\n## 52. ") : text.index("\n## 53. ")]


@pytest.mark.parametrize("start", ABLATION)
def test_ablation(start: str) -> None:
    (line,) = re.findall(rf"^\| {start}.*\|$", section_52(), re.MULTILINE)
    _, whole, without = (part.strip() for part in line.strip("|").split("|"))
    column = "Batches of 20, ECE" if start == "sureness" else "Batches of 20"
    assert whole == mean("vnl", column)
    assert re.findall(r"\b\d\d?\.\d\b", without)[: len(ABLATION[start])] == [
        mean(row, column) for row in ABLATION[start]
    ]


def test_skewed_classes() -> None:
    above, unadapted, balanced = (
        [value for column in DRAWN for value in ahead(row, of, column)]
        for row, of in (
            ("vnl", NO_UPDATE),
            ("vnl", AS_IT_IS),
            ("vnl, balanced statistics", AS_IT_IS),
        )
    )
    text = readme()
    assert len(above) == len(unadapted) == len(balanced) == 24
    assert f"on each of {sum(value > 0 for value in above)} streams with drawn class shares" in text
    assert f"by {min(above):.1f} points at the least" in text
    assert f"above no adaptation on {sum(value > 0 for value in unadapted)} of them" in text
    assert min(balanced) > 0
    costs = ahead("vnl", "vnl, balanced statistics", "Batches of 20")
    assert f"on balanced statistics on all 24, at {sum(costs) / len(costs):.1f} less in natural order" in text
    sure = [
        [mean(row, f"{column}, ECE") for column in DRAWN]
        for row in ("vnl", NO_UPDATE, "vnl, balanced statistics")
    ]
    told = "the ECE of `vnl` is {} and {} there (no update: {} and {}), on balanced statistics {} and {}."
    assert told.removesuffix(".").format(*sure[0], *sure[1], *sure[2]) in text
    ours = [
        errors(f"{name}, ECE")[row].by_chance for name in DRAWN for row in ("vnl", "vnl, balanced statistics")
    ]
    told = f"a perfectly calibrated predictor would show {min(ours):.1f} to {max(ours):.1f} on so few images"
    assert told in text


def test_how_much_of_an_ece_is_chance() -> None:
    columns = [f"{name}, ECE" for name in ("Batches of 20", *DRAWN)]
    natural, half, one = (f"{errors(column)['vnl'].by_chance:.1f}" for column in columns)
    balanced = [f"{errors(column)['vnl, balanced statistics'].by_chance:.1f}" for column in columns[1:]]
    text = " ".join(section_52().split())
    assert f"would have {natural} at the confidences of `vnl` in natural order" in text
    assert f"but {half} and {one} with Dirichlet 0.5 and 1" in text
    assert f"on balanced statistics {balanced[0]} and {balanced[1]}" in text


def by_target(row: str, of: str) -> dict[str, float]:
    """Return by how much a row is ahead of another on each domain, batches of 20."""
    ours, others = cell(row).values_by_target, cell(of).values_by_target
    return {
        target: sum(value - others[target][seed] for seed, value in seeds.items()) / len(seeds)
        for target, seeds in ours.items()
    }


def test_what_wins() -> None:
    text = readme()
    assert f"Not labels by phi, which have {mean('vnl, labels by phi')} there:" in text
    votes, entropy = mean("vnl, no update"), mean("vnl, entropy alone")
    told = f"have {votes}, with entropy minimisation on the schedule of `vnl` {entropy}."
    assert f"Votes without any update {told}" in text
    taught = by_target("vnl", "vnl, on the ERM model")
    assert f"meta-training, which is worth {sum(taught.values()) / 4:.1f} points over ERM" in text
    shares = by_target("vnl", "vnl, entropy alone")
    others = sum(value for target, value in shares.items() if target != "sketch") / 3
    assert f"{shares['sketch']:.1f} on sketch, {others:.1f} on the mean of the other domains" in text
    ours, theirs = cell("vnl").values, cell("vnl, entropy alone").values
    seeds = [f"{ours[seed] - theirs[seed]:+.1f}" for seed in sorted(ours)]
    assert f"({seeds[0]}, {seeds[1]} and {seeds[2]} by seed)" in text
    sure = mean("vnl, as sure as it is", "Batches of 20, ECE")
    agreeing = mean(
        f"{SOFT.removesuffix(', meta-trained')}, as sure as it agrees, meta-trained", "Batches of 20, ECE"
    )
    ours_sure = mean("vnl", "Batches of 20, ECE")
    assert f"left as sure as they are (`vnl`: ECE {sure})" in text
    assert f"frozen source model ({ours_sure}), which left-out domains chose" in text
    assert f"Entropy minimisation made sure in that way has {agreeing};" in text


def test_where_it_does_not_win() -> None:
    text = readme()
    ours, theirs = mean("vnl, on the ERM model"), mean(ERM)
    assert f"entropy minimisation on its schedule has {theirs} and `vnl` {ours};" in text
    at_64 = ahead("vnl", "Soft pseudo label, stream statistics, meta-trained", "Batches of 64")
    at_20 = ahead("vnl", SOFT, "Batches of 20")
    lead = f"the lead over entropy minimisation is {sum(at_64) / 12:.1f}, not {sum(at_20) / 12:.1f},"
    assert f"at batches of 64 {lead}" in text


def test_who_is_next_on_digits() -> None:
    leads, methods = [], set()
    records = read_all([ROOT / "results" / "compare-digits"])
    for algorithm in ("erm", "meta"):
        figures: dict[tuple[str, str], list[float]] = {}
        for record in records:
            if record.algorithm == algorithm:
                figures.setdefault((record.method, record.statistics), []).append(record.accuracy)
        means = {name: 100 * sum(values) / 6 for name, values in figures.items() if len(values) == 6}
        assert len(means) == len(figures)
        best, second = sorted(means.values(), reverse=True)[:2]
        assert means["vnl", "stream"] == best
        leads.append(best - second)
        methods |= {method for method, _ in means} if algorithm == "erm" else set()
    told = f"the best of {len(methods) - 1} others (+{leads[0]:.1f} from ERM models, {leads[1]:.1f} from"
    assert told in readme()
