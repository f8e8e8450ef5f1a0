"""What a worker does of a plan: train a source model, choose a step size on left-out domains, measure.

Each job leaves what it made on disk, whole or not at all, and finds out for itself what is there already.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from vicinal.adapters.contract import adapt
from vicinal.benchmarks.compare import Result, compare
from vicinal.benchmarks.plan import FIXED, OUT_OF_FOLD, MeasureRun, TrainRun, key_of, scales_of
from vicinal.benchmarks.prepare import Prepared, load_for, prepare_training, settle
from vicinal.benchmarks.store import Store
from vicinal.benchmarks.workers import Desk
from vicinal.checkpoint import Trained, load, umask
from vicinal.data.domains import Roles
from vicinal.errors import DataError
from vicinal.evaluation.example import Example, add_examples, examples_from
from vicinal.evaluation.online import run_online
from vicinal.evaluation.record import Record, finite_or_none
from vicinal.models.backbones import build_classifier, preprocessing_for
from vicinal.training.choose import try_step_sizes
from vicinal.training.progress import Relay, Silent, StopRequest
from vicinal.training.train import Run, all_left_out_streams, train

MODEL = "model.safetensors"
CHOICE = "choice.json"  # how the rules of test time did on left-out domains
STEP_SIZES = "step_sizes"  # how other methods did there


@dataclass(frozen=True)
class Place:
    """Where a benchmark lives."""

    out: Path
    data_dir: Path | None = None

    def model(self, key: str) -> Path:
        """Return the folder of a source model."""
        return self.out / "models" / key

    @property
    def left_out(self) -> Path:
        """The folder of the left-out models, which source models share."""
        return self.out / "models" / "left_out"


@dataclass(frozen=True)
class WeightsJob:
    """See that pretrained weights are there: one job waits for their download, or finds them missing."""

    backbone: str
    weights: str

    def __call__(self, desk: Desk) -> None:
        """Load them, which downloads them where they come from elsewhere."""
        desk.say(f"weights of {self.backbone}", 0, 1)
        preprocessing = preprocessing_for(self.backbone)
        build_classifier(self.backbone, 2, weights=self.weights, preprocessing=preprocessing)


@dataclass(frozen=True)
class TrainJob:
    """Train a source model."""

    run: TrainRun
    place: Place
    saves_itself = True  # when it is asked to stop

    @property
    def weights(self) -> WeightsJob | None:
        """The pretrained weights that it waits for: not for a file that is there."""
        settled = settle(self.run.request)
        there = settled.weights == "none" or Path(settled.weights).is_file()
        return None if there else WeightsJob(settled.backbone, settled.weights)

    @property
    def done(self) -> bool:
        """Whether the model is there, and nothing of the way to it."""
        folder = self.place.model(self.run.key)
        return (folder / MODEL).exists() and not any(folder.glob("state-*"))

    def __call__(self, desk: Desk) -> None:
        """Go on with what is there of the training; a trained model is left alone."""
        folder = self.place.model(self.run.key)
        with lock(folder):
            trained = load(folder) if (folder / MODEL).exists() else self._train(folder, desk)
            if trained.choice:
                write_json(folder / CHOICE, {"tried": trained.choice["table"]})
            _tidy(folder)

    def _train(self, folder: Path, desk: Desk) -> Trained:
        ready = _prepared(self.run, self.place, desk)
        return train(
            ready.spec,
            ready.roles.sources,
            ready.config,
            ready.out_of_fold,
            folder=folder,
            device=desk.device,
            resume=True,
            progress=Relay(desk.say),
            provenance=ready.provenance,
            stop=desk.stop,
            left_out=self.place.left_out,
        )


@dataclass(frozen=True)
class ChooseJob:
    """Choose a method's step size for one kind of statistics, on the left-out streams of a source model."""

    run: TrainRun
    method: str
    kind: str
    place: Place
    given: Mapping[str, Any] = field(default_factory=dict)  # other options that the method will run with

    @property
    def name(self) -> str:
        """What tells the choice from others of one model."""
        return f"{self.method}-{key_of(self._said)}" if self.given else self.method

    @property
    def _said(self) -> dict[str, str]:
        """The options given, as a file can hold them."""
        return {name: repr(value) for name, value in self.given.items()}

    @property
    def path(self) -> Path:
        """Where the choice is kept, by kind of statistics."""
        return self.place.model(self.run.key) / STEP_SIZES / f"{self.name}.json"

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The options chosen; None where they have not been."""
        return step_sizes_in(self.path).get(self.kind)

    def __call__(self, desk: Desk) -> None:
        """Try every multiple of the method's own step size."""
        desk.say(f"step size of {self.method}", 0, 1)
        ready = _prepared(self.run, self.place, desk)
        assert ready.out_of_fold is not None
        streams = desk.keep("streams", self.run.key, lambda: self._streams(ready, desk))
        scales, near = scales_of(self.run.request), ready.out_of_fold.near
        rows = try_step_sizes(streams, self.method, scales, near, (self.kind,), self.given)
        tried = [{**asdict(row), "given": self._said} for row in rows]
        with lock(self.path):
            write_json(self.path, {**_read(self.path), self.kind: tried})

    def _streams(self, ready: Prepared, desk: Desk) -> Any:
        assert ready.out_of_fold is not None
        folder, device = self.place.model(self.run.key), torch.device(desk.device)
        run = Run(folder, Silent(), StopRequest(), device, resume=True, left_out=self.place.left_out)
        return all_left_out_streams(
            ready.spec, ready.roles.sources, ready.config, ready.out_of_fold, run, ready.provenance
        )


@dataclass(frozen=True)
class MeasureJob:
    """Run a method over the streams of its targets."""

    run: MeasureRun
    training: TrainRun
    chooser: TrainRun  # most often the same
    place: Place

    @property
    def choice(self) -> ChooseJob | None:
        """The choice of a step size that it waits for."""
        kind = self.run.about["settings"]["statistics"]["kind"]
        if not self.run.chooses:
            return None
        given = dict(self.run.entry.options)
        if given.get("statistics") == kind:
            del given["statistics"]  # the kind alone, which the choice is kept by anyway
        return ChooseJob(self.chooser, self.run.entry.method, kind, self.place, given)

    def __call__(self, desk: Desk) -> None:
        """Append a record for every target that has none; a joint stream has one for all."""
        run = self.run
        # Kept, since it reads no line twice.
        out = self.place.out
        store: Store = desk.keep(f"store of {out}", "", lambda: Store(out))
        done = store.done()
        missing = [target for target in run.results if (run.key, target) not in done]
        ready = _prepared(self.training, self.place, desk)
        trained = desk.keep("model", run.model, lambda: load(self.place.model(run.model), desk.device))
        trained = _with_choice(self._with_phi(trained, desk), self.choice)
        roles = _only(ready.roles, run.targets if run.stream.joint else missing)
        dataset = Path(self.training.request.data).name
        results = compare(trained, roles, [run.entry], run.stream, run.seed, dataset=dataset)
        for count, result in enumerate(results, start=1):
            if run.ours and run.seed == 0:  # before the record: once that is there nobody comes back for them
                add_examples(self.place.out, _examples(result, run, trained, roles))
            store.append(labelled(result.record, run, trained))
            desk.say(f"{run.entry.method}", count, len(missing))

    def _with_phi(self, trained: Trained, desk: Desk) -> Trained:
        """Return the model with what the left-out domains of its chooser taught."""
        key = self.run.chooser
        if key is None:
            return trained

        def taught() -> dict[str, Any]:
            chooser = load(self.place.model(key), desk.device)
            names = ("anchor_phi", "predict_phi", "choice")
            return {name: getattr(chooser, name) for name in names} | {
                "options": chooser.config["out_of_fold"]
            }

        # All that were asked for are kept: they are small without their net, and rows come in any order.
        found = dict(desk.keep(f"taught by {key}", "", taught))
        return replace(trained, config={**trained.config, "out_of_fold": found.pop("options")}, **found)


def step_sizes_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the options that a file of choices holds, by kind of statistics."""
    found = _read(path)
    if not all(isinstance(rows, list) for rows in found.values()):
        raise DataError(f"{path}: made by an earlier version; remove it, and it will be made anew")
    return {kind: {"lr": row["lr"]} for kind, rows in found.items() for row in rows if row["chosen"]}


def choices_of(run: TrainRun, place: Place) -> list[dict[str, Any]]:
    """Return what was tried on left-out streams for a source model, a row each, and what was chosen of it."""
    folder = place.model(run.key)
    files = [folder / CHOICE, *sorted((folder / STEP_SIZES).glob("*.json"))]
    return [{"model": run.key, **row} for path in files for rows in _read(path).values() for row in rows]


def _prepared(run: TrainRun, place: Place, desk: Desk) -> Prepared:
    """Return the data of a training; what was loaded last is still there."""
    request = replace(run.request, data_dir=place.data_dir)

    def decoding(done: int, total: int) -> None:
        desk.say("reading images", done, total)

    data = desk.keep("data", images_of(run), lambda: load_for(request, decoding))
    return prepare_training(request, data=data)


def images_of(run: TrainRun) -> str:
    """Return what a training's images are known by.

    Trainings that differ in the algorithm or in their domains alone, and the measurements on their models,
    share them.
    """
    about = {name: run.about[name] for name in ("data", "data_options", "preprocessing")}
    return json.dumps([about, run.seed], sort_keys=True)


def _with_choice(trained: Trained, choice: ChooseJob | None) -> Trained:
    """Return the model with the step size that the left-out streams chose."""
    if choice is None or choice.chosen is None:
        return trained
    methods = {**trained.choice.get("methods", {}), choice.method: {choice.kind: choice.chosen}}
    return replace(trained, choice={**trained.choice, "methods": methods})


def _only(roles: Roles, names: Iterable[str]) -> Roles:
    by_name = {target.name: target for target in roles.targets}
    return replace(roles, targets=tuple(by_name[name] for name in names))


def _examples(result: Result, run: MeasureRun, trained: Trained, roles: Roles) -> list[Example]:
    """Return images that the method fixed and broke, against the same model as it was trained."""
    target = result.record.target
    names = run.targets if run.stream.joint else (target,)
    answers = torch.cat([roles.answers[name] for name in names])
    before = run_online(adapt(trained, "erm", seed=run.seed), result.stream).probabilities
    after = result.outcome.probabilities
    found = examples_from(result.stream, answers, before, after, trained.classes, target)
    return [replace(example, method=run.row, setting=run.setting) for example in found]


def labelled(record: Record, run: MeasureRun, trained: Trained) -> Record:
    """Return a record that says which cell of which benchmark it is, and how its step size came about."""
    benchmark = {
        "spec": run.spec,
        "setting": run.setting,
        "row": run.row,
        "key": run.key,
        "model": run.model,
        "quick": run.quick,
        "about": run.about,
    }
    added = {
        "benchmark": benchmark,
        "selection": _selection(run),
        "training_seconds": trained.provenance["training_seconds"],
    }
    return replace(record, protocol={**record.protocol, **added})


def _selection(run: MeasureRun) -> str:
    """Return in words what was chosen where."""
    if run.entry.method in OUT_OF_FOLD:
        how = "rule and step size on left-out source domains"
    elif run.chooses:
        multiples = ", ".join(f"{scale:g}" for scale in run.about["step_sizes"])
        how = f"step size on left-out source domains, {multiples} times the method's own"
    elif "lr" in run.entry.options:
        how = "step size given"
    else:
        how = "nothing else" if run.entry.method in FIXED else "the method's own step size"
    of = "" if run.chooser is None else ", by the left-out models of seed 0"
    return f"model on source validation images; {how}{of}"


def lock(path: Path) -> FileLock:
    """Return a lock that also goes with a process that is killed; two benchmarks may share a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(f".{path.name}.lock"))


def _tidy(folder: Path) -> None:
    """Remove what only an unfinished training needs: several times the size of the model."""
    for pattern in ("state-*.safetensors", ".*.part"):
        for path in folder.rglob(pattern):
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write JSON, all or nothing; a number that is none, or without end, becomes null."""
    write_text(path, json.dumps(finite_or_none(values), allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """Write a file, all or nothing, whoever else may be writing it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(handle)
    Path(name).chmod(0o666 & ~umask())  # a temporary file is its owner's alone
    Path(name).replace(path)
