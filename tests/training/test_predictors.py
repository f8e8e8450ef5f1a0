from typing import Any

import pytest
import torch

from vicinal.adapters.vnl_settings import VOTES, VnlSettings
from vicinal.functional.memory import empty_memory
from vicinal.functional.neighbors import voted_labels
from vicinal.models.inference import StreamInferenceNet
from vicinal.training.config import OutOfFoldConfig
from vicinal.training.fit_phi import fit_phi
from vicinal.training.left_out import Lesson
from vicinal.training.predictors import After, by_labels, label_lesson, vote_lesson
from vicinal.types import Crowd, Head


def make_lesson(steps: int = 4, seed: int = 0) -> Lesson:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(steps, 8, 5, generator=generator)
    head = Head(torch.randn(steps, 3, 5, generator=generator), torch.randn(steps, 3, generator=generator))
    logits = torch.einsum("tnd,tcd->tnc", z, head.weight) + head.bias.unsqueeze(1)
    return Lesson(z, logits, head, torch.zeros(steps, 8, dtype=torch.long))


def make_phi() -> StreamInferenceNet:
    phi, generator = StreamInferenceNet(hidden=6, reference_batch=8), torch.Generator().manual_seed(1)
    for parameter in phi.parameters():
        parameter.data.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return phi


def test_a_lesson_is_labelled_online_with_the_head_of_each_step() -> None:
    phi, lesson = make_phi(), make_lesson()
    phi.low.fill_(-1.0)  # a range that the lesson leaves, so that trust has a part
    phi.high.fill_(1.0)
    memory = empty_memory(Head(lesson.head.weight[0], lesson.head.bias[0]))
    expected = []
    for step in range(4):
        head = Head(lesson.head.weight[step], lesson.head.bias[step])
        w, memory = phi(lesson.z[step], lesson.logits[step], head, memory)
        y_w = (lesson.z[step] @ w.mean.T + w.bias).softmax(-1)
        trust = (y_w * phi.trust(memory, head)).sum(-1, keepdim=True)
        expected.append(trust * y_w + (1 - trust) * lesson.logits[step].softmax(-1))
    found = label_lesson(phi, lesson)
    assert found.shape == (32, 3)
    assert not found.requires_grad
    torch.testing.assert_close(found, torch.cat(expected))


def test_labels_of_a_step_do_not_know_the_steps_after() -> None:
    phi, lesson = make_phi(), make_lesson()
    first = Lesson(
        lesson.z[:2], lesson.logits[:2], Head(lesson.head.weight[:2], lesson.head.bias[:2]), lesson.y[:2]
    )
    assert torch.equal(label_lesson(phi, lesson)[:16], label_lesson(phi, first))


def test_an_unfitted_phi_says_what_the_model_says() -> None:
    lesson = make_lesson()
    torch.testing.assert_close(
        label_lesson(StreamInferenceNet(reference_batch=8), lesson), lesson.logits.softmax(-1).flatten(0, 1)
    )


@pytest.mark.parametrize("domains", [("a", "a", "b", "b"), ("a", "b", "c", "a")])
def test_labels_are_by_a_phi_that_saw_nothing_of_their_domain(domains: tuple[str, ...]) -> None:
    lessons = [make_lesson(seed=seed) for seed in range(len(domains))]
    config = OutOfFoldConfig(batch_size=8, epochs=8, hidden=6)
    draws = VnlSettings().num_samples
    found = by_labels(After(lessons, lessons, domains), config, 3)
    for index, domain in enumerate(domains):
        others = [lesson for lesson, other in zip(lessons, domains, strict=True) if other != domain]
        expected = label_lesson(fit_phi(others, config, 3), lessons[index], draws)
        torch.testing.assert_close(found[index], expected)
        everything = label_lesson(fit_phi(lessons, config, 3), lessons[index], draws)
        assert (found[index] - everything).abs().max() > 1e-3, "its own streams would have told"


def test_where_one_domain_was_left_out_its_own_streams_are_all_there_is() -> None:
    lessons = [make_lesson(seed=seed) for seed in range(2)]
    config = OutOfFoldConfig(batch_size=8, epochs=2, hidden=6)
    expected = label_lesson(fit_phi(lessons, config, 0), lessons[1], VnlSettings().num_samples)
    torch.testing.assert_close(by_labels(After(lessons, lessons, ["a", "a"]), config, 0)[1], expected)


def all_before(z: torch.Tensor, y: torch.Tensor, step: int) -> Crowd:
    """Return everybody of the steps before, as a crowd that is never full."""
    units = torch.nn.functional.normalize(z[:step].flatten(0, 1), dim=-1)
    return Crowd(units, y[:step].flatten(0, 1), torch.ones(len(units), dtype=torch.bool))


@pytest.mark.parametrize("votes", VOTES)
def test_a_lesson_is_voted_on_by_everybody_before(votes: Any) -> None:
    lesson, still = make_lesson(), make_lesson(seed=1)
    settings = VnlSettings(**VOTES[votes])
    z = lesson.z
    if settings.joint:
        z = torch.cat([one / one.norm(dim=-1, keepdim=True) for one in (lesson.z, still.z)], -1)
    y = lesson.logits.softmax(-1)
    expected = [
        voted_labels(z[t], y[t], all_before(z, y, t), 10, settings.tau, settings.voted, settings.rounds)
        for t in range(4)
    ]
    torch.testing.assert_close(vote_lesson(lesson, settings, still), torch.cat(expected))


def test_without_a_still_model_votes_are_by_own_features() -> None:
    lesson, settings = make_lesson(), VnlSettings(rounds=3, crowd=120)
    joint = VnlSettings(rounds=3, crowd=120, joint=True)
    assert torch.equal(vote_lesson(lesson, joint), vote_lesson(lesson, settings))


def test_a_limited_crowd_forgets() -> None:
    lesson = make_lesson()
    few, many = (vote_lesson(lesson, VnlSettings(rounds=2, crowd_limit=n)) for n in (8, 2000))
    assert torch.equal(few[:16], many[:16]), "so far there is room for everybody"
    assert not torch.equal(few[16:], many[16:])
