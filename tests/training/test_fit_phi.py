import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from vicinal.functional.memory import batch_memory, centres, empty_memory, evidence, remember, source_rows
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.fit_phi import concatenate, fit_phi, memories, variational_loss
from vicinal.training.left_out import Lesson
from vicinal.training.predictors import label_lesson
from vicinal.types import Head, StreamMemory

CLASSES, WIDTH, BATCH, STEPS = 5, 8, 20, 12
CONFIG = OutOfFoldConfig(batch_size=BATCH, epochs=60, fit_lr=3e-2, hidden=16)


def turned(rows: Tensor, angle: float, generator: torch.Generator) -> Tensor:
    """Return the rows turned by `angle` in a random plane."""
    basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=rows.dtype)).Q
    turn = torch.eye(WIDTH, dtype=rows.dtype)
    turn[0, 0] = turn[1, 1] = math.cos(angle)
    turn[0, 1], turn[1, 0] = -math.sin(angle), math.sin(angle)
    return rows @ basis @ turn @ basis.T


def make_lesson(
    seed: int, steps: int = STEPS, angle: float = 1.2, shift: float = 1.5, classes: int = CLASSES
) -> Lesson:
    """Return a stream whose class means are the classifier's rows turned in several planes and shifted."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * F.normalize(torch.randn(classes, WIDTH, generator=generator), dim=-1)
    means = rows
    for _ in range(3):
        means = turned(means, angle, generator)
    means = means + shift * F.normalize(torch.randn(WIDTH, generator=generator), dim=-1)
    y = torch.randint(classes, (steps, BATCH), generator=generator)
    z = means[y] + 0.3 * torch.randn(steps, BATCH, WIDTH, generator=generator)
    head = Head(rows.expand(steps, -1, -1), torch.zeros(steps, classes))
    return Lesson(z, z @ rows.T, head, y)


LESSONS = [make_lesson(seed) for seed in range(6)]


def accuracy(y_hat: Tensor, lesson: Lesson) -> float:
    return float((y_hat.argmax(-1) == lesson.y.flatten()).float().mean())


def loss_of(phi: StreamInferenceNet, lessons: Sequence[Lesson]) -> float:
    """Return the cross-entropy of the labels phi gives online, a mean over the lessons."""
    picked = [
        label_lesson(phi, lesson).gather(-1, lesson.y.flatten().unsqueeze(-1)).log() for lesson in lessons
    ]
    return float(-torch.cat(picked).mean())


def memories_by_loop(lesson: Lesson, labels: Tensor, decay: float) -> StreamMemory:
    """Return the memory before every step of one stream, step by step."""
    memory = empty_memory(Head(lesson.head.weight[0], lesson.head.bias[0]))
    before = []
    for z, y in zip(lesson.z, labels, strict=True):
        before.append(memory)
        memory = remember(memory, batch_memory(z, y), decay)
    return StreamMemory(*(torch.stack(values) for values in zip(*before, strict=True)))


@pytest.mark.parametrize("decay", [0.9, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [(1,), (7,), (3, 1, 5)])
def test_memories_are_those_of_a_loop_over_every_stream(lengths: tuple[int, ...], decay: float) -> None:
    lessons = [make_lesson(seed, steps) for seed, steps in enumerate(lengths)]
    whole = concatenate(lessons)
    found = memories(whole.z.double(), whole.logits.double().softmax(-1), lengths, decay)
    loops = [
        memories_by_loop(
            Lesson(
                lesson.z.double(), lesson.logits, Head(*(part.double() for part in lesson.head)), lesson.y
            ),
            lesson.logits.double().softmax(-1),
            decay,
        )
        for lesson in lessons
    ]
    for name, value in found._asdict().items():
        torch.testing.assert_close(value, torch.cat([getattr(loop, name) for loop in loops]), msg=name)


def test_concatenate_keeps_steps_in_order() -> None:
    whole = concatenate(LESSONS[:2])
    assert torch.equal(whole.z[STEPS:], LESSONS[1].z)
    assert torch.equal(whole.logits[:STEPS], LESSONS[0].logits)
    assert torch.equal(whole.head.weight[STEPS], LESSONS[1].head.weight[0])
    assert torch.equal(whole.y, torch.cat([LESSONS[0].y, LESSONS[1].y]))


def test_fitting_lowers_the_loss_and_corrects_labels() -> None:
    phi, start = fit_phi(LESSONS, CONFIG, 0), StreamInferenceNet(CONFIG.hidden, reference_batch=BATCH)
    own = sum(accuracy(lesson.logits.flatten(0, 1), lesson) for lesson in LESSONS) / len(LESSONS)
    by_labels = sum(accuracy(label_lesson(phi, lesson), lesson) for lesson in LESSONS) / len(LESSONS)
    assert loss_of(phi, LESSONS) < 0.8 * loss_of(start, LESSONS)
    assert 0.4 < own < 0.9
    assert by_labels > own + 0.15


def test_what_was_learned_serves_streams_and_classifiers_it_never_saw() -> None:
    phi, start = fit_phi(LESSONS, CONFIG, 0), StreamInferenceNet(CONFIG.hidden, reference_batch=BATCH)
    others = [make_lesson(seed) for seed in range(100, 106)]
    own = sum(accuracy(lesson.logits.flatten(0, 1), lesson) for lesson in others)
    by_labels = sum(accuracy(label_lesson(phi, lesson), lesson) for lesson in others)
    assert by_labels > own + 0.15 * len(others)
    assert loss_of(phi, others) < 0.5 * loss_of(start, others)


def test_lessons_of_several_shapes_are_fitted_together() -> None:
    wide = [make_lesson(seed, classes=4) for seed in range(20, 24)]  # whose numbers a class differ
    config = replace(CONFIG, epochs=40)
    both, few = fit_phi([*LESSONS[:4], *wide], config, 0), fit_phi(LESSONS[:4], config, 0)
    assert loss_of(both, wide) < loss_of(few, wide)
    assert loss_of(both, LESSONS[:4]) < 0.8 * loss_of(StreamInferenceNet(reference_batch=BATCH), LESSONS[:4])
    numbers = torch.cat([evidence_of(LESSONS[:4], CONFIG.decay), evidence_of(wide, CONFIG.decay)])
    torch.testing.assert_close(both.location, numbers.mean(0), rtol=1e-4, atol=1e-4)


def test_features_that_are_always_zero_change_nothing_but_the_shape() -> None:
    config = replace(CONFIG, epochs=5, num_samples=0)  # the spread of w is over all features, zero or not
    lessons = [make_lesson(0), make_lesson(1, steps=3), make_lesson(2, steps=7)]
    wider = F.pad(lessons[1].z, (0, 2)), F.pad(lessons[1].head.weight, (0, 2))
    padded = replace(lessons[1], z=wider[0], head=Head(wider[1], lessons[1].head.bias))
    alike, apart = (fit_phi([lessons[0], one, lessons[2]], config, 0) for one in (lessons[1], padded))
    for lesson in LESSONS:  # parameters that hardly matter follow the rounding of their gradients
        found, expected = label_lesson(apart, lesson), label_lesson(alike, lesson)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    shorter = fit_phi([lessons[0], lessons[2]], config, 0)
    assert (label_lesson(shorter, LESSONS[0]) - label_lesson(alike, LESSONS[0])).abs().max() > 1e-2


def test_more_epochs_fit_better() -> None:
    few = fit_phi(LESSONS, replace(CONFIG, epochs=3), 0)
    assert loss_of(fit_phi(LESSONS, CONFIG, 0), LESSONS) < loss_of(few, LESSONS)


def test_a_seed_fixes_the_fit_and_the_global_random_state_is_left_alone() -> None:
    config = replace(CONFIG, epochs=3)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = fit_phi(LESSONS, config, 7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    same, other = (fit_phi(LESSONS, config, seed).state_dict() for seed in (7, 8))
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert not all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_fitted_phi_has_the_shape_that_was_asked_for() -> None:
    config = replace(CONFIG, epochs=1, hidden=7, rounds=3, decay=0.8)
    phi = fit_phi(LESSONS[:1], config, 0)
    assert phi.shape == {"hidden": 7, "rounds": 3, "decay": 0.8, "reference_batch": BATCH}
    assert not phi.training


def evidence_of(lessons: Sequence[Lesson], decay: float) -> Tensor:
    """Return the evidence at every step of every stream under the models' own labels, step by step."""
    rows = []
    for lesson in lessons:
        head = Head(lesson.head.weight[0], lesson.head.bias[0])
        memory = empty_memory(head)
        for z, logits in zip(lesson.z, lesson.logits, strict=True):
            memory = remember(memory, batch_memory(z, logits.softmax(-1)), decay)
            rows.append(evidence(memory, centres(memory), source_rows(head)))
    return torch.cat(rows)


@pytest.mark.parametrize("batch", [BATCH, 50])
def test_scale_and_range_are_those_of_the_evidence(batch: int) -> None:
    # After one epoch the last labels are those of the start, where phi says what the model says.
    phi = fit_phi(LESSONS, replace(CONFIG, epochs=1, batch_size=batch), 0)
    numbers = evidence_of(LESSONS, CONFIG.decay ** (BATCH / batch))  # lessons of smaller batches forget less
    torch.testing.assert_close(phi.location, numbers.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(phi.scale, numbers.std(0) + 1e-3, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(phi.low, numbers.amin(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(phi.high, numbers.amax(0), rtol=1e-4, atol=1e-4)


def test_the_range_covers_the_fitted_streams_and_not_others() -> None:
    phi = fit_phi(LESSONS, CONFIG, 0)
    trusted = torch.cat([trust_along(phi, lesson) for lesson in LESSONS])
    assert (trusted > 0.95).float().mean() > 0.95
    # A stream of a single class, which no lesson had.
    alien = make_lesson(0)
    z = alien.z[:1, :1].expand_as(alien.z)
    skewed = Lesson(z, z @ alien.head.weight[0].T, alien.head, alien.y)
    assert trust_along(phi, skewed).mean() < 0.5


def trust_along(phi: StreamInferenceNet, lesson: Lesson) -> Tensor:
    head = Head(lesson.head.weight[0], lesson.head.bias[0])
    memory, found = empty_memory(head), []
    with torch.no_grad():
        for z, logits in zip(lesson.z, lesson.logits, strict=True):
            _, memory = phi(z, logits, head, memory)
            found.append(phi.trust(memory, head))
    return torch.stack(found)


def make_phi(seed: int = 0) -> StreamInferenceNet:
    """Return a phi with all its outputs at work."""
    phi = StreamInferenceNet(hidden=6, reference_batch=BATCH)
    generator = torch.Generator().manual_seed(seed)
    for parameter in phi.parameters():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return phi


def loss_by_hand(phi: StreamInferenceNet, lesson: Lesson, config: OutOfFoldConfig) -> tuple[Tensor, ...]:
    """Return CE of the prior's labels, CE of the posterior's, and KL[q || p], by their definitions."""
    memory = memories_by_loop(lesson, lesson.logits.softmax(-1), phi.decay)
    p, _ = phi(lesson.z, lesson.logits, lesson.head, memory)
    y_true = F.one_hot(lesson.y, CLASSES).float()
    q = phi.infer(remember(memory, batch_memory(lesson.z, y_true), phi.decay), lesson.head)
    generator, entropies = torch.Generator().manual_seed(3), []
    for w in (p, q):
        noise = torch.randn((config.num_samples, *w.mean.shape), generator=generator)
        rows = w.mean + w.std * noise
        y_hat = (torch.einsum("tnd,stcd->stnc", lesson.z, rows) + w.bias.unsqueeze(-2)).softmax(-1).mean(0)
        entropies.append(-y_hat.gather(-1, lesson.y.unsqueeze(-1)).log().mean())
    apart = kl_divergence(Normal(q.mean, q.std), Normal(p.mean, p.std)).mean(-1)
    return (*entropies, apart[y_true.sum(-2) > 0].mean())


@pytest.mark.parametrize("weights", [(0.0, 0.0), (0.5, 0.0), (0.0, 2.0), (0.5, 2.0)])
def test_the_loss_is_prior_and_posterior_cross_entropy_and_kl(weights: tuple[float, float]) -> None:
    phi, lesson = make_phi(), make_lesson(1, steps=4)
    lesson.y[0].clamp_(max=2)  # classes 3 and 4 are absent from the first batch
    config = replace(CONFIG, num_samples=3, posterior_weight=weights[0], kl_weight=weights[1])
    memory = memories(lesson.z, lesson.logits.softmax(-1), [4], phi.decay)
    p, _ = phi(lesson.z, lesson.logits, lesson.head, memory)
    generator = torch.Generator().manual_seed(3)
    found = variational_loss(phi, lesson, memory, p, config, generator)
    of_p, of_q, kl = loss_by_hand(phi, lesson, config)
    assert kl > 0.01
    torch.testing.assert_close(found, of_p + weights[0] * of_q + weights[1] * kl, rtol=1e-4, atol=1e-5)


def test_a_weight_on_the_kl_brings_prior_and_posterior_together() -> None:
    def apart(kl_weight: float) -> float:
        config = replace(CONFIG, epochs=30, kl_weight=kl_weight, posterior_weight=0.5)
        phi = fit_phi(LESSONS, config, 0)
        assert all(torch.isfinite(value).all() for value in phi.state_dict().values())
        with torch.no_grad():
            return float(loss_by_hand(phi, LESSONS[0], config)[2])

    assert apart(1.0) < 0.5 * apart(0.0)
