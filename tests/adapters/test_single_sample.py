"""Single-sample generalization against its formula, image by image and class by class."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.single_sample  # noqa: F401  files the method
from vicinal.adapters.methods import adapt
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError
from vicinal.models.auxiliary import as_extras
from vicinal.models.single_sample import SampleInferenceNet
from vicinal.types import Head

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def with_net(source: Trained, hidden: int = 12) -> tuple[Trained, SampleInferenceNet]:
    """Return the source with a net that is off its starting point, in the checkpoint's precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = SampleInferenceNet(source.model.head.in_features, hidden)
        for layer in (net.mean, net.log_std):
            nn.init.normal_(layer.weight, std=0.1)
    source.extras = as_extras("single_sample", net)
    return source, copy.deepcopy(net).double()


def row_for(net: Any, z: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and spread of one generated row."""
    first = torch.cat([net.read_feature.weight, net.read_row.weight], 1)
    merged = net.merge(torch.relu(first @ torch.cat([z, row]) + net.read_feature.bias))
    read = torch.relu(net.trunk(merged))
    return row + net.mean(read), net.log_std(read).exp()


@pytest.mark.parametrize("kind", ["source", "batch"])
def test_a_stream_agrees_with_the_slow_reference(make_source: Any, images: Any, kind: str) -> None:
    source, net = with_net(make_source())
    adapter = adapt(source, "single_sample", statistics=kind)
    model = copy.deepcopy(source.model).train(kind == "batch")
    for seed, count in enumerate((6, 1, 4) if kind == "source" else (6, 4)):
        x = images(count, seed)
        z = model.embed(x)
        expected = torch.zeros(count, 4, dtype=z.dtype)
        for i in range(count):
            for c in range(4):
                mean, _ = row_for(net, z[i], model.head.weight[c])
                expected[i, c] = z[i] @ mean + model.head.bias[c]
        found = adapter(x)
        torch.testing.assert_close(found, expected.detach(), **CLOSE)
        assert (found - model.head(z)).abs().max() > 0.03
    for found, wanted in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_draws_share_their_noise_over_the_images_of_a_batch(make_source: Any, images: Any) -> None:
    source, net = with_net(make_source())
    adapter, x = adapt(source, "single_sample", num_samples=3, seed=4), images(5)
    noise = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    z, expected = source.model.embed(x), torch.zeros(5, 4, dtype=torch.float64)
    for i in range(5):
        for s in range(3):
            logits = []
            for c in range(4):
                mean, std = row_for(net, z[i], source.model.head.weight[c])
                spread = (z[i].square() * std.square()).sum().sqrt()
                logits.append(z[i] @ mean + source.model.head.bias[c] + spread * noise[s, 0, c])
            expected[i] += torch.stack(logits).softmax(0) / 3
    torch.testing.assert_close(adapter(x).exp(), expected.detach(), **CLOSE)


def test_images_do_not_see_one_another_and_the_mean_predicts(make_source: Any, images: Any) -> None:
    source, _ = with_net(make_source())
    adapter, x = adapt(source, "single_sample"), images(6)
    together = adapter(x)
    alone = torch.cat([adapter(image[None]) for image in x])
    torch.testing.assert_close(together, alone, **CLOSE)
    assert (adapter.settings.num_samples, adapter.settings.statistics.kind) == (0, "source")
    assert torch.equal(adapt(source, "single_sample", seed=9)(x), together)


def test_a_fresh_net_leaves_the_model_as_it_is(make_source: Any, images: Any) -> None:
    source = make_source()
    source.extras = as_extras("single_sample", SampleInferenceNet(source.model.head.in_features))
    x = images(5)
    torch.testing.assert_close(adapt(source, "single_sample")(x), source.model(x).detach(), **CLOSE)


def test_an_absent_class_of_a_domain_keeps_its_row(make_source: Any) -> None:
    source, net = with_net(make_source())
    head = Head(source.model.head.weight.detach(), source.model.head.bias.detach())
    means, present = torch.ones_like(head.weight), torch.tensor([True, False, True, True])
    w = net.of_domain(means, present, head)
    read = torch.relu(net.trunk(means[0]))
    torch.testing.assert_close(w.mean[0], head.weight[0] + net.mean(read))
    torch.testing.assert_close(w.std[0], net.log_std(read).exp())
    assert torch.equal(w.mean[1], head.weight[1])


def test_a_model_that_was_not_trained_for_it_is_refused_with_a_way_out(make_source: Any) -> None:
    with pytest.raises(AdapterError, match="--algorithm single_sample"):
        adapt(make_source(), "single_sample")


def test_a_net_of_another_model_is_refused(make_source: Any) -> None:
    source = make_source()
    source.extras = as_extras("single_sample", SampleInferenceNet(source.model.head.in_features + 1))
    with pytest.raises(AdapterError, match="different trainings"):
        adapt(source, "single_sample")
