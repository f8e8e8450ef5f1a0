"""Training from start to end: the source model, the left-out models, phi, and the choice of the rule."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from vicinal.adapters.methods import METHODS
from vicinal.checkpoint import Taught, Trained, load, save, with_taught
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.pixels import resident
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet
from vicinal.training import algorithms
from vicinal.training.choose import choose_rule
from vicinal.training.config import OutOfFoldConfig, TrainConfig, as_dict, identity
from vicinal.training.fisher import validation_fisher
from vicinal.training.learner import ALGORITHMS, make_learner
from vicinal.training.left_out import Fold, LeftOutStream, folds, left_out_streams
from vicinal.training.loop import run_stage
from vicinal.training.progress import Progress, Silent, StopRequest, stop_on_interrupt

__all__ = ["ModelSpec", "algorithms", "train", "train_model"]

LONGEST_NAME = 48  # letters of all domains' names in the name of a folder


@dataclass(frozen=True)
class ModelSpec:
    """What to build: a backbone by name, its weights, its preprocessing, and the classes."""

    backbone: str
    weights: str
    preprocessing: Preprocessing
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """Where a training lives and who listens."""

    folder: Path | None
    progress: Progress
    stop: StopRequest
    device: torch.device
    resume: bool
    left_out: Path | None = (
        None  # where left-out models are kept that other trainings share; None: in `folder`
    )


def train(
    spec: ModelSpec,
    sources: Sequence[SourceDomain],
    config: TrainConfig,
    out_of_fold: OutOfFoldConfig | Taught | None = None,
    *,
    folder: Path | None = None,
    device: str | torch.device = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
    provenance: dict[str, Any] | None = None,
    stop: StopRequest | None = None,
    left_out: Path | None = None,
) -> Trained:
    """Return a model trained on the sources, with what left-out domains taught; saved if given a folder.

    Only source domains come in: there is nothing of a target here to look at. Ctrl-C stops it between two
    steps, unless somebody else decides that and passes `stop`. Left-out models go to `left_out` where that is
    given, and are taken from there: a model of two domains serves every target that is neither. None are
    trained where `out_of_fold` is what they have taught already.
    """
    if isinstance(out_of_fold, OutOfFoldConfig):
        refuse_impossible(sources, out_of_fold)
    sources = placed(sources, device)
    with nullcontext(stop) if stop is not None else stop_on_interrupt() as asked:
        run = Run(folder, progress or Silent(), asked, torch.device(device), resume, left_out)
        trained = train_model(spec, sources, config, run, provenance or {})
        if isinstance(out_of_fold, OutOfFoldConfig):
            out_of_fold = teach(spec, sources, config, out_of_fold, run, provenance or {})
    if out_of_fold is not None:
        trained = with_taught(trained, out_of_fold)
    if folder is not None:
        save(folder / "model.safetensors", trained)
    return trained


def untrained(spec: ModelSpec, config: TrainConfig, device: torch.device) -> tuple[Classifier, InferenceNet]:
    """Return model and phi as training starts with them, on the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_classifier(
            spec.backbone, len(spec.classes), weights=spec.weights, preprocessing=spec.preprocessing
        ).to(device)
        if device.type == "cuda":  # how its tensor cores take images: half as fast again on small ones
            model = model.to(memory_format=torch.channels_last)
            model.precision = torch.bfloat16 if config.precision == "bfloat16" else None
        model.compiled = config.compile
        phi = InferenceNet(model.head.in_features, layers=config.phi_layers).to(device)
    return model, phi


def resumable(spec: ModelSpec, provenance: dict[str, Any]) -> dict[str, Any]:
    """Return what else a run must have been started with that goes on, as plain values.

    Not where the data lie: a folder may be moved.
    """
    fed = asdict(spec.preprocessing)
    shape = {"backbone": spec.backbone, "weights": spec.weights, "classes": spec.classes}
    given = {name: provenance.get(name) for name in ("data_seed", "data_options")}
    plain: dict[str, Any] = json.loads(json.dumps({**shape, **fed, **given}, default=str))
    return plain


def train_model(
    spec: ModelSpec,
    sources: Sequence[SourceDomain],
    config: TrainConfig,
    run: Run,
    provenance: dict[str, Any],
) -> Trained:
    """Return the source model after every stage of its algorithm."""
    stages = ALGORITHMS[config.algorithm]
    model, phi = untrained(spec, config, run.device)
    facts = {"sources": [source.name for source in sources], "seed": config.seed, **provenance}
    extras: dict[str, Tensor] = {}
    seconds = 0.0
    for stage in stages:
        learner = make_learner(model, phi, stage, config, derived_seed(config.seed, stage.name))
        same = resumable(spec, provenance)
        best = run_stage(
            stage, learner, sources, run.folder, run.progress, run.stop, resume=run.resume, facts=same
        )
        seconds += learner.seconds
        if not stage.fixed_model:
            facts |= {"validation_accuracy": best.accuracy, "selected_iteration": best.iteration}
        if stage.finish is not None:
            model.eval()
            extras |= stage.finish(learner, sources)
    model.precision, model.compiled = None, False  # who predicts with it decides for himself
    used = phi if any(stage.uses_phi for stage in stages) else None
    extras |= validation_fisher(model, sources, 2 * config.batch_size, derived_seed(config.seed, "fisher"))
    return Trained(
        model=model.eval(),
        backbone=spec.backbone,
        classes=spec.classes,
        preprocessing=spec.preprocessing,
        algorithm=config.algorithm,
        phi=used,
        config={"train": as_dict(config)},
        provenance={**facts, "training_seconds": seconds},
        extras=extras,
    )


def refuse_impossible(sources: Sequence[SourceDomain], out_of_fold: OutOfFoldConfig) -> None:
    """Raise if nothing can be chosen so: before hours of training, not after."""
    folds(len(sources), out_of_fold.leave_out)
    for method in out_of_fold.baselines:
        METHODS[method]


def teach(
    spec: ModelSpec,
    sources: Sequence[SourceDomain],
    config: TrainConfig,
    out_of_fold: OutOfFoldConfig,
    run: Run,
    provenance: dict[str, Any],
) -> Taught:
    """Return phis fitted and a rule chosen on domains that left-out models never saw; no other is needed."""
    refuse_impossible(sources, out_of_fold)
    streams = all_left_out_streams(spec, sources, config, out_of_fold, run, provenance)
    chosen = choose_rule(streams, out_of_fold, derived_seed(config.seed, "phi"), run.progress, run.stop)
    choice = {
        "methods": chosen.methods,
        "table": [asdict(row) for row in chosen.table],
        "streams": [f"{stream.name}" for stream in streams],
    }
    return Taught(chosen.anchor_phi, chosen.predict_phi, choice, as_dict(out_of_fold))


def all_left_out_streams(
    spec: ModelSpec,
    sources: Sequence[SourceDomain],
    config: TrainConfig,
    out_of_fold: OutOfFoldConfig,
    run: Run,
    provenance: dict[str, Any],
) -> list[LeftOutStream]:
    """Return the streams of every left-out domain, each with the model that never saw it."""
    config = replace(config, iterations=out_of_fold.left_out_iterations or config.iterations)
    waiting = folds(len(sources), out_of_fold.leave_out)
    made: dict[tuple[int, ...], Fold] = {}
    patient = False
    while waiting:  # a model that somebody else is training is looked for again when the others are there
        busy = []
        for without in waiting:
            try:
                made[without] = left_out_fold(spec, sources, without, config, run, provenance, wait=patient)
            except Timeout:
                busy.append(without)
        patient = busy == waiting
        waiting = busy
    order = folds(len(sources), out_of_fold.leave_out)
    every = [made[without] for without in order]
    return left_out_streams(every, out_of_fold, derived_seed(config.seed, "streams"))


def left_out_fold(
    spec: ModelSpec,
    sources: Sequence[SourceDomain],
    without: Sequence[int],
    config: TrainConfig,
    run: Run,
    provenance: dict[str, Any] | None = None,
    *,
    wait: bool = True,
) -> Fold:
    """Return a model trained without some domains; one that is already on disk is taken when resuming.

    Its seed comes from the domains that it is trained on: whoever leaves the same ones needs the same model.
    Where another process is training it this waits, or raises Timeout.
    """
    left_out = tuple(sources[position] for position in without)
    rest = [source for position, source in enumerate(sources) if position not in without]
    name = "without-" + "-".join(source.name for source in left_out)
    config = replace(config, seed=derived_seed(config.seed, "on-" + "-".join(source.name for source in rest)))
    where = run.left_out or (run.folder and run.folder / "left_out")
    if where is None:
        return Fold(_left_out_model(spec, rest, config, run, name), left_out)
    # In a run's own folder it goes without saying whose data they are, and they may be moved.
    names = ("data_seed", "data_options", *(("dataset",) if run.left_out else ()))
    facts = {name: (provenance or {}).get(name) for name in names}
    folder = where / _left_out_name(spec, rest, config, facts)
    resume = run.resume or run.left_out is not None
    where.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=-1 if wait else 0):
        model = _left_out_model(spec, rest, config, replace(run, folder=folder, resume=resume), name)
        for pattern in ("state-*", ".*.part"):  # a finished model needs nothing of the way to it
            for path in folder.glob(pattern):
                path.unlink()
    return Fold(model, left_out)


def _left_out_model(
    spec: ModelSpec, rest: Sequence[SourceDomain], config: TrainConfig, run: Run, name: str
) -> Trained:
    folder, images = run.folder, {source.name: len(source.train) + len(source.val) for source in rest}
    if run.resume and folder is not None and (folder / "model.safetensors").exists():
        found = load(folder, run.device)
        if found.provenance.get("images", images) == images:
            return found
        run.progress.note(f"{folder}: trained on other images, so it is trained again")
    run.progress.note(f"left-out model {name}")
    trained = train_model(spec, rest, config, run, {"images": images})
    if folder is not None:
        save(folder / "model.safetensors", trained)
    return trained


def _left_out_name(
    spec: ModelSpec, rest: Sequence[SourceDomain], config: TrainConfig, facts: dict[str, Any]
) -> str:
    """Return a name that says what a left-out model was trained on, and tells apart all that differ."""
    about = {
        "spec": asdict(spec),
        "train": identity(config),
        "data": facts,
        "on": [source.name for source in rest],
    }
    digest = sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]
    names = "-".join(source.name for source in rest).replace("/", "_").replace("\\", "_")  # of one folder
    # A file's name may have 255 bytes, and a letter up to four of them.
    return f"on-{names if len(names) <= LONGEST_NAME else names[:LONGEST_NAME] + '...'}-{digest}"


def derived_seed(seed: int, name: str) -> int:
    """Return a seed of its own for every part of a run."""
    return int.from_bytes(sha256(f"{seed}/{name}".encode()).digest()[:4], "big")


def placed(sources: Sequence[SourceDomain], device: str | torch.device) -> list[SourceDomain]:
    """Return the sources with their images on the device if they all fit there."""
    parts = [part for source in sources for part in (source.train, source.val)]
    images = iter(resident([part.images for part in parts], device))
    return [
        SourceDomain(
            source.name, *(LabelledImages(next(images), part.labels) for part in (source.train, source.val))
        )
        for source in sources
    ]
