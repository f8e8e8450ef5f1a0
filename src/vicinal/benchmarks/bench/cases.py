"""What is timed of vicinal: its own steps, made and called as training and adaptation make and call them.

Images and weights are random: what a step costs does not depend on what the net has learned. No data set is
read and nothing is downloaded.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt
from vicinal.benchmarks.bench.scale import Scale, Shape
from vicinal.benchmarks.bench.timing import Work, synchronize
from vicinal.checkpoint import Trained, packed, unpacked
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.episodes import Batch, Episodes
from vicinal.data.streams import StreamSpec, make_stream
from vicinal.evaluation.online import run_online
from vicinal.graphs import WARM_UP
from vicinal.models.backbones import preprocessing_for
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import TrainConfig, for_pretrained
from vicinal.training.learner import ALGORITHMS, Learner, Stage, make_learner, set_rate
from vicinal.training.loop import recorded, run_stage
from vicinal.training.progress import Silent, StopRequest
from vicinal.training.train import ModelSpec, untrained

SEED = 0


@dataclass(frozen=True)
class Case:
    """A step to time: `build` makes everything it needs and returns it."""

    name: str
    shape: Shape
    images: int  # of one step
    build: Callable[[], Work]
    same_as: str = ""  # the case whose arithmetic it does, where a compiler or a recording hides its own
    early: bool = False  # whether it is built before the others: it frees memory that recordings read


def model_spec(shape: Shape) -> ModelSpec:
    """Return the net of a shape, without weights."""
    preprocessing = preprocessing_for(shape.backbone, channels=3, size=shape.size)
    return ModelSpec(shape.backbone, "none", preprocessing, tuple(map(str, range(shape.classes))))


def train_config(shape: Shape, **options: Any) -> TrainConfig:
    """Return the settings of the paper's training at this shape."""
    return for_pretrained(batch_size=shape.batch, **options)


def random_images(count: int, size: int, device: torch.device) -> torch.Tensor:
    """Return noise as images are stored: uint8 (N, 3, H, W)."""
    generator = torch.Generator(device=device).manual_seed(SEED)
    shape = (count, 3, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


def random_sources(shape: Shape, train: int, val: int, device: torch.device) -> list[SourceDomain]:
    """Return source domains of noise, on the device, as training places them."""

    def part(count: int) -> LabelledImages:
        labels = torch.arange(count) % shape.classes
        return LabelledImages(random_images(count, shape.size, device), labels)

    return [SourceDomain(f"domain {index}", part(train), part(val)) for index in range(shape.domains)]


def learner_of(stage: Stage, shape: Shape, device: torch.device, **options: Any) -> Learner:
    """Return a learner at the start of a stage, ready for a step in the middle of its schedule."""
    config = train_config(shape, algorithm=stage.name, **options)
    model, phi = untrained(model_spec(shape), config, device)
    learner = make_learner(model, phi, stage, config, SEED)
    learner.model.train()
    set_rate(learner, 0.5)
    return learner


def episode_batches(stage: Stage, shape: Shape, device: torch.device) -> tuple[Batch, ...]:
    """Return the batches of one iteration, drawn and augmented as in training."""
    sources = random_sources(shape, 2 * shape.batch, 0, device)
    episodes = Episodes(sources, stage.drawing, shape.batch, train_config(shape).augment, device)
    (episode,) = episodes.starting_at(torch.Generator().manual_seed(SEED).get_state(), 1)
    return episode.batches


def training_step(algorithm: str, shape: Shape, device: torch.device, **options: Any) -> Work:
    """Return one iteration of an algorithm's stage, recorded where the loop records it."""
    (stage,) = ALGORITHMS[algorithm]
    learner = learner_of(stage, shape, device, **options)
    step, batches = recorded(stage, learner), episode_batches(stage, shape, device)
    return partial(step, learner, batches)


def training_case(name: str, algorithm: str, shape: Shape, device: torch.device, **options: Any) -> Case:
    """Return an iteration on both batches as a case."""
    return Case(name, shape, 2 * shape.batch, partial(training_step, algorithm, shape, device, **options))


def random_trained(shape: Shape, device: torch.device) -> Trained:
    """Return a model with phis that know nothing, brought to the device as a checkpoint is."""
    spec = model_spec(shape)
    model, phi = untrained(spec, train_config(shape), torch.device("cpu"))
    model.head.weight.data *= 100  # certain, as a trained model is
    nets = {"phi": phi, "anchor_phi": StreamInferenceNet(), "predict_phi": StreamInferenceNet()}
    trained = Trained(model, shape.backbone, spec.classes, spec.preprocessing, "meta", **nets)  # type: ignore[arg-type]
    tensors, header = packed(trained)
    return unpacked(header, tensors, device)


def adapter_step(method: str, shape: Shape, device: torch.device, **options: Any) -> Work:
    """Return one step of a test-time method on a batch."""
    adapter = adapt(random_trained(shape, device), method, **options)
    images = random_images(shape.stream_batch, shape.size, device)
    (x,) = make_stream(
        StreamSpec(batch_size=shape.stream_batch), [images], [torch.zeros(len(images))], SEED
    ).batches(device)
    return partial(adapter, x)


def adapter_case(name: str, method: str, shape: Shape, device: torch.device, **options: Any) -> Case:
    """Return a test-time step as a case."""
    return Case(name, shape, shape.stream_batch, partial(adapter_step, method, shape, device, **options))


class Marks(Silent):
    """Notes when the loop said how far it is; on a GPU it has waited for the device by then."""

    def __init__(self) -> None:
        self.at: list[tuple[int, float]] = [(0, time.perf_counter())]

    def advance(self, done: int, terms: Mapping[str, float], images_per_second: float | None = None) -> None:
        """Note the time."""
        self.at.append((done, time.perf_counter()))


def loop_marks(scale: Scale, shape: Shape, device: torch.device, iterations: int) -> list[tuple[int, float]]:
    """Return (iteration, seconds) along the real training loop: drawing, augmentation, steps, validation."""
    (stage,) = ALGORITHMS["meta"]
    sources = random_sources(shape, scale.source_images, scale.val_images, device)
    marks = Marks()
    learner = learner_of(stage, shape, device, iterations=iterations)
    run_stage(stage, learner, sources, None, marks, StopRequest())
    return [(done, at - marks.at[0][1]) for done, at in marks.at[1:]]


def extrapolated(marks: Sequence[tuple[int, float]], iterations: int) -> float:
    """Return seconds of so many iterations: up to the first mark with all start-up, then at a steady rate."""
    (first, begun), (last, ended) = marks[0], marks[-1]
    if last == first:
        return begun * iterations / first
    return begun + (iterations - first) * (ended - begun) / (last - first)


class StreamTime(NamedTuple):
    """Seconds of adapters over streams."""

    total: float
    set_up: float  # of it: making the adapters, and what first batches take longer than later ones


def stream_seconds(method: str, scale: Scale, device: torch.device, **options: Any) -> StreamTime:
    """Return seconds of adapting online to every target domain, an adapter each, its set-up included."""
    trained, spec = random_trained(scale.shape, device), StreamSpec(batch_size=scale.shape.stream_batch)
    found = []
    for count in scale.streams:
        images = random_images(count, scale.shape.size, device)
        stream = make_stream(spec, [images], [torch.zeros(count)], SEED)
        synchronize(device)
        at = [time.perf_counter()]
        adapter: Adapter = adapt(trained, method, **options)
        synchronize(device)
        at.append(time.perf_counter())
        run_online(adapter, stream, on_batch=partial(_look_at_the_clock, at))
        found.append(stream_time([*at, time.perf_counter()]))
    return StreamTime(sum(one.total for one in found), sum(one.set_up for one in found))


def _look_at_the_clock(at: list[float], done: int) -> None:
    at.append(time.perf_counter())


def stream_time(at: Sequence[float]) -> StreamTime:
    """Return the time of one stream by looks at the clock: at first, after set-up, each batch, at the end.

    The first batches run as written and are recorded: what they take beyond as many later ones is set-up.
    """
    made, batches = at[1] - at[0], [after - before for before, after in pairwise(at[1:-1])]
    first, later = batches[: WARM_UP + 1], batches[WARM_UP + 1 :]
    beyond = max(0.0, sum(first) - len(first) * statistics.median(later)) if later else 0.0
    return StreamTime(at[-1] - at[0], made + beyond)
