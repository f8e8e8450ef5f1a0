"""How sure a rule may be of domains that its models never saw: as it is, by a temperature, by agreement.

    python benchmarks/sureness.py results/left-out-pacs/streams.npz
    python benchmarks/sureness.py FILE --keep --models DIR --backbone resnet50_v1 --weights FILE --device cuda

The first line prints tables from streams on file. The second one makes such a file: left-out models of a
benchmark (`vicinal reproduce SPEC --teach` leaves them in DIR/models/left_out) are shown streams of the
domains that they never saw, longer ones than rules are chosen on, and what is predicted by votes of nearest
neighbors is kept with what the same models say when they are not updated. Whatever is fitted is fitted on
the other domains of a target's sources, as rules are: 500 images in natural order and as many with drawn
classes. `--votes` says how neighbors vote, each way with a table of its own: once, in rounds, or in rounds
with another share of a label by votes, as rounds:0.5.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vicinal.adapters.passes import as_logits
from vicinal.adapters.vnl import Vnl
from vicinal.adapters.vnl_settings import VOTES, VnlSettings
from vicinal.benchmarks.place import TAUGHT, Place
from vicinal.benchmarks.plan import TrainRun, plan
from vicinal.benchmarks.prepare import load_for, prepare_training
from vicinal.benchmarks.spec import load_spec
from vicinal.checkpoint import load_taught
from vicinal.evaluation.metrics import accuracy, ece, nll
from vicinal.functional.calibration import fitted_temperature
from vicinal.training.left_out import LeftOutStream, play_all
from vicinal.training.predictors import vote_lesson
from vicinal.training.progress import Silent, StopRequest
from vicinal.training.sureness import Told, agreeing
from vicinal.training.train import Run, all_left_out_streams

SHORT = 500  # images of a stream on which rules are chosen
BATCH = 20
LESSONS = ("natural", "Dirichlet 1")  # what rules are chosen on
NOW = VnlSettings()


@dataclass(frozen=True)
class Kept:
    """A left-out stream on file."""

    training: str
    update: str
    target: str  # which plays no part in it: its sources do
    domain: str
    kind: str
    told: Told
    own: Tensor  # classes by the model's own output (M,)

    @property
    def y(self) -> Tensor:
        """The true classes (M,)."""
        return self.told.y.flatten()

    @property
    def lesson(self) -> tuple[Tensor, Tensor]:
        """Predictions and true classes of as many images as rules are chosen on."""
        steps = SHORT // BATCH
        return self.told.p[:steps].flatten(0, 1), self.told.y[:steps].flatten()


def read(path: Path) -> list[Kept]:
    """Return all streams on file."""
    file = np.load(path)
    found = []
    for name in sorted(name for name in file.files if name.endswith("/y")):
        key = name.removesuffix("y")
        training, update, target, domain, kind, _ = key.split("/")
        p = torch.from_numpy(file[f"{key}p"]).float()
        says, own, y = (torch.from_numpy(file[f"{key}{part}"]).long() for part in ("says", "own", "y"))
        told = Told(domain, p.view(-1, BATCH, p.shape[-1]), says.view(-1, BATCH), y.view(-1, BATCH))
        found.append(Kept(training, update, target, domain, kind, told, own))
    return found


def scores(streams: Sequence[Kept]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield kind (or domain, in natural order) and figures in percent of every stream; NLLs as they are."""
    for one in streams:
        others = [
            other.lesson
            for other in streams
            if other.target == one.target and other.domain != one.domain and other.kind in LESSONS
        ]
        T = fitted_temperature([p for p, _ in others], [y for _, y in others])
        p, y = one.told.p.flatten(0, 1), one.y
        ways = {
            "as it is": p,
            "temperature": (as_logits(p) / T).softmax(-1),
            "agreement": agreeing(one.told, NOW).flatten(0, 1),
        }
        found = {
            "no update": 100 * float((one.told.says.flatten() == y).float().mean()),
            "own output": 100 * float((one.own == y).float().mean()),
            "votes": 100 * accuracy(p, y),
            "differs": 100 * float((one.told.says.flatten() != p.argmax(-1)).float().mean()),
        }
        found |= {f"ECE {name}": 100 * ece(q, y) for name, q in ways.items()}
        found |= {f"NLL {name}": nll(q, y) for name, q in ways.items()}
        yield one.kind, found
        if one.kind == "natural":
            yield one.domain, found


def tables(streams: Sequence[Kept]) -> str:
    """Return a table for every training and update: means over streams, and the worst gain of votes."""
    lines: list[str] = []
    groups = sorted({(one.training, one.update) for one in streams})
    for training, update in groups:
        rows: dict[str, list[dict[str, float]]] = defaultdict(list)
        for name, found in scores([s for s in streams if (s.training, s.update) == (training, update)]):
            rows[name].append(found)
        columns = list(next(iter(rows.values()))[0])
        lines += ["", f'## {training}, "{update}"', "", f"| streams | {' | '.join(columns)} | least gain |"]
        lines.append("|---|" + "---:|" * (len(columns) + 1))
        for name, all_found in sorted(rows.items()):
            cells = [
                f"{mean(f[column] for f in all_found):.{3 if column.startswith('NLL') else 1}f}"
                for column in columns
            ]
            least = min(found["votes"] - found["no update"] for found in all_found)
            lines.append(f"| {name} ({len(all_found)}) | {' | '.join(cells)} | {least:+.1f} |")
    return "\n".join(lines)


def keep(args: argparse.Namespace) -> None:
    """Play the left-out streams of all source models of a benchmark and write what was said."""
    place = Place(args.models, args.data_dir)
    whole = plan(load_spec(args.spec), seeds=1, backbone=args.backbone, weights=args.weights)
    kept: dict[str, Any] = {}
    for run in [run for run in whole.trainings if args.only in (None, run.algorithm)]:
        streams = left_out(run, place, args)
        rule = load_taught(place.model(run.key) / TAUGHT, run.key).choice["methods"]["vnl"]["stream"]
        still = play_all(partial(Vnl, settings=VnlSettings(update="none", predict="own")), streams)
        for update in args.updates:
            told = {"lr": rule["lr"], "from_rest": rule["from_rest"], "doubt": rule["doubt"]}
            settings = VnlSettings(update=update, predict="own", **told)
            plays = play_all(partial(Vnl, settings=settings), streams)
            for way, (stream, played, frozen) in product(args.votes, zip(streams, plays, still, strict=True)):
                kind = stream.name.removeprefix(stream.domain).strip() or "natural"
                rule_name = update if way == "once" else f"{update}, {way}"
                target = "+".join(run.request.targets)
                key = f"{run.algorithm}/{rule_name}/{target}/{stream.domain}/{kind}"
                kept[f"{key}/p"] = coarse(vote_lesson(played.lesson, voting(way), frozen.lesson))
                classes = {"says": frozen.lesson.logits.argmax(-1), "own": played.lesson.logits.argmax(-1)}
                for part, value in {**classes, "y": played.lesson.y}.items():
                    kept[f"{key}/{part}"] = value.flatten().byte().cpu().numpy()
        args.file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(args.file, **kept)  # what is there so far, should the rest not come


def voting(way: str) -> VnlSettings:
    """Return how neighbors vote, by its name and, behind a colon, the share of a label that is by votes."""
    name, _, share = way.partition(":")
    if name not in VOTES:
        raise SystemExit(f"--votes: '{name}' is none of {', '.join(VOTES)}")
    return replace(NOW, **VOTES[name], **({"voted": float(share)} if share else {}))


def coarse(p: Tensor) -> np.ndarray[Any, Any]:
    """Return probabilities in half precision to within half a percent of each: less to keep."""
    return (p.half().cpu().numpy().view(np.uint16) & 0xFFF8).view(np.float16)


def left_out(run: TrainRun, place: Place, args: argparse.Namespace) -> list[LeftOutStream]:
    """Return streams of a source model's left-out domains, those with drawn classes short."""
    request = replace(run.request, data_dir=place.data_dir)
    made = prepare_training(request, data=load_for(request))
    assert made.out_of_fold is not None
    config = replace(made.out_of_fold, stream_images=args.images, marginals=(1.0, 0.5), batch_size=BATCH)
    at = Run(place.model(run.key), Silent(), StopRequest(), torch.device(args.device), True, place.left_out)
    every = all_left_out_streams(made.spec, made.roles.sources, made.config, config, at, made.provenance)
    return [one if one.name == one.domain else cut(one) for one in every]


def cut(one: LeftOutStream) -> LeftOutStream:
    order = one.stream.order[:SHORT]
    return replace(one, stream=replace(one.stream, order=order), labels=one.labels[: len(order)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="streams on file, .npz")
    parser.add_argument("--keep", action="store_true", help="make the file")
    parser.add_argument("--spec", default="benchmarks/pacs.toml")
    parser.add_argument("--models", type=Path, help="the --out of `vicinal reproduce SPEC --teach`")
    parser.add_argument("--updates", nargs="+", default=["marginal", "neighbors"])
    parser.add_argument("--votes", nargs="+", default=["once"], help="once, rounds, or as rounds:0.5")
    parser.add_argument("--only", default=None, help="a source training, as meta")
    parser.add_argument("--images", type=int, default=1200, help="of a stream in natural order, at most")
    parser.add_argument("--backbone", default=None)
    parser.add_argument("--weights", default=None)
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.keep:
        keep(args)
    print(tables(read(args.file)))


if __name__ == "__main__":
    main()
