"""One phi for models that it was not fitted on: fitted over runs, measured on runs that were kept from it.

    vicinal train digits --algorithm erm --out runs/digits
    vicinal train rotated_mnist --algorithm erm --out runs/mnist
    vicinal train rotated_fashion --algorithm erm --out runs/fashion
    python benchmarks/shared_phi.py runs/digits runs/mnist runs/fashion

Takes runs of `vicinal train` with their left-out models. Lessons are what these models saw of the domains
that they go without, in natural order and with drawn class marginals, still and updated as `vnl` does by
default. For every run, on the streams of its targets: the model's own output, labels by a phi of its own
left-out models, by one of all other runs, and by one of the runs on other data sets. `--test` names runs that
are only measured.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.vnl import Vnl
from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.benchmarks.prepare import roles_for
from vicinal.checkpoint import Trained, load
from vicinal.data.domains import LabelledImages, Roles
from vicinal.evaluation.metrics import accuracy, ece, nll
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.fit_phi import fit_phi
from vicinal.training.left_out import Fold, LeftOutStream, Lesson, left_out_streams, play_all, streams_of
from vicinal.training.predictors import label_lesson
from vicinal.versions import versions

CONFIG = OutOfFoldConfig(stream_images=400, marginals=(1.0, 0.5))
UPDATES = {"still": VnlSettings(update="none", predict="own"), "updated": VnlSettings(predict="own")}
SEED = 0


@dataclass(frozen=True, eq=False)
class Target:
    """A recorded stream of a run's target: what phi reads, and labels to score by."""

    name: str
    update: str
    lesson: Lesson


@dataclass(frozen=True, eq=False)
class Pupil:
    """A run: lessons of its left-out models, and streams of its targets."""

    name: str
    data: str
    backbone: str
    lessons: list[Lesson]
    targets: list[Target]


def pupil(run: Path, data_dir: Path | None, fitted: bool) -> Pupil:
    """Return what a run has to teach, unless it is only measured, and what it is measured on."""
    trained = load(run)
    roles = roles_for(trained, data_dir=data_dir)
    lessons = []
    if fitted:
        streams = left_out_streams(folds_of(run, roles), CONFIG, SEED)
        for settings in UPDATES.values():
            lessons += [played.lesson for played in play_all(partial(Vnl, settings=settings), streams)]
    shown, targets = target_streams(trained, roles), []
    for update, settings in UPDATES.items():
        plays = play_all(partial(Vnl, settings=settings), shown)
        targets += [Target(at.name, update, played.lesson) for at, played in zip(shown, plays, strict=True)]
    return Pupil(run.name, str(trained.provenance["dataset"]), trained.backbone, lessons, targets)


def folds_of(run: Path, roles: Roles) -> list[Fold]:
    """Return the left-out models of a run, each with the domains that it goes without."""
    made = []
    for folder in sorted((run / "left_out").iterdir()):
        model = load(folder)
        away = tuple(source for source in roles.sources if source.name not in model.provenance["sources"])
        made.append(Fold(model, away))
    return made


def target_streams(trained: Trained, roles: Roles) -> list[LeftOutStream]:
    """Return the streams of a run's targets; labels say what is shown of a drawn marginal, and score."""
    made = []
    for target in roles.targets:
        whole = LabelledImages(target.images, roles.answers[target.name])
        for stream in streams_of(trained, target.name, whole, CONFIG, SEED):
            kind = stream.name.removeprefix(target.name).strip() or "natural"
            made.append(replace(stream, name=f"{target.name}, {kind}"))
    return made


def fitted_on(pupils: Sequence[Pupil]) -> StreamInferenceNet | None:
    lessons = [lesson for one in pupils for lesson in one.lessons]
    return fit_phi(lessons, CONFIG, SEED) if lessons else None


def measure(one: Pupil, others: Sequence[Pupil]) -> list[dict[str, Any]]:
    """Return a row for every stream of a run's targets and everybody who can label it."""
    phis = {
        "own left-out models": fitted_on([one]),
        "other runs": fitted_on(others),
        "other data sets": fitted_on([other for other in others if other.data != one.data]),
    }
    rows = []
    for target in one.targets:
        lesson = target.lesson
        found = {"own output": lesson.logits.flatten(0, 1).softmax(-1)}
        found |= {name: label_lesson(phi, lesson) for name, phi in phis.items() if phi is not None}
        about = {"run": one.name, "data": one.data, "backbone": one.backbone}
        for name, p in found.items():
            told = {"target": target.name, "update": target.update, "labels": name}
            rows.append({**about, **told, **scores(p, lesson.y.flatten())})
    return rows


def scores(p: Tensor, y: Tensor) -> dict[str, float]:
    return {"accuracy": accuracy(p, y), "ece": ece(p, y), "nll": nll(p, y)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return means over targets: accuracy in %, and ECE in brackets."""
    names = list(dict.fromkeys(row["labels"] for row in rows))
    lines = [f"| run | update | stream | {' | '.join(names)} |", "|---|---|---|" + "---:|" * len(names)]
    groups: dict[tuple[str, str, str], dict[str, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        groups[row["run"], row["update"], row["target"].split(", ")[1]][row["labels"]].append(row)
    for key, by_name in groups.items():
        cells = [
            f"{100 * mean(row['accuracy'] for row in by_name[name]):.1f} "
            f"({100 * mean(row['ece'] for row in by_name[name]):.1f})"
            if name in by_name
            else ""
            for name in names
        ]
        lines.append(f"| {' | '.join((*key, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of `vicinal train`")
    parser.add_argument("--test", type=Path, nargs="*", default=[], help="runs that are only measured")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("results/shared-phi"))
    args = parser.parse_args()
    for run in args.runs:
        if not (run / "left_out").is_dir():
            parser.error(f"{run} has no left-out models to learn from: a run to be measured goes to --test")
    pupils = []
    for run in [*args.runs, *args.test]:
        pupils.append(pupil(run, args.data_dir, run in args.runs))
        print(
            f"{run}: {len(pupils[-1].lessons)} lessons, {len(pupils[-1].targets)} streams of targets",
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for one in pupils:
        rows += measure(one, [other for other in pupils if other is not one])
        lines = [json.dumps({**row, "versions": versions()}) for row in rows]
        (args.out / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
