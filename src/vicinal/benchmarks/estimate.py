"""What a plan will cost, before anything is loaded: time, memory and disk from sizes and counts. Rough.

The time of a pass is its arithmetic at an assumed speed, plus what starting each layer takes; how many passes
a training or a method makes is known. Nothing is measured, so the order of magnitude is all it tells.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vicinal.adapters.methods import METHODS
from vicinal.benchmarks.jobs import ChooseJob, MeasureJob, TeachJob, TrainJob, WeightsJob
from vicinal.benchmarks.place import MODEL, Place
from vicinal.benchmarks.plan import MeasureRun, Plan, TrainRun, key_of, scales_of
from vicinal.benchmarks.prepare import Settled, settle
from vicinal.benchmarks.schedule import Job, make_tasks
from vicinal.data.catalog import DATASETS
from vicinal.data.load import with_options
from vicinal.models.backbones import Preprocessing, find_backbone
from vicinal.training.left_out import folds

SPEED = {
    "cpu": 2e10,
    "cuda": 1e13,
}  # operations a second: of one core, and of a large GPU in single precision
START = {"cpu": 4e-5, "cuda": 3e-5}  # seconds to start one layer
# Passes over the images of an iteration, a backward one counted as two.
PASSES = {"erm": 3.0, "neighbor": 4.0, "meta": 7.0, "ttt": 6.0, "ttt_pp": 9.0, "single_sample": 6.0}
OWN_IMAGES = 2000  # of a domain of own data, which nobody has counted yet
COPIES = 6  # of the weights in training: they, their gradient, two moments, the best so far, the meta step's
RUNTIME = 6e8  # bytes of a process before it does anything
COUNTED: dict[type, str] = {TrainJob: "trainings", ChooseJob: "step_sizes", MeasureJob: "measurements"}


@dataclass(frozen=True)
class Net:
    """The size of a backbone: parameters, and for one image operations and bytes of activations."""

    parameters: int
    operations: float
    activations: float
    layers: int


@dataclass(frozen=True)
class Estimate:
    """What is left to do, and what it takes."""

    trainings: int
    left_out: int  # models trained without some source domains
    step_sizes: int
    measurements: int
    seconds: float  # of all work, one after the other
    longest: float  # seconds of the longest job: more workers do not help below it
    memory: float  # bytes of the largest process
    disk: float  # bytes of all models

    def wall(self, workers: int) -> float:
        """Return seconds with so many workers."""
        return max(self.seconds / max(1, workers), self.longest)


@cache
def net_of(backbone: str, preprocessing: Preprocessing) -> Net:
    """Return the size of a backbone; it is built without weights and run without numbers."""
    with torch.device("meta"):
        features = find_backbone(backbone).features(preprocessing, False).eval()
        x = torch.zeros(1, preprocessing.channels, preprocessing.size, preprocessing.size)
    sizes: list[int] = []
    leaves = [module for module in features.modules() if not any(module.children())]
    for leaf in leaves:
        leaf.register_forward_hook(lambda module, given, out: sizes.append(_numel(out)))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        features(x)
    return Net(_parameters(features), float(counter.get_total_flops()), 4.0 * sum(sizes), len(leaves))


def _numel(out: object) -> int:
    return out.numel() if isinstance(out, torch.Tensor) else 0


def _parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def estimate(
    plan: Plan,
    place: Place,
    device: str,
    done: frozenset[tuple[str, str]] = frozenset(),
    *,
    teach: bool = False,
) -> Estimate:
    """Return what is left of a plan to do, with `teach` to choose, and what it takes on a kind of device."""
    times: list[float] = []
    seen: set[Hashable] = set()  # left-out models, which trainings share
    counts = dict.fromkeys(COUNTED.values(), 0)
    for task in make_tasks(plan, place, done, teach=teach):
        job = task.job
        if isinstance(job, WeightsJob):
            continue
        cost = Cost(job.training if isinstance(job, MeasureJob) else job.run, device)
        new = _left_out(job, cost) - seen
        seen |= new
        times.append(len(new) * cost.left_out() + _alone(job, cost))
        if not isinstance(job, TeachJob):
            counts[COUNTED[type(job)]] += 1
    costs = [Cost(run, device) for run in plan.trainings]
    own = [] if teach else [cost.size for cost in costs]
    return Estimate(
        **counts,
        left_out=len(seen),
        seconds=sum(times),
        longest=max(times, default=0.0),
        memory=max((cost.memory for cost in costs), default=0.0),
        disk=sum(own) + sum({one: cost.size for cost in costs for one in cost.left_out_sets}.values()),
    )


def _left_out(job: Job, cost: "Cost") -> set[Hashable]:
    """Return the left-out models that a job may have to train.

    Choosing finds them where the rule was chosen; where only that was brought along there are none at all.
    """
    if isinstance(job, TeachJob):
        return set() if job.in_model else set(cost.left_out_sets)
    if isinstance(job, ChooseJob) and not any(job.place.left_out.glob(f"*/{MODEL}")):
        return set(cost.left_out_sets)
    return set()


def _alone(job: Job, cost: "Cost") -> float:
    """Return the seconds of a job without those of left-out models."""
    if isinstance(job, MeasureJob):
        return cost.measuring(job.run)
    if isinstance(job, ChooseJob):
        return cost.choosing(job.method)
    if isinstance(job, TeachJob):
        return 0.0 if job.in_model else cost.teaching()
    return cost.training()


@dataclass(frozen=True, eq=False)
class Cost:
    """The cost of one source model and of what is done with it."""

    run: TrainRun
    device: str

    @cached_property
    def settled(self) -> Settled:
        """The training's settings."""
        return settle(self.run.request)

    @cached_property
    def net(self) -> Net:
        """The size of its net."""
        return net_of(self.settled.backbone, self.settled.preprocessing)

    @cached_property
    def sources(self) -> int:
        """How many source domains there are, as the catalog has it."""
        request = self.run.request
        if request.data not in DATASETS:
            return 3
        return len(request.sources) or len(DATASETS[request.data].domains) - len(request.targets)

    @property
    def left_out_models(self) -> int:
        """How many models are trained without some of the sources."""
        left_out = self.settled.out_of_fold
        return 0 if left_out is None else len(folds(max(2, self.sources), left_out.leave_out))

    @property
    def streamed(self) -> int:
        """Images of all left-out streams."""
        left_out = self.settled.out_of_fold
        if left_out is None:
            return 0
        size = left_out.leave_out or (2 if self.sources >= 4 else 1)
        streams = self.left_out_models * size * (1 + len(left_out.marginals) + len(left_out.hardenings))
        return streams * (left_out.stream_images or OWN_IMAGES)

    @property
    def left_out_sets(self) -> list[Hashable]:
        """What its left-out models are known by: equal ones are one model."""
        left_out, request = self.settled.out_of_fold, self.run.request
        if left_out is None:
            return []
        known = DATASETS[request.data].domains if request.data in DATASETS else ()
        sources = request.sources or tuple(name for name in known if name not in request.targets)
        if len(sources) < 2:  # of own data only the number is guessed
            return [(self.run.key, number) for number in range(self.left_out_models)]
        about = self.run.about
        same = key_of(
            {name: about[name] for name in about if name not in ("targets", "sources", "out_of_fold")}
        )
        return [
            (same, tuple(name for position, name in enumerate(sources) if position not in without))
            for without in folds(len(sources), left_out.leave_out)
        ]

    def training(self, iterations: int | None = None) -> float:
        """Seconds of training the model, or one like it for so many iterations."""
        config = self.settled.config
        count = iterations or config.iterations
        steps = self._seconds(PASSES.get(config.algorithm, 6.0), 2 * config.batch_size, count)
        return steps + self._over(self._validated() * count / config.validate_every, 256, 1.0)

    def left_out(self) -> float:
        """Seconds of training a left-out model."""
        left_out = self.settled.out_of_fold
        return self.training(None if left_out is None else left_out.left_out_iterations)

    def teaching(self) -> float:
        """Seconds of choosing the rule on left-out streams."""
        left_out = self.settled.out_of_fold
        if left_out is None:
            return 0.0
        steps = len(left_out.step_sizes) * len(left_out.from_rest)
        rules = 2 + len(set(left_out.updates) - {"none"}) * steps
        return self._over(rules * self.streamed, left_out.batch_size, passes_of("vnl"))

    def choosing(self, method: str) -> float:
        """Seconds of choosing a step size."""
        size = 20 if self.settled.out_of_fold is None else self.settled.out_of_fold.batch_size
        return self._over(len(scales_of(self.run.request, method)) * self.streamed, size, passes_of(method))

    def measuring(self, run: MeasureRun) -> float:
        """Seconds of a method over the streams of its targets."""
        images = sum(self._images(target) for target in run.targets)
        return self._over(images, run.stream.batch_size, passes_of(run.entry.method))

    @property
    def size(self) -> float:
        """Bytes of the model on disk."""
        return 4.0 * self.net.parameters

    @property
    def memory(self) -> float:
        """Bytes of a process that trains the model."""
        config = self.settled.config
        batch = 2 * config.batch_size * self.net.activations * 2  # in training both directions keep theirs
        return RUNTIME + 4.0 * COPIES * self.net.parameters + batch

    def _over(self, images: float, batch: int, passes: float) -> float:
        return self._seconds(passes, batch, images / batch)

    def _seconds(self, passes: float, batch: int, steps: float) -> float:
        arithmetic = batch * self.net.operations / SPEED[self.device]
        return steps * passes * (arithmetic + self.net.layers * START[self.device])

    def _validated(self) -> float:
        """Images that every validation looks at: about a tenth of the sources."""
        return 0.1 * self.sources * self._images("")

    def _images(self, domain: str) -> int:
        """Return how many images a domain has; an unknown one as many as the average."""
        request = self.run.request
        if request.data not in DATASETS:
            return OWN_IMAGES
        entry = DATASETS[request.data]
        average = sum(entry.counts.values()) // len(entry.counts)
        options = with_options(entry, request.data_options)
        limits: Mapping[str, int | None] = {name: getattr(options, name, None) for name in ("test", "images")}
        return min(entry.counts.get(domain, average), *(value for value in limits.values() if value), 10**9)


def passes_of(method: str) -> float:
    """Return how many passes a method makes over each batch, as it states itself; backward counts as two."""
    text = METHODS[method].traits.passes.partition(";")[0]
    found = {kind: re.search(rf"(\d+)(?: images)? {kind}", text) for kind in ("forward", "backward")}
    forward, backward = (int(hit[1]) if hit else 0 for hit in found.values())
    # memo goes from image to image, with views of each.
    return float(max(1, forward + 2 * backward))


def needed_weights(plan: Plan) -> list[str]:
    """Return the pretrained weights that a plan starts from: backbones that are downloaded, and files."""
    kinds = [(run.about["backbone"], settle(run.request).weights) for run in plan.trainings]
    named = [backbone if weights == "timm" else weights for backbone, weights in kinds if weights != "none"]
    return list(dict.fromkeys(named))
