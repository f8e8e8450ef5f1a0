"""Algorithms that train more than model and phi: the hook of the loop, `ttt` and `ttt_pp`."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vicinal.adapters.ttt
import vicinal.adapters.ttt_pp  # noqa: F401  register the methods
from vicinal.adapters.methods import adapt
from vicinal.checkpoint import load, save
from vicinal.data.augment import Augment
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.episodes import Batch, Episodes, from_all
from vicinal.models.auxiliary import as_extras, filled, part_of, projection_head, rotation_head
from vicinal.models.backbones import build_classifier
from vicinal.training.algorithms import ttt, ttt_pp  # noqa: F401  registers them
from vicinal.training.algorithms.erm import erm_step
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms, make_learner
from vicinal.training.loop import StoppedError
from vicinal.training.train import ModelSpec, train_model

MakeSources = Callable[..., list[SourceDomain]]
CONFIG = TrainConfig(
    algorithm="ttt",
    iterations=6,
    batch_size=8,
    backbone_lr=1e-3,
    head_lr=2e-3,
    validate_every=2,
    save_every=1,
)
ADDED = ("ttt", "ttt_pp")


def batches_of(sources: Sequence[SourceDomain], learner: Learner, count: int) -> list[tuple[Batch, ...]]:
    episodes = Episodes(sources, from_all, learner.config.batch_size, None, learner.device)
    return [episode.batches for episode in episodes.starting_at(learner.draws.get_state(), count)]


def learner_of(name: str, spec: ModelSpec, **options: Any) -> tuple[Stage, Learner]:
    (stage,) = ALGORITHMS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_classifier(spec.backbone, 2, preprocessing=spec.preprocessing).train()
    return stage, make_learner(model, None, stage, replace(CONFIG, **options), seed=3)


@pytest.mark.parametrize("name", ADDED)
def test_what_is_trained_travels_with_the_model_and_serves_its_method(
    name: str, spec: ModelSpec, make_sources: MakeSources, make_run: Any, tmp_path: Path
) -> None:
    trained = train_model(spec, make_sources(), replace(CONFIG, algorithm=name), make_run(), {})
    assert trained.phi is None
    assert {key.split(".")[0] for key in trained.extras} == {name, "fisher"}
    assert not any(value.requires_grad for value in trained.extras.values())
    save(tmp_path / "model.safetensors", trained)
    loaded = load(tmp_path)
    assert loaded.extras.keys() == trained.extras.keys()
    assert all(torch.equal(value, loaded.extras[key]) for key, value in trained.extras.items())
    x = make_sources(seed=1)[0].train.images[:6].float() / 255
    assert torch.equal(adapt(trained, name)(x), adapt(loaded, name)(x))


@pytest.mark.parametrize("name", ADDED)
def test_a_resumed_run_leaves_the_same_extras(
    name: str, spec: ModelSpec, make_sources: MakeSources, make_run: Any, tmp_path: Path
) -> None:
    config, sources = replace(CONFIG, algorithm=name), make_sources()
    whole = train_model(spec, sources, config, make_run(), {})
    with pytest.raises(StoppedError):
        train_model(spec, sources, config, make_run(tmp_path, halt=(name, 2)), {})
    rest = train_model(spec, sources, config, make_run(tmp_path, resume=True), {})
    assert whole.extras.keys() == rest.extras.keys()
    assert all(torch.equal(value, rest.extras[key]) for key, value in whole.extras.items())


def test_finish_sees_the_best_weights_in_evaluation_mode_and_its_extras_are_kept(
    spec: ModelSpec, make_sources: MakeSources, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, float, list[str]]] = []

    def step(learner: Learner, batches: tuple[Batch, ...]) -> Terms:
        assert isinstance(learner.auxiliary, nn.Linear)
        assert learner.auxiliary.training
        with torch.no_grad():
            learner.auxiliary.bias += 1
        return erm_step(learner, batches)

    def finish(learner: Learner, sources: Sequence[SourceDomain]) -> dict[str, Tensor]:
        assert isinstance(learner.auxiliary, nn.Linear)
        bias = learner.auxiliary.bias.detach().clone()
        seen.append((learner.model.training, float(bias), [source.name for source in sources]))
        return {"made.bias": bias}

    def build(model: Any, config: TrainConfig) -> nn.Module:
        return nn.Linear(1, 1)

    stage = Stage("made", from_all, step, auxiliary=build, finish=finish)
    plain = Stage("plain", from_all, erm_step)
    things = {"made": (stage, plain)}
    monkeypatch.setattr("vicinal.training.train.ALGORITHMS", things)
    accuracies = iter([0.5, 0.9, 0.7, 0.1, 0.2, 0.3])
    monkeypatch.setattr("vicinal.training.loop.validation_accuracy", lambda *_: next(accuracies))
    first = make_learner(
        build_classifier("small", 2, preprocessing=spec.preprocessing), None, stage, CONFIG, 0
    )
    assert isinstance(first.auxiliary, nn.Linear)
    config = replace(CONFIG, algorithm="made")
    trained = train_model(spec, make_sources(), config, make_run(), {})
    ((training, bias, names),) = seen
    assert not training
    assert names == ["d0", "d1", "d2"]
    assert 3 < bias < 5, "four steps of one each to the best validation, from a start within one"
    assert float(trained.extras["made.bias"]) == bias


def test_the_auxiliary_net_has_its_own_step_size_and_touches_no_other_randomness(spec: ModelSpec) -> None:
    before = torch.random.get_rng_state()
    (stage,) = ALGORITHMS["ttt"]
    for rate, expected in (("head_lr", 2e-3), ("phi_lr", CONFIG.phi_lr)):
        changed = replace(stage, auxiliary_rate=rate)
        _, learner = learner_of("ttt", spec)
        other = make_learner(learner.model, None, changed, CONFIG, seed=3)
        assert other.auxiliary is not None
        assert learner.auxiliary is not None
        assert [group["lr"] for group in other.optimizer.param_groups] == [1e-3, 2e-3, expected]
        assert other.optimizer.param_groups[2]["params"] == list(other.auxiliary.parameters())
        for one, same in zip(learner.auxiliary.parameters(), other.auxiliary.parameters(), strict=True):
            assert torch.equal(one, same)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_ttt_step_is_the_step_written_by_hand(spec: ModelSpec, make_sources: MakeSources) -> None:
    stage, learner = learner_of("ttt", spec)
    plain, head = copy.deepcopy(learner.model), copy.deepcopy(learner.auxiliary)
    assert head is not None
    groups = [
        {"params": plain.features.parameters()},
        {"params": [*plain.head.parameters(), *head.parameters()]},
    ]
    adam = torch.optim.Adam(groups, lr=1e-3)
    adam.param_groups[1]["lr"] = 2e-3
    noise = torch.Generator().manual_seed(3)
    for batches in batches_of(make_sources(), learner, 3):
        ((x, y),) = batches
        terms = stage.step(learner, batches)
        turns = torch.randint(4, (len(x),), generator=noise)
        classify = F.cross_entropy(plain(x), y, label_smoothing=0.1)
        statistics = copy.deepcopy(dict(plain.named_buffers()))
        turned = torch.stack([torch.rot90(image, int(k), (1, 2)) for image, k in zip(x, turns, strict=True)])
        rotate = F.cross_entropy(head(plain.embed(turned)), turns)
        adam.zero_grad()
        (classify + rotate).backward()
        adam.step()
        torch.testing.assert_close(terms["classify"], classify.detach())
        torch.testing.assert_close(terms["rotate"], rotate.detach())
        for name, value in learner.model.named_buffers():
            if "running" in name:  # plain images alone make them
                torch.testing.assert_close(value, statistics[name], rtol=1e-4, atol=1e-5)
                plain.get_buffer(name).copy_(value)
    for found, expected in zip(learner.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_ttt_pp_step_is_the_step_written_by_hand(spec: ModelSpec, make_sources: MakeSources) -> None:
    stage, learner = learner_of("ttt_pp", spec)
    plain, head = copy.deepcopy(learner.model), copy.deepcopy(learner.auxiliary)
    assert head is not None
    view = Augment(0.2, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, gray=0.2)
    noise = torch.Generator().manual_seed(3)
    (batches,) = batches_of(make_sources(), learner, 1)
    ((x, y),) = batches
    terms = stage.step(learner, batches)
    classify = F.cross_entropy(plain(x), y, label_smoothing=0.1)
    for name, value in learner.model.named_buffers():
        assert torch.equal(value, plain.get_buffer(name)), "plain images alone make them"
    assert all(module.training for module in learner.model.modules())
    p = F.normalize(head(plain.embed(torch.cat([view(x, noise), view(x, noise)]))), dim=1)
    like = (p @ p.T / 0.5).fill_diagonal_(-torch.inf).log_softmax(1)
    count = len(x)
    contrast = -(like.diagonal(count).sum() + like.diagonal(-count).sum()) / (2 * count)
    torch.testing.assert_close(terms["classify"], classify.detach())
    torch.testing.assert_close(terms["contrast"], contrast.detach())
    (classify + contrast).backward()
    for found, expected in zip(learner.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_the_rotations_are_learned(spec: ModelSpec, make_sources: MakeSources) -> None:
    stage, learner = learner_of("ttt", spec)
    told = [stage.step(learner, batches)["rotate"] for batches in batches_of(make_sources(), learner, 40)]
    assert sum(told[-5:]) < 0.7 * sum(told[:5])


def test_views_of_an_image_are_learned_to_be_told_from_others(spec: ModelSpec) -> None:
    """Of images that differ in nothing but their shade, which a crop leaves as it is."""
    shades = torch.arange(0, 250, 10, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    part = LabelledImages(shades, torch.arange(len(shades)) % 2)
    stage, learner = learner_of("ttt_pp", spec)
    batches = batches_of([SourceDomain("shades", part, part)], learner, 40)
    told = [float(stage.step(learner, drawn)["contrast"]) for drawn in batches]
    chance = math.log(2 * 16 - 1)  # any other of both views of 16 images
    assert told[0] > 0.9 * chance
    assert sum(told[-5:]) / 5 < 0.8 * chance


def test_the_moments_are_those_of_all_training_images(spec: ModelSpec, make_sources: MakeSources) -> None:
    stage, learner = learner_of("ttt_pp", spec)
    sources = make_sources(train=200)
    assert stage.finish is not None
    learner.model.eval()
    found = part_of(stage.finish(learner, sources), "ttt_pp")
    assert learner.auxiliary is not None
    with torch.no_grad():
        z = torch.cat([learner.model.embed(source.train.images.float() / 255) for source in sources])
        parts = {"features": z, "projection": learner.auxiliary(z)}
    for name, value in parts.items():
        mean, cov, units = (found[f"{name}.{what}"] for what in ("mean", "covariance", "distances"))
        torch.testing.assert_close(mean, value.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cov, torch.cov(value.T), rtol=1e-3, atol=1e-5)
        # Of random parts of 150: about trace / (150 d) for the means, whatever the parts are.
        chance = float(torch.trace(cov)) / len(cov) * (1 / 150 - 1 / 600)
        assert 0.3 * chance < float(units[0]) < 3 * chance
        assert units[1] > 0


def test_a_source_of_few_images_still_has_units_to_measure_by(
    spec: ModelSpec, make_sources: MakeSources
) -> None:
    stage, learner = learner_of("ttt_pp", spec)
    assert stage.finish is not None
    found = stage.finish(learner, make_sources(domains=1, train=1, val=0))
    for part in ("features", "projection"):
        assert (found[f"ttt_pp.{part}.distances"] > 0).all()
        assert all(value.isfinite().all() for value in found.values())


def test_a_head_comes_back_from_its_tensors_as_a_copy() -> None:
    before = torch.random.get_rng_state()
    for build in (rotation_head, projection_head):
        with torch.random.fork_rng(devices=[]):
            head = build(5)
        extras = {**as_extras("one", head), "one_more.weight": torch.zeros(1)}
        again = filled(
            lambda build=build: build(5), part_of(extras, "one"), torch.zeros((), dtype=torch.float64)
        )
        z = torch.ones(2, 5)
        torch.testing.assert_close(again(z.double()), head(z).double())
        assert all(value.requires_grad and value.dtype == torch.float64 for value in again.parameters())
        assert all(not value.requires_grad for value in extras.values())
    assert torch.equal(torch.random.get_rng_state(), before)
