import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vicinal.data.domains import SourceDomain
from vicinal.data.episodes import Episodes
from vicinal.errors import UnknownNameError
from vicinal.models.backbones import build_classifier
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet
from vicinal.training import algorithms
from vicinal.training.config import TrainConfig
from vicinal.training.learner import ALGORITHMS, Learner, Stage, Terms, make_learner, set_rate
from vicinal.training.train import ModelSpec

MakeSources = Callable[..., list[SourceDomain]]
CONFIG = TrainConfig(
    iterations=30,
    batch_size=12,
    group_size=6,
    num_samples=2,
    backbone_lr=1e-3,
    head_lr=1e-3,
    phi_lr=2e-2,
    label_smoothing=0.0,
)


def make_nets(spec: ModelSpec, seed: int = 0) -> tuple[Classifier, InferenceNet]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_classifier(spec.backbone, len(spec.classes), preprocessing=spec.preprocessing)
        return model.train(), InferenceNet(model.head.in_features, hidden=16)


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(net.state_dict())


def moved(net: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Return the names of the parameters and buffers that are not what they were."""
    return [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])]


def take_step(stage: Stage, learner: Learner, sources: Sequence[SourceDomain]) -> Terms:
    """Draw the next episode as the loop does and take a step on it."""
    config = learner.config
    episodes = Episodes(sources, stage.drawing, config.batch_size, config.augment, learner.device)
    (episode,) = episodes.starting_at(learner.draws.get_state(), 1)
    learner.draws.set_state(episode.state)
    return stage.step(learner, episode.batches)


def run_steps(stage: Stage, learner: Learner, sources: Sequence[SourceDomain]) -> list[float]:
    """Repeat a step and return the sum of its terms at each."""
    losses = []
    for _ in range(learner.config.iterations):
        learner.model.train(not stage.fixed_model)
        losses.append(sum(float(value) for value in take_step(stage, learner, sources).values()))
    return losses


def test_the_registry_holds_all_algorithms_and_names_them_when_asked_for_another() -> None:
    known = {"erm", "meta", "neighbor", "single_sample", "ttt", "ttt_pp"}
    assert set(ALGORITHMS) == set(algorithms.__all__) == known
    with pytest.raises(UnknownNameError, match=r"'nothing'.*erm, meta, neighbor, single_sample"):
        ALGORITHMS["nothing"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_stage_of_every_algorithm_lowers_its_loss(
    name: str, spec: ModelSpec, make_sources: MakeSources
) -> None:
    (model, phi), sources = make_nets(spec), make_sources()
    for stage in ALGORITHMS[name]:
        config = CONFIG
        if stage.fixed_model:
            with torch.no_grad():  # a head that has lost its confidence gives phi something to mend
                model.head.weight.mul_(0.1)
            config = replace(CONFIG, iterations=60)
        losses = run_steps(stage, make_learner(model, phi, stage, config, seed=0), sources)
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), stage.name


@pytest.mark.parametrize(
    "options", [{}, {"second_order": True}, {"joint_features": True, "draw_labels": True}]
)
def test_meta_lowers_the_loss_of_the_meta_target_with_every_option(
    options: dict[str, Any], spec: ModelSpec, make_sources: MakeSources
) -> None:
    (model, phi), sources, (stage,) = make_nets(spec), make_sources(), ALGORITHMS["meta"]
    learner = make_learner(model, phi, stage, replace(CONFIG, **options), seed=1)
    classify = [float(take_step(stage, learner, sources)["classify"]) for _ in range(CONFIG.iterations)]
    assert sum(classify[-5:]) < 0.9 * sum(classify[:5])


def test_an_erm_step_is_the_step_written_by_hand(spec: ModelSpec, make_sources: MakeSources) -> None:
    (model, _), sources, (stage,) = make_nets(spec), make_sources(), ALGORITHMS["erm"]
    plain, config = copy.deepcopy(model), replace(CONFIG, head_lr=2e-3, label_smoothing=0.1)
    learner = make_learner(model, None, stage, config, seed=7)
    draws = torch.Generator().manual_seed(7)
    groups = [{"params": plain.features.parameters()}, {"params": plain.head.parameters(), "lr": 2e-3}]
    adam = torch.optim.Adam(groups, lr=1e-3)
    for _ in range(3):
        terms = take_step(stage, learner, sources)
        picked = [(source.train, torch.randint(24, (8,), generator=draws)) for source in sources]
        x = torch.cat([part.images[index] for part, index in picked]).float() / 255
        y = torch.cat([part.labels[index] for part, index in picked])
        loss = F.cross_entropy(plain(x), y, label_smoothing=0.1)
        adam.zero_grad()
        loss.backward()
        adam.step()
        assert torch.equal(terms["classify"], loss.detach())
    assert not moved(model, plain.state_dict())


def test_the_phi_stage_of_neighbor_leaves_theta_bit_identical(
    spec: ModelSpec, make_sources: MakeSources
) -> None:
    (model, phi), sources, (first, second) = make_nets(spec), make_sources(), ALGORITHMS["neighbor"]
    run_steps(first, make_learner(model, phi, first, CONFIG, seed=1), sources)
    model_before, phi_before = snapshot(model), snapshot(phi)
    learner = make_learner(model, phi, second, CONFIG, seed=2)
    assert second.fixed_model
    assert [group["params"] for group in learner.optimizer.param_groups] == [list(phi.parameters())]
    run_steps(second, learner, sources)
    assert not moved(model, model_before)
    assert set(moved(phi, phi_before)) == {name for name, _ in phi.named_parameters()}


def test_the_first_stage_of_neighbor_is_erm(spec: ModelSpec, make_sources: MakeSources) -> None:
    (one, phi), (other, _), sources = make_nets(spec), make_nets(spec), make_sources()
    (erm,), (first, _) = ALGORITHMS["erm"], ALGORITHMS["neighbor"]
    phi_before = snapshot(phi)
    assert run_steps(first, make_learner(one, phi, first, CONFIG, seed=1), sources) == run_steps(
        erm, make_learner(other, None, erm, CONFIG, seed=1), sources
    )
    assert not moved(one, other.state_dict())
    assert not moved(phi, phi_before)


def test_one_meta_step_moves_all_of_theta_and_phi(spec: ModelSpec, make_sources: MakeSources) -> None:
    (model, phi), sources, (stage,) = make_nets(spec), make_sources(), ALGORITHMS["meta"]
    before, phi_before = snapshot(model), snapshot(phi)
    learner = make_learner(model, phi, stage, CONFIG, seed=1)
    terms = take_step(stage, learner, sources)
    assert set(terms) == {"source", "classify", "label", "kl"}
    assert set(moved(model, before)) >= {name for name, _ in model.named_parameters()}
    # Its mean head starts at zero, so the first gradient stops there and at the spread.
    assert {"mean.weight", "mean.bias", "log_std.bias"} <= set(moved(phi, phi_before))
    take_step(stage, learner, sources)
    assert set(moved(phi, phi_before)) == {name for name, _ in phi.named_parameters()}


def test_a_meta_step_updates_normalization_by_the_meta_source_batch_alone(
    spec: ModelSpec, make_sources: MakeSources
) -> None:
    (model, phi), sources, (stage,) = make_nets(spec), make_sources(), ALGORITHMS["meta"]
    learner = make_learner(model, phi, stage, CONFIG, seed=1)
    take_step(stage, learner, sources)
    assert int(model.features[1].num_batches_tracked) == 1


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_step_keeps_to_its_own_generators(name: str, spec: ModelSpec, make_sources: MakeSources) -> None:
    sources, outcomes = make_sources(), []
    for noise in (0, 99):
        model, phi = make_nets(spec)
        torch.manual_seed(noise)
        before = torch.random.get_rng_state()
        for stage in ALGORITHMS[name]:
            make_learner_and_step(stage, model, phi, sources)
        assert torch.equal(torch.random.get_rng_state(), before)
        outcomes.append(snapshot(model) | {f"phi.{key}": value for key, value in snapshot(phi).items()})
    assert all(torch.equal(value, outcomes[1][key]) for key, value in outcomes[0].items())


def make_learner_and_step(
    stage: Stage, model: Classifier, phi: InferenceNet, sources: Sequence[SourceDomain]
) -> None:
    learner = make_learner(model, phi, stage, CONFIG, seed=3)
    for _ in range(2):
        take_step(stage, learner, sources)


def test_each_part_has_its_own_step_size_on_one_cycle(spec: ModelSpec) -> None:
    (model, phi), (stage,) = make_nets(spec), ALGORITHMS["meta"]
    config = replace(CONFIG, backbone_lr=1e-3, head_lr=2e-3, phi_lr=3e-3)
    learner = make_learner(model, phi, stage, config, seed=0)
    counts = [len(group["params"]) for group in learner.optimizer.param_groups]
    assert counts == [len(list(net.parameters())) for net in (model.features, model.head, phi)]
    for progress, share in ((0.0, 1 / 25), (0.3, 1.0), (1.0, 1e-4)):
        set_rate(learner, progress)
        rates = [group["lr"] for group in learner.optimizer.param_groups]
        assert rates == pytest.approx([share * rate for rate in (1e-3, 2e-3, 3e-3)])


def test_meta_learns_from_a_single_source(spec: ModelSpec, make_sources: MakeSources) -> None:
    # Two sources are allowed; their left-out models have one each.
    (model, phi), (stage,) = make_nets(spec), ALGORITHMS["meta"]
    learner = make_learner(model, phi, stage, CONFIG, seed=1)
    assert take_step(stage, learner, make_sources(domains=1))
