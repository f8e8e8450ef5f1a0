"""The tables of a comparison's README, from its records: methods on their own statistics and on the stream's.

    python benchmarks/comparison_readme.py results/compare-digits

What stands before the first table is kept as it is written.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vicinal.adapters.methods import METHODS
from vicinal.evaluation.record import Record
from vicinal.evaluation.statistics import per_seed, summary
from vicinal.report.select import read_all

COSTS = Path(__file__).parents[1] / "results" / "adapter-cost"
TITLES = {
    "erm": "From the ERM model",
    "meta": "From the meta-trained model",
    "single_sample": "From the model trained for `single_sample`",
    "ttt": "From the model trained for `ttt`",
    "ttt_pp": "From the model trained for `ttt_pp`",
}
HEAD = (
    "method",
    "own statistics",
    "accuracy % ± over seeds (ECE)",
    "on stream statistics",
    "step / inference, CPU",
    "H200",
)


def costs() -> list[dict[str, float]]:
    """Return what a step costs against plain inference by method, on a CPU and on a GPU."""
    files = [json.loads((COSTS / f"{name}.json").read_text()) for name in ("cpu", "h200")]
    return [{row["method"]: row["times_inference"] for row in one["rows"]} for one in files]


def mean_of(records: Sequence[Record]) -> float:
    return summary(list(per_seed((r.seed, r.target, r.accuracy) for r in records).values())).mean


def cell(records: Sequence[Record], best: float) -> str:
    """Return accuracy with its spread over seeds, and ECE; the best of a table is bold."""
    if not records:
        return ""
    accuracy = summary(list(per_seed((r.seed, r.target, r.accuracy) for r in records).values()))
    ece = summary(list(per_seed((r.seed, r.target, r.ece) for r in records).values()))
    text = f"{100 * accuracy.mean:.1f} ± {100 * (accuracy.std or 0):.1f} ({100 * ece.mean:.1f})"
    return f"**{text}**" if accuracy.mean == best else text


def table(records: Sequence[Record], steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the lines of one table, the method that is best on either statistics first."""
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        cells.setdefault((record.method, record.statistics), []).append(record)
    best = {
        method: max(mean_of(found) for (name, _), found in cells.items() if name == method)
        for method, _ in cells
    }
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for method in sorted(best, key=lambda name: -best[name]):
        own = METHODS[method].defaults.statistics.kind
        alone = [] if own == "stream" else cells.get((method, own), [])
        pair = (cell(found, max(best.values())) for found in (alone, cells.get((method, "stream"), [])))
        ratios = (f"{one[method]:.1f}" if method in one else "" for one in steps)
        lines.append(f"| {' | '.join((f'`{method}`', own, *pair, *ratios))} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    readme = parser.parse_args().folder / "README.md"
    records, steps = read_all([readme.parent]), costs()
    lines = readme.read_text(encoding="utf-8").split("\n## ")[0].rstrip("\n").split("\n")
    for algorithm, title in TITLES.items():
        of = [record for record in records if record.algorithm == algorithm]
        lines += ["", f"## {title}", "", *table(of, steps)] if of else []
    readme.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
