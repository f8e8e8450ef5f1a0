"""What a worker does of a plan: choose on left-out domains, train a source model, measure.

Each job leaves what it made on disk, whole or not at all, and finds out for itself what is there already.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vicinal.adapters.methods import adapt
from vicinal.benchmarks.compare import Result, compare
from vicinal.benchmarks.place import (
    CHOICE,
    MODEL,
    STEP_SIZES,
    TAUGHT,
    Place,
    lock,
    read_json,
    step_sizes_in,
    write_json,
)
from vicinal.benchmarks.plan import MeasureRun, TrainRun, key_of, scales_of
from vicinal.benchmarks.prepare import Prepared, load_for, prepare_training, settle
from vicinal.benchmarks.selection import selection
from vicinal.benchmarks.store import Store
from vicinal.benchmarks.workers import Desk
from vicinal.checkpoint import Taught, Trained, load, load_taught, save_taught, taught_of, with_taught
from vicinal.data.domains import Roles
from vicinal.evaluation.example import Example, add_examples, examples_from
from vicinal.evaluation.online import run_online
from vicinal.evaluation.record import Record
from vicinal.models.backbones import build_classifier, preprocessing_for
from vicinal.training.choose import try_step_sizes
from vicinal.training.progress import Relay
from vicinal.training.train import Run, all_left_out_streams, placed, teach, train


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
class TeachJob:
    """Fit phi and choose the rule for a source model on left-out domains: the model itself is not needed."""

    run: TrainRun
    place: Place
    saves_itself = True  # when it is asked to stop

    @property
    def weights(self) -> WeightsJob | None:
        """The pretrained weights that it waits for."""
        return None if self.in_model else weights_of(self.run)

    @property
    def in_model(self) -> bool:
        """Whether a model is there that was taught before this had a file of its own: no other is trained."""
        return (self.place.model(self.run.key) / MODEL).exists()

    @property
    def done(self) -> bool:
        """Whether what was taught is there, here or from elsewhere."""
        folder = self.place.model(self.run.key)
        return (folder / TAUGHT).exists() and (folder / CHOICE).exists()

    def __call__(self, desk: Desk) -> None:
        """Go on with what is there of the left-out models."""
        folder = self.place.model(self.run.key)
        with lock(folder):
            if self.done:  # by somebody else, who held the lock
                return
            taught = self._known(folder) or self._teach(desk)
            folder.mkdir(exist_ok=True)
            _remove(folder, ".*.part")
            write_json(folder / CHOICE, {"tried": taught.choice["table"]})
            save_taught(folder / TAUGHT, taught, self.run.key)  # the last, since with it the job is done

    def _known(self, folder: Path) -> Taught | None:
        """Return what is there of it already, in its file or in the model."""
        if (folder / TAUGHT).exists():
            return load_taught(folder / TAUGHT, self.run.key)
        return taught_of(load(folder)) if self.in_model else None

    def _teach(self, desk: Desk) -> Taught:
        ready = _prepared(self.run, self.place, desk)
        assert ready.out_of_fold is not None
        sources, run = placed(ready.roles.sources, desk.device), _left_out_run(self.run, self.place, desk)
        return teach(ready.spec, sources, ready.config, ready.out_of_fold, run, ready.provenance)


@dataclass(frozen=True)
class TrainJob:
    """Train a source model, and give it what left-out domains taught."""

    run: TrainRun
    place: Place
    saves_itself = True  # when it is asked to stop

    @property
    def weights(self) -> WeightsJob | None:
        """The pretrained weights that it waits for."""
        return weights_of(self.run)

    @property
    def done(self) -> bool:
        """Whether the model is there, and nothing of the way to it."""
        folder = self.place.model(self.run.key)
        return (folder / MODEL).exists() and not any(folder.glob("state-*"))

    def __call__(self, desk: Desk) -> None:
        """Go on with what is there of the training; a trained model is left alone."""
        folder = self.place.model(self.run.key)
        with lock(folder):
            if not (folder / MODEL).exists():
                self._train(folder, desk)
            # What only an unfinished training needs: several times the size of the model.
            _remove(folder, "state-*.safetensors", ".*.part")

    def _train(self, folder: Path, desk: Desk) -> None:
        # Read first: hours of training are not for finding out that the file is damaged.
        wanted = self.run.request.out_of_fold is not None
        taught = load_taught(folder / TAUGHT, self.run.key, desk.device) if wanted else None
        ready = _prepared(self.run, self.place, desk)
        train(
            ready.spec,
            ready.roles.sources,
            ready.config,
            taught,
            folder=folder,
            device=desk.device,
            resume=True,
            progress=Relay(desk.say),
            provenance=ready.provenance,
            stop=desk.stop,
        )


@dataclass(frozen=True)
class ChooseJob:
    """Choose a method's step size for one kind of statistics, on the left-out streams of a source model."""

    run: TrainRun
    method: str
    kind: str
    place: Place
    given: Mapping[str, Any] = field(default_factory=dict)  # other options that the method will run with
    saves_itself = True  # left-out models that are not here are trained

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
        scales, config = scales_of(self.run.request, self.method), ready.out_of_fold
        rows = try_step_sizes(
            streams, self.method, scales, config.near, (self.kind,), self.given, config.calibrate
        )
        tried = [{**asdict(row), "given": self._said} for row in rows]
        with lock(self.path):
            write_json(self.path, {**read_json(self.path), self.kind: tried})

    def _streams(self, ready: Prepared, desk: Desk) -> Any:
        assert ready.out_of_fold is not None
        run = _left_out_run(self.run, self.place, desk)
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
        given.pop("output_temperature", None)  # no choice depends on it
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
        trained = _with_choice(self._with_taught(trained, desk), self.choice)
        roles = _only(ready.roles, run.targets if run.stream.joint else missing)
        dataset = Path(self.training.request.data).name
        results = compare(trained, roles, [run.entry], run.stream, run.seed, dataset=dataset)
        for count, result in enumerate(results, start=1):
            if run.ours and run.seed == 0:  # before the record: once that is there nobody comes back for them
                add_examples(self.place.out, _examples(result, run, trained, roles))
            store.append(labelled(result.record, run, trained))
            desk.say(f"{run.entry.method}", count, len(missing))

    def _with_taught(self, trained: Trained, desk: Desk) -> Trained:
        """Return the model with what the left-out domains of its chooser taught."""
        key = self.run.chooser
        if key is None:
            return trained
        path = self.place.model(key) / TAUGHT
        # All that were asked for are kept: they are small, and rows come in any order.
        taught = desk.keep(f"taught by {key}", "", lambda: load_taught(path, key, desk.device))
        return with_taught(trained, taught)


def weights_of(run: TrainRun) -> WeightsJob | None:
    """Return the pretrained weights that a training waits for: not for a file that is there."""
    settled = settle(run.request)
    there = settled.weights == "none" or Path(settled.weights).is_file()
    return None if there else WeightsJob(settled.backbone, settled.weights)


def _left_out_run(run: TrainRun, place: Place, desk: Desk) -> Run:
    """Return where left-out models are trained that are not there yet, and who listens."""
    folder, device = place.model(run.key), torch.device(desk.device)
    return Run(folder, Relay(desk.say), desk.stop, device, resume=True, left_out=place.left_out)


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
    # With what it was chosen under: who asks for just that asks for no other rule.
    chosen = {**choice.given, **choice.chosen}
    methods = {**trained.choice.get("methods", {}), choice.method: {choice.kind: chosen}}
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
        "selection": selection(run),
        "training_seconds": trained.provenance["training_seconds"],
    }
    return replace(record, protocol={**record.protocol, **added})


def _remove(folder: Path, *patterns: str) -> None:
    """Remove files of a folder; not of those in it, where others may be at work."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
