"""Algorithm 1 against references that share no code with it."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F

from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet
from vicinal.training.config import TrainConfig
from vicinal.training.meta import (
    MetaGradients,
    MetaTerms,
    features_and_logits,
    meta_generalization_step,
    meta_gradients,
    meta_source_step,
    meta_target_loss,
    posterior_labels,
)
from vicinal.types import Head

CLASSES, WIDTH, BATCH = 3, 8, 14
NOISE_SEED = 5
# A step far larger than in practice, so that the second-order part is not lost beside the first.
CONFIG = TrainConfig(
    adapt_lr=0.3,
    group_size=6,
    num_samples=2,
    label_smoothing=0.1,
    kl_weight=0.7,
    second_order=True,
    difference=1e-4,
)


class Problem(NamedTuple):
    model: Classifier
    phi: InferenceNet
    x: Tensor
    y: Tensor


def make_problem(norm: str = "batch", seed: int = 0) -> Problem:
    """Return a smooth float64 net in training mode, a phi that already corrects rows, and a batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        middle = nn.BatchNorm2d(2) if norm == "batch" else nn.Identity()
        features = nn.Sequential(
            nn.Conv2d(1, 2, 3, bias=norm == "none"), middle, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        model = Classifier(features, WIDTH, CLASSES, [0.4], [0.3]).double().train()
        phi = InferenceNet(WIDTH, hidden=5, initial_std=0.2).double()
        for parameter in phi.parameters():
            nn.init.normal_(parameter.data, std=0.3)
        x = torch.rand(BATCH, 1, 6, 6, dtype=torch.float64)
        y = torch.randint(CLASSES, (BATCH,))
    return Problem(model, phi, x, y)


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(NOISE_SEED)


def stages_two_and_three(problem: Problem, config: TrainConfig) -> tuple[MetaGradients, MetaTerms]:
    model, phi, x, y = problem
    stage = meta_generalization_step(model, phi, x, y, config, noise())
    return meta_gradients(model, phi, stage, x, y, config)


def forward(model: Classifier, theta: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    z = functional_call(
        model.features,
        {name[9:]: value for name, value in {**theta, **buffers}.items() if name.startswith("features.")},
        ((x - model.mean) / model.std,),
    )
    return z, z @ theta["head.weight"].T + theta["head.bias"]


def row_of(phi: InferenceNet, mean: Tensor, source_row: Tensor) -> Normal:
    hidden = F.linear(mean, phi.trunk[0].weight, phi.trunk[0].bias).relu()
    correction = F.linear(hidden, phi.mean.weight, phi.mean.bias)
    return Normal(source_row + correction, F.linear(hidden, phi.log_std.weight, phi.log_std.bias).exp())


def classifier_of(phi: InferenceNet, z: Tensor, labels: Tensor, rows: Tensor) -> list[Normal | None]:
    """Return the Gaussian of every class that the labels name, None for the others."""
    found: list[Normal | None] = []
    for c in range(CLASSES):
        members = z[labels == c]
        found.append(row_of(phi, members.mean(0), rows[c]) if len(members) else None)
    return found


def group_labels(
    problem: Problem, z: Tensor, logits: Tensor, rows: Tensor, bias: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Return y_hat and KL[q || p], one group and one class at a time."""
    generator, y_hats, kls = noise(), [], []
    for start in range(0, len(z), config.group_size):
        part = slice(start, start + config.group_size)
        q = classifier_of(problem.phi, z[part], problem.y[part], rows)
        p = classifier_of(problem.phi, z[part], logits[part].argmax(-1), rows)
        pairs = [
            kl_divergence(a, b).mean() for a, b in zip(q, p, strict=True) if a is not None and b is not None
        ]
        kls.append(torch.stack(pairs).mean() if pairs else torch.zeros((), dtype=z.dtype))
        absent = row_of(problem.phi, torch.zeros(WIDTH, dtype=z.dtype), rows[0])
        mean = torch.stack([rows[c] if q[c] is None else q[c].mean for c in range(CLASSES)])
        std = torch.stack([absent.stddev if q[c] is None else q[c].stddev for c in range(CLASSES)])
        draws = torch.randn((config.num_samples, CLASSES, WIDTH), generator=generator, dtype=z.dtype)
        said = [(z[part] @ (mean + std * draw).T + bias).softmax(-1) for draw in draws]
        y_hats.append(torch.stack(said).mean(0))
    return torch.cat(y_hats), torch.stack(kls).mean()


def brute_force(problem: Problem, config: TrainConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Differentiate the whole objective through the inner step: the reference, by double backward."""
    model, phi, x, y = problem
    theta = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    z, logits = forward(model, theta, x)
    rows, bias = theta["head.weight"], theta["head.bias"]
    if not config.joint_features:
        z, rows, bias = z.detach(), rows.detach(), bias.detach()
    y_hat, kl = group_labels(problem, z, logits, rows, bias, config)
    # The inner gradient holds the labels fixed, so it is taken by parameters that the labels do not know.
    alias = {name: value * 1 for name, value in theta.items()}
    inner = -(y_hat * forward(model, alias, x)[1].log_softmax(-1)).sum(-1).mean()
    gradient = torch.autograd.grad(inner, list(alias.values()), create_graph=True)
    moved = {
        name: value - config.adapt_lr * g for (name, value), g in zip(theta.items(), gradient, strict=True)
    }
    classify = F.cross_entropy(forward(model, moved, x)[1], y, label_smoothing=config.label_smoothing)
    loss = classify - y_hat[torch.arange(BATCH), y].log().mean() + config.kl_weight * kl
    wanted = [*theta.values(), *phi.parameters()]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, wanted, strict=True)]
    names = [name for name, _ in phi.named_parameters()]
    return dict(zip(theta, filled, strict=False)), dict(zip(names, filled[len(theta) :], strict=True))


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return |one - other| / |other| over all tensors together."""
    assert one.keys() == other.keys()
    apart = torch.stack([(one[name] - other[name]).square().sum() for name in other]).sum().sqrt()
    return float(apart / torch.stack([other[name].square().sum() for name in other]).sum().sqrt())


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("norm", ["batch", "none"])
def test_second_order_is_the_gradient_of_double_backward(norm: str, joint: bool) -> None:
    problem, config = make_problem(norm), replace(CONFIG, joint_features=joint)
    found, _ = stages_two_and_three(problem, config)
    theta, phi = brute_force(problem, config)
    assert distance(found.theta, theta) < 1e-6
    assert distance(found.phi, phi) < 1e-6
    for name in theta:
        torch.testing.assert_close(found.theta[name], theta[name], rtol=1e-6, atol=1e-8, msg=name)
    for name in phi:
        torch.testing.assert_close(found.phi[name], phi[name], rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_the_second_order_part_alone_is_that_of_double_backward(norm: str) -> None:
    # Beside the first order an error in this part could hide; here it cannot, nor can a part that is missing.
    problem = make_problem(norm)
    first, _ = stages_two_and_three(problem, replace(CONFIG, second_order=False))
    found, _ = stages_two_and_three(problem, CONFIG)
    theta, phi = brute_force(problem, CONFIG)
    assert distance(first.theta, theta) > 1e-3
    assert distance(first.phi, phi) > 1e-3
    part = {name: value - first.theta[name] for name, value in found.theta.items()}
    assert distance(part, {name: value - first.theta[name] for name, value in theta.items()}) < 1e-5
    part = {name: value - first.phi[name] for name, value in found.phi.items()}
    assert distance(part, {name: value - first.phi[name] for name, value in phi.items()}) < 1e-5


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_first_order_is_exactly_the_gradient_at_theta_generalized(norm: str) -> None:
    problem, config = make_problem(norm), replace(CONFIG, second_order=False)
    model, phi, x, y = problem
    stage = meta_generalization_step(model, phi, x, y, config, noise())
    found, terms = meta_gradients(model, phi, stage, x, y, config)
    there = copy.deepcopy(model)
    for name, parameter in there.named_parameters():
        parameter.data.copy_(stage.theta_generalized[name])
    loss = F.cross_entropy(there(x), y, label_smoothing=config.label_smoothing)
    loss.backward()
    assert torch.equal(terms.classify.detach(), loss.detach())
    for name, parameter in there.named_parameters():
        assert torch.equal(found.theta[name], parameter.grad), name


def test_first_order_phi_moves_by_the_label_loss_and_the_kl_alone() -> None:
    problem = make_problem()
    found, _ = stages_two_and_three(problem, replace(CONFIG, second_order=False))
    # At a step of nothing, what reaches phi through the inner step is nothing.
    _, phi = brute_force(problem, replace(CONFIG, adapt_lr=1e-300))
    assert distance(found.phi, phi) < 1e-12


def test_a_vanishing_inner_step_makes_second_order_first_order() -> None:
    problem = make_problem()
    gaps = []
    for step in (1e-2, 1e-4, 1e-10):
        config = replace(CONFIG, adapt_lr=step)
        exact, _ = stages_two_and_three(problem, config)
        first, _ = stages_two_and_three(problem, replace(config, second_order=False))
        gaps.append((distance(exact.theta, first.theta), distance(exact.phi, first.phi)))
    for part in range(2):
        assert 50 < gaps[0][part] / gaps[1][part] < 200
        assert gaps[2][part] < 1e-9


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_stages_two_and_three_leave_model_and_phi_untouched(second: bool, joint: bool) -> None:
    problem = make_problem()
    nets = (problem.model, problem.phi)
    before = [copy.deepcopy(net.state_dict()) for net in nets]
    stages_two_and_three(problem, replace(CONFIG, second_order=second, joint_features=joint))
    for net, state in zip(nets, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
        assert all(parameter.grad is None for parameter in net.parameters())
    assert problem.model.training


def test_a_pass_writes_neither_the_buffers_it_is_given_nor_the_models() -> None:
    model, _, x, _ = make_problem()
    given = {name: value.clone() for name, value in model.named_buffers()}
    kept = {name: value.clone() for name, value in given.items()}
    _, logits = features_and_logits(model, dict(model.named_parameters()), given, x)
    assert all(torch.equal(given[name], kept[name]) for name in kept)
    assert all(torch.equal(value, kept[name]) for name, value in model.named_buffers())
    plain = copy.deepcopy(model)
    assert torch.equal(logits, plain(x))
    assert not torch.equal(plain.features[1].running_mean, kept["features.1.running_mean"])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_the_meta_source_step_is_a_step_of_the_optimizer(kind: str, smoothing: float) -> None:
    model, _, x, y = make_problem()
    plain = copy.deepcopy(model)

    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        if kind == "adam":
            return torch.optim.Adam(net.parameters(), lr=0.01)
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    ours, theirs = optimizer(model), optimizer(plain)
    for _ in range(3):
        loss = meta_source_step(model, ours, x, y, smoothing)
        log_p = plain(x).log_softmax(-1)
        expected = -(1 - smoothing) * log_p[torch.arange(BATCH), y].mean() - smoothing * log_p.mean()
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach())
        assert not loss.requires_grad
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_the_generalization_step_is_a_plain_step_on_the_labels() -> None:
    model, phi, x, y = make_problem("none")
    stage = meta_generalization_step(model, phi, x, y, CONFIG, noise())
    plain = copy.deepcopy(model)
    loss = -(stage.labels.y_hat.detach() * plain(x).log_softmax(-1)).sum(-1).mean()
    loss.backward()
    for name, parameter in plain.named_parameters():
        moved = parameter.detach() - CONFIG.adapt_lr * parameter.grad
        torch.testing.assert_close(stage.theta_generalized[name], moved, rtol=1e-10, atol=1e-12)
        assert torch.equal(stage.theta_meta_source[name], parameter)
        assert not stage.theta_generalized[name].requires_grad


def test_the_terms_of_the_meta_target_loss_are_those_of_the_reference() -> None:
    problem = make_problem()
    model, phi, x, y = problem
    stage = meta_generalization_step(model, phi, x, y, CONFIG, noise())
    terms = meta_target_loss(model, stage, stage.theta_generalized, x, y, CONFIG)
    theta = dict(model.named_parameters())
    z, logits = forward(model, theta, x)
    y_hat, kl = group_labels(problem, z, logits, theta["head.weight"], theta["head.bias"], CONFIG)
    torch.testing.assert_close(stage.labels.y_hat, y_hat)
    torch.testing.assert_close(terms.kl, CONFIG.kl_weight * kl)
    torch.testing.assert_close(terms.label, -y_hat[torch.arange(BATCH), y].log().mean())
    expected = F.cross_entropy(forward(model, stage.theta_generalized, x)[1], y, label_smoothing=0.1)
    torch.testing.assert_close(terms.classify, expected)


class CountingPhi(InferenceNet):
    """Counts its calls."""

    calls = 0

    def forward(self, class_means: Tensor, head: Head, present: Tensor):  # type: ignore[no-untyped-def]
        self.calls += 1
        return super().forward(class_means, head, present)


def test_seventy_images_are_labelled_in_groups_of_twenty() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(70, WIDTH, generator=generator, dtype=torch.float64)
    logits = torch.randn(70, CLASSES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (70,), generator=generator)
    head = Head(torch.randn(CLASSES, WIDTH, generator=generator).double(), torch.zeros(CLASSES).double())
    phi = CountingPhi(WIDTH, hidden=5).double()
    nn.init.normal_(phi.mean.weight, generator=generator)
    config = replace(CONFIG, group_size=20, num_samples=0)
    whole = posterior_labels(phi, z, logits, y, head, config, noise())
    assert phi.calls == 2 * 4  # prior and posterior of 20, 20, 20 and 10 images
    alone = [
        posterior_labels(phi, z[part], logits[part], y[part], head, config, noise())
        for part in (slice(0, 20), slice(20, 40), slice(40, 60), slice(60, 70))
    ]
    torch.testing.assert_close(whole.y_hat, torch.cat([labels.y_hat for labels in alone]))
    torch.testing.assert_close(whole.kl, torch.stack([labels.kl for labels in alone]).mean())
    at_once = posterior_labels(phi, z, logits, y, head, replace(config, group_size=70), noise())
    assert not torch.allclose(whole.y_hat, at_once.y_hat)


def test_a_class_nobody_has_keeps_its_source_row() -> None:
    model, phi, x, _ = make_problem()
    y = torch.zeros(BATCH, dtype=torch.long)
    z, logits = model.features_and_logits(x)
    config = replace(CONFIG, num_samples=0, group_size=BATCH)
    labels = posterior_labels(phi, z, logits, y, model.linear, config, noise())
    rows = model.linear.weight.clone()
    rows[0] = row_of(phi, z.mean(0), rows[0]).mean
    torch.testing.assert_close(labels.y_hat, (z @ rows.T + model.linear.bias).softmax(-1))


@pytest.mark.parametrize("joint", [False, True])
def test_labels_of_one_class_and_no_class_in_common_stay_finite(joint: bool) -> None:
    model, phi, x, _ = make_problem()
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([0.0, 50.0, 0.0]))  # the model says class 1 of everything
    y = torch.zeros(BATCH, dtype=torch.long)
    problem, config = Problem(model, phi, x, y), replace(CONFIG, joint_features=joint)
    found, terms = stages_two_and_three(problem, config)
    assert terms.kl == 0
    assert all(torch.isfinite(value).all() for part in found for value in part.values())
    theta, for_phi = brute_force(problem, config)
    assert distance(found.phi, for_phi) < 1e-6
    assert distance(found.theta, theta) < 1e-6


def test_label_draws_are_one_hot_and_their_mean_is_the_probability() -> None:
    model, phi, x, y = make_problem()
    config = replace(CONFIG, draw_labels=True, num_samples=0)
    smooth = meta_generalization_step(model, phi, x, y, replace(config, draw_labels=False), noise())
    shared, total, rounds = noise(), torch.zeros(BATCH, CLASSES, dtype=torch.float64), 400
    for _ in range(rounds):
        stage = meta_generalization_step(model, phi, x, y, config, shared)
        drawn = stage.y_inner
        torch.testing.assert_close(drawn, F.one_hot(drawn.argmax(-1), CLASSES).double())
        total += drawn
    # Five standard deviations of a mean of 400 draws are at most 0.125.
    torch.testing.assert_close(total / rounds, smooth.labels.y_hat.detach(), rtol=0, atol=0.125)


def test_the_inner_step_runs_on_the_drawn_labels_and_phi_still_learns() -> None:
    problem, config = make_problem("none"), replace(CONFIG, draw_labels=True)
    model, phi, x, y = problem
    stage = meta_generalization_step(model, phi, x, y, config, noise())
    plain = copy.deepcopy(model)
    drawn = stage.y_inner.argmax(-1)
    F.cross_entropy(plain(x), drawn).backward()
    for name, parameter in plain.named_parameters():
        moved = parameter.detach() - config.adapt_lr * parameter.grad
        torch.testing.assert_close(stage.theta_generalized[name], moved)
    found, _ = meta_gradients(model, phi, stage, x, y, config)
    assert all(torch.isfinite(value).all() for value in found.phi.values())
    assert any(value.abs().max() > 0 for value in found.phi.values())


def test_the_label_loss_is_taken_of_the_probabilities_when_labels_are_drawn() -> None:
    problem = make_problem()
    _, drawn = stages_two_and_three(problem, replace(CONFIG, draw_labels=True))
    _, smooth = stages_two_and_three(problem, replace(CONFIG, draw_labels=False))
    torch.testing.assert_close(drawn.label, smooth.label)


def test_a_parameter_that_no_output_depends_on_has_no_gradient() -> None:
    model, phi, x, y = make_problem()
    model.features.register_parameter("spare", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    found, _ = stages_two_and_three(Problem(model, phi, x, y), CONFIG)
    assert not found.theta["features.spare"].any()
