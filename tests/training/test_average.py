"""Averaged weights against a plain mean of the weights on the way, and the statistics that go with them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal.data.domains import SourceDomain
from vicinal.training import average
from vicinal.training.average import average_of, averages, take_average
from vicinal.training.config import TrainConfig
from vicinal.training.train import ModelSpec, Run, train_model, untrained

MakeSources = Callable[..., list[SourceDomain]]
MakeRun = Callable[..., Run]
CONFIG = TrainConfig(algorithm="erm", iterations=45, batch_size=6, average=0.6, validate_every=8)


@pytest.mark.parametrize(
    ("share", "iterations", "taken"),
    [
        (0.3, 100, [80, 90, 100]),
        (1.0, 25, [10, 20, 25]),
        (0.01, 100, [100]),
        (0.5, 7, [7]),
    ],
)
def test_weights_of_the_last_share_are_taken_and_the_last_ones_always(
    share: float, iterations: int, taken: list[int]
) -> None:
    config = TrainConfig(average=share, iterations=iterations)
    assert [i for i in range(1, iterations + 1) if averages(config, i)] == taken


@pytest.mark.parametrize("algorithm", ["erm", "meta"])
def test_a_trained_model_has_the_mean_of_the_weights_on_the_way(
    algorithm: str,
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[Tensor]] = []
    plain = average.AveragedModel.update_parameters

    def noted(self: Any, nets: nn.Module) -> None:
        seen.append([value.detach().clone() for value in nets.parameters()])
        plain(self, nets)

    monkeypatch.setattr(average.AveragedModel, "update_parameters", noted)
    config = replace(CONFIG, algorithm=algorithm)
    trained = train_model(spec, make_sources(), config, make_run(), {})
    assert len(seen) == 4  # 20, 30, 40 and 45
    assert not torch.equal(seen[0][0], seen[-1][0])
    nets = [trained.model, trained.phi] if trained.phi is not None else [trained.model]
    found = [value for net in nets for value in net.parameters()]
    for value, *steps in zip(found, *seen, strict=True):
        torch.testing.assert_close(value, torch.stack(steps).mean(0), rtol=1e-5, atol=1e-6)
    assert trained.provenance["selected_iteration"] == 45
    assert trained.provenance["validation_accuracy"] is not None


def test_statistics_are_those_of_training_images_under_the_averaged_weights(
    spec: ModelSpec, make_sources: MakeSources
) -> None:
    """One batch holds all there is: its moments are the statistics."""
    sources = make_sources(3, train=8)
    model, phi = untrained(spec, CONFIG, torch.device("cpu"))
    mean = average_of({"model": model, "phi": phi})
    for scale in (1.0, 3.0):
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(scale)
        mean.update_parameters(nn.ModuleDict({"model": model, "phi": phi}))
    take_average(mean, {"model": model, "phi": phi}, sources, batch=24)
    assert not model.training
    first = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
    fed: list[Tensor] = []
    handle = first.register_forward_pre_hook(lambda module, given: fed.append(given[0]))
    model(torch.cat([source.train.images[torch.arange(8)] for source in sources]).float() / 255)
    handle.remove()
    torch.testing.assert_close(first.running_mean, fed[0].mean(dim=(0, 2, 3)))
    torch.testing.assert_close(first.running_var, fed[0].var(dim=(0, 2, 3)))


@pytest.mark.parametrize(("limit", "expected"), [(1000, 3), (17, 2)])
def test_batches_of_statistics_have_every_domain_in_equal_parts_and_stay_within_a_limit(
    make_sources: MakeSources, monkeypatch: pytest.MonkeyPatch, limit: int, expected: int
) -> None:
    """The smallest domain has seven images: two a batch, and the last is left over."""
    monkeypatch.setattr(average, "SETTLING", limit)
    sources = [*make_sources(2, train=24), *make_sources(3, train=7)[2:]]
    batches = list(average._mixed(sources, 6, torch.device("cpu")))
    assert [len(batch) for batch in batches] == [6] * expected
    own = [{bytes(image.numpy().tobytes()) for image in source.train.images[:]} for source in sources]
    for batch in batches:
        pixels = [bytes((image * 255).round().to(torch.uint8).numpy().tobytes()) for image in batch]
        assert [sum(image in domain for image in pixels) for domain in own] == [2, 2, 2]


@pytest.mark.parametrize(("train", "batch", "sizes"), [(7, 6, [6]), (3, 8, [3]), (1, 8, [1])])
def test_one_domain_makes_no_short_batch(
    make_sources: MakeSources, train: int, batch: int, sizes: list[int]
) -> None:
    made = average._mixed(make_sources(1, train=train), batch, torch.device("cpu"))
    assert [len(part) for part in made] == sizes


def test_a_net_without_such_layers_is_just_averaged(make_sources: MakeSources) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    mean = average_of({"model": net})
    mean.update_parameters(nn.ModuleDict({"model": net}))
    before = net[1].weight.clone()
    take_average(mean, {"model": net}, make_sources(2), batch=8)
    assert torch.equal(net[1].weight, before)
