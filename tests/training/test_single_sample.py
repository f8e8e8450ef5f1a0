"""The algorithm `single_sample`: one step against its loss written out again, and a training to its end."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy

import vicinal.adapters.single_sample  # noqa: F401  files the method
from vicinal.adapters.methods import adapt
from vicinal.checkpoint import load
from vicinal.data.episodes import Batch
from vicinal.models.backbones import build_classifier, preprocessing_for
from vicinal.training.algorithms.single_sample import SINGLE_SAMPLE, single_sample_step
from vicinal.training.config import TrainConfig
from vicinal.training.learner import make_learner
from vicinal.training.loop import StoppedError
from vicinal.training.train import train, train_model

CLASSES = 3


def batch(count: int, classes: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, generator=generator, dtype=torch.float64)
    return Batch(x, torch.randint(classes, (count,), generator=generator))


def random_learner(**told: Any) -> Any:
    config = TrainConfig("single_sample", **{"num_samples": 2, **told})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        preprocessing = preprocessing_for("small", channels=1, size=8)
        model = build_classifier("small", CLASSES, preprocessing=preprocessing).double()
        learner = make_learner(model, None, SINGLE_SAMPLE, config, seed=1)
        learner.auxiliary.double()
        for layer in (learner.auxiliary.mean, learner.auxiliary.log_std):
            torch.nn.init.normal_(layer.weight, std=0.1)
    model.train()
    return learner


def slow_terms(
    model: Any, net: Any, batches: tuple[Batch, Batch], config: TrainConfig, noise: Any
) -> dict[str, Tensor]:
    (x_source, y_source), (x, y) = batches
    source = cross_entropy(model(x_source), y_source, label_smoothing=config.label_smoothing)
    z, rows, bias = model.embed(x), model.head.weight, model.head.bias
    first = torch.cat([net.read_feature.weight, net.read_row.weight], 1)

    def generate(merged: Tensor, row: Tensor) -> Normal:
        read = torch.relu(net.trunk(merged))
        return Normal(row + net.mean(read), net.log_std(read).exp())

    def of_image(i: int, c: int) -> Normal:
        pair = torch.cat([z[i], rows[c]])
        return generate(net.merge(torch.relu(first @ pair + net.read_feature.bias)), rows[c])

    def of_class(c: int) -> Normal:
        own = generate(z[y == c].mean(0) if (y == c).any() else torch.zeros_like(z[0]), rows[c])
        return own if (y == c).any() else Normal(rows[c], own.stddev)

    def classify(w: Any) -> Tensor:
        drawn = torch.randn(config.num_samples, len(x), CLASSES, generator=noise, dtype=z.dtype)
        losses = []
        for s in range(config.num_samples):
            for i in range(len(x)):
                spread = [(z[i] * w(i, c).stddev).square().sum().sqrt() for c in range(CLASSES)]
                logits = [z[i] @ w(i, c).mean + bias[c] + spread[c] * drawn[s, i, c] for c in range(CLASSES)]
                losses.append(cross_entropy(torch.stack(logits), y[i]))
        return torch.stack(losses).mean()

    sample, domain = classify(of_image), classify(lambda i, c: of_class(c))
    present = [c for c in range(CLASSES) if (y == c).any()]
    kl = sum(kl_divergence(of_image(i, c), of_class(c)).sum() for i in range(len(x)) for c in present)
    return {"source": source, "sample": sample, "domain": domain, "kl": 1e-5 * config.kl_weight * kl}


@pytest.mark.parametrize("told", [{}, {"kl_weight": 500.0}, {"label_smoothing": 0.0, "num_samples": 1}])
def test_steps_agree_with_the_loss_written_out(told: dict[str, Any]) -> None:
    learner = random_learner(**told)
    config, model, net = learner.config, copy.deepcopy(learner.model), copy.deepcopy(learner.auxiliary)
    groups = [
        {"params": model.features.parameters(), "lr": config.backbone_lr},
        {"params": model.head.parameters(), "lr": config.head_lr},
        {"params": net.parameters(), "lr": config.phi_lr},
    ]
    optimizer, noise = torch.optim.Adam(groups), torch.Generator().manual_seed(1)
    for seed in range(2):
        batches = batch(6, CLASSES, seed), batch(5, CLASSES - 1, seed + 10)  # a class is absent
        expected = slow_terms(model, net, batches, config, noise)
        found = single_sample_step(learner, batches)
        assert found.keys() == expected.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name].detach(), rtol=1e-6, atol=1e-8)
        optimizer.zero_grad()
        sum(expected.values()).backward()
        optimizer.step()
    for one, other in ((learner.model, model), (learner.auxiliary, net)):
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


def test_a_training_ends_in_a_checkpoint_that_the_adapter_reads(
    make_sources: Any, spec: Any, tmp_path: Path
) -> None:
    config = TrainConfig("single_sample", iterations=12, batch_size=8, validate_every=6)
    trained = train(spec, make_sources(), config, folder=tmp_path)
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    logits = adapt(trained, "single_sample")(x)
    assert (logits - adapt(trained, "erm")(x)).abs().max() > 1e-4
    assert torch.equal(adapt(load(tmp_path), "single_sample")(x), logits)
    again = train(spec, make_sources(), config)
    assert torch.equal(adapt(again, "single_sample")(x), logits)


def test_a_training_that_was_stopped_goes_on_to_the_same_result(
    make_sources: Any, spec: Any, make_run: Any, tmp_path: Path
) -> None:
    config = TrainConfig("single_sample", iterations=8, batch_size=8, validate_every=4, save_every=2)
    whole = train_model(spec, make_sources(), config, make_run(), {})
    with pytest.raises(StoppedError):
        train_model(spec, make_sources(), config, make_run(tmp_path, halt=("single_sample", 4)), {})
    resumed = train_model(spec, make_sources(), config, make_run(tmp_path, resume=True), {})
    assert whole.extras.keys() == resumed.extras.keys()
    assert all(torch.equal(whole.extras[name], resumed.extras[name]) for name in whole.extras)
