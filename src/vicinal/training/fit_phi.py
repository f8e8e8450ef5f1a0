"""Fitting the out-of-fold phi: cross-entropy of its labels on lessons from left-out domains."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.functional.labels import neighbor_labels
from vicinal.functional.losses import gaussian_kl, label_cross_entropy
from vicinal.functional.memory import batch_memory, centres, evidence, source_rows
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.left_out import Lesson
from vicinal.types import GaussianW, Head, StreamMemory


@dataclass
class Course:
    """Lessons of one shape as one, the labels of its last epoch, and the memories that they make."""

    whole: Lesson
    lengths: list[int]  # steps of each lesson
    y: Tensor
    memory: StreamMemory  # before every step


def fit_phi(lessons: Sequence[Lesson], config: OutOfFoldConfig, seed: int) -> StreamInferenceNet:
    """Return a phi fitted on all steps of all lessons at once, whatever their models' shapes.

    The memory of each step is a function of the labels of the steps before; they are taken from the last
    epoch, so that an epoch is one pass and nothing is unrolled through time.
    """
    generator = torch.Generator(device=lessons[0].z.device).manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        phi = StreamInferenceNet(config.hidden, config.rounds, config.decay, config.batch_size).to(
            generator.device
        )
    courses = _courses(lessons, phi)
    steps = sum(len(lesson.z) for lesson in lessons)
    _set_scale(phi, courses)
    optimizer = torch.optim.Adam(phi.parameters(), lr=config.fit_lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs)
    for _ in range(config.epochs):
        optimizer.zero_grad(set_to_none=True)
        for course in courses:
            whole = course.whole
            w, _ = phi(whole.z, whole.logits, whole.head, course.memory)
            loss = variational_loss(phi, whole, course.memory, w, config, generator)
            (len(whole.z) / steps * loss).backward()  # type: ignore[no-untyped-call]
            _remember(course, neighbor_labels(whole.z, w, 0).detach(), phi)
        optimizer.step()
        schedule.step()
    _set_range(phi, courses)
    return phi.eval()


def _courses(lessons: Sequence[Lesson], phi: StreamInferenceNet) -> list[Course]:
    """Return the lessons by the shape of their batches, classes and features."""
    shapes: dict[tuple[torch.Size, torch.Size], list[Lesson]] = {}
    for lesson in lessons:
        shapes.setdefault((lesson.z.shape[1:], lesson.logits.shape[1:]), []).append(lesson)
    made = []
    for alike in shapes.values():
        whole, lengths = concatenate(alike), [len(lesson.z) for lesson in alike]
        y = whole.logits.softmax(-1)
        made.append(Course(whole, lengths, y, _memories(phi, whole.z, y, lengths)))
    return made


def _remember(course: Course, y: Tensor, phi: StreamInferenceNet) -> None:
    course.y, course.memory = y, _memories(phi, course.whole.z, y, course.lengths)


def _memories(phi: StreamInferenceNet, z: Tensor, y: Tensor, lengths: Sequence[int]) -> StreamMemory:
    # A domain of fewer images than a batch makes smaller batches, after which less is forgotten.
    return memories(z, y, lengths, phi.decay_of(z.shape[-2]))


def variational_loss(
    phi: StreamInferenceNet,
    lesson: Lesson,
    memory: StreamMemory,
    p: GaussianW,
    config: OutOfFoldConfig,
    generator: torch.Generator,
) -> Tensor:
    """Return CE(y_p, y) + a CE(y_q, y) + b KL[q || p]: the paper's objective on left-out domains, Eq. (10).

    The prior p sees the batch under the model's own labels, the posterior q under the true ones.
    """
    draws = config.num_samples
    loss = label_cross_entropy(neighbor_labels(lesson.z, p, draws, generator), lesson.y)
    if config.posterior_weight or config.kl_weight:
        y_true = F.one_hot(lesson.y, lesson.logits.shape[-1]).to(lesson.z.dtype)
        q = phi.infer(phi.step_memory(memory, lesson.z, y_true), lesson.head)
        of_q = label_cross_entropy(neighbor_labels(lesson.z, q, draws, generator), lesson.y)
        present = y_true.sum(-2) > 0
        loss = loss + config.posterior_weight * of_q + config.kl_weight * gaussian_kl(q, p, present)
    return loss


def concatenate(lessons: Sequence[Lesson]) -> Lesson:
    """Return all lessons as one, step after step."""
    heads = [lesson.head for lesson in lessons]
    return Lesson(
        torch.cat([lesson.z for lesson in lessons]),
        torch.cat([lesson.logits for lesson in lessons]),
        Head(torch.cat([head.weight for head in heads]), torch.cat([head.bias for head in heads])),
        torch.cat([lesson.y for lesson in lessons]),
    )


def memories(z: Tensor, y: Tensor, lengths: Sequence[int], decay: float) -> StreamMemory:
    """Return the memory before every step, stream by stream, given the labels of all steps.

    memory_t = sum over s < t of decay^(t - 1 - s) new_s: one product with a triangular matrix a stream.
    """
    new = batch_memory(z, y)
    parts = [
        _scan(StreamMemory(*(value[start : start + length] for value in new)), decay)
        for start, length in zip(_starts(lengths), lengths, strict=True)
    ]
    return StreamMemory(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]


def _scan(new: StreamMemory, decay: float) -> StreamMemory:
    steps = torch.arange(len(new.counts), device=new.counts.device, dtype=new.counts.dtype)
    age = steps[:, None] - 1 - steps[None, :]
    weights = torch.where(age >= 0, decay ** age.clamp_min(0), torch.zeros_like(age))
    classes = new.marginal.shape[-1]
    uniform = (decay**steps).unsqueeze(-1) / classes
    return StreamMemory(
        torch.einsum("ts,scd->tcd", weights, new.sums),
        weights @ new.counts,
        weights @ new.mass,
        (1 - decay) * (weights @ new.marginal) + uniform,
        weights @ new.squares,
    )


def _evidence(phi: StreamInferenceNet, courses: Sequence[Course]) -> Tensor:
    """Return what phi would read at every step, a row for each step and class."""
    found = []
    for course in courses:
        seen = phi.step_memory(course.memory, course.whole.z, course.y)
        found.append(evidence(seen, centres(seen), source_rows(course.whole.head)).flatten(0, -2))
    return torch.cat(found)


@torch.no_grad()
def _set_scale(phi: StreamInferenceNet, courses: Sequence[Course]) -> None:
    numbers = _evidence(phi, courses)
    phi.location.copy_(numbers.mean(0))
    phi.scale.copy_(numbers.std(0) + 1e-3)


@torch.no_grad()
def _set_range(phi: StreamInferenceNet, courses: Sequence[Course]) -> None:
    numbers = _evidence(phi, courses)
    phi.low.copy_(numbers.amin(0))
    phi.high.copy_(numbers.amax(0))
