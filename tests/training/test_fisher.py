"""The Fisher information that training stores for `eata`, against gradients taken one batch at a time."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters  # noqa: F401  files the methods
from vicinal.adapters.methods import adapt
from vicinal.checkpoint import Trained, load, save
from vicinal.data.domains import SourceDomain
from vicinal.training.config import TrainConfig
from vicinal.training.fisher import validation_fisher
from vicinal.training.learner import ALGORITHMS
from vicinal.training.train import ModelSpec, derived_seed, train_model

MakeSources = Callable[..., list[SourceDomain]]
CLOSE = {"rtol": 1e-4, "atol": 1e-9}
CONFIG = TrainConfig(iterations=4, batch_size=5, group_size=4, num_samples=2, validate_every=2)
SURE_OF_ALL = {"margin": 2.0, "similarity": 2.0, "lr": 1e-2, "momentum": 0.9, "fisher_weight": 1e6}


def slow_fisher(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return the mean over batches of squared gradients of the scale and shift of every norm layer."""
    found: dict[str, Tensor] = {}
    for x in batches:
        net = copy.deepcopy(model).train()
        rows = net(x)
        sum(-row.log_softmax(0)[int(row.argmax())] / len(x) for row in rows).backward()
        for name, layer in net.named_modules():
            if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
                for part, value in layer.named_parameters():
                    key = f"fisher.{name}.{part}"
                    found[key] = found.get(key, 0) + value.grad**2 / len(batches)
    return found


def validation_images(sources: list[SourceDomain], seed: int) -> Tensor:
    """Return the validation images of all sources in the order that the seed draws."""
    images = torch.cat([source.val.images for source in sources]).float() / 255
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(derived_seed(seed, "fisher")))
    return images[order]


def of_fisher(trained: Trained) -> dict[str, Tensor]:
    return {name: value for name, value in trained.extras.items() if name.startswith("fisher.")}


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("backbone", ["small", "small_gn"])
def test_every_training_stores_what_its_validation_images_say(
    algorithm: str, backbone: str, spec: ModelSpec, make_sources: MakeSources, make_run: Any
) -> None:
    sources, config = make_sources(), replace(CONFIG, algorithm=algorithm, seed=3)
    trained = train_model(replace(spec, backbone=backbone), sources, config, make_run(), {})
    batches = list(validation_images(sources, 3).split(2 * CONFIG.batch_size))
    assert [len(x) for x in batches] == [10, 10, 4]
    found, expected = of_fisher(trained), slow_fisher(trained.model, batches)
    assert found.keys() == expected.keys()
    assert len(found) == 6
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **CLOSE)
        assert value.max() > 0


def test_no_more_images_than_the_authors_take(
    spec: ModelSpec, make_sources: MakeSources, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vicinal.training.fisher.FISHER_IMAGES", 7)
    monkeypatch.setattr("vicinal.training.fisher.FISHER_BATCH", 4)
    sources = make_sources()
    trained = train_model(spec, sources, replace(CONFIG, algorithm="erm"), make_run(), {})
    expected = slow_fisher(trained.model, list(validation_images(sources, 0)[:7].split(4)))
    for name, value in expected.items():
        torch.testing.assert_close(trained.extras[name], value, **CLOSE)


def test_it_draws_from_no_generator_but_its_own_and_leaves_the_model_alone(
    spec: ModelSpec, make_sources: MakeSources, make_run: Any
) -> None:
    sources = make_sources()
    trained = train_model(spec, sources, replace(CONFIG, algorithm="erm"), make_run(), {})
    trained.model.zero_grad()
    before, random = copy.deepcopy(trained.model.state_dict()), torch.random.get_rng_state()
    first = validation_fisher(trained.model, sources, 10, seed=1)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in trained.model.state_dict().items())
    assert not trained.model.training
    assert all(value.grad is None and value.requires_grad for value in trained.model.parameters())
    again = validation_fisher(trained.model, sources, 10, seed=1)
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def slow_eata(trained: Trained, batches: list[Tensor], fisher: dict[str, Tensor]) -> tuple[nn.Module, Tensor]:
    """Return the model and its last logits where every sample is chosen, entropies and penalty by hand."""
    model = copy.deepcopy(trained.model).train()
    norm = {name: value for name, value in model.named_parameters() if f"fisher.{name}" in of_fisher(trained)}
    start = {name: value.detach().clone() for name, value in norm.items()}
    optimizer = torch.optim.SGD(norm.values(), lr=SURE_OF_ALL["lr"], momentum=SURE_OF_ALL["momentum"])
    logits = torch.empty(0)
    for x in batches:
        logits = model(x)
        margin = SURE_OF_ALL["margin"] * math.log(logits.shape[1])
        entropies = [-(row.softmax(0) * row.log_softmax(0)).sum() for row in logits]
        loss = sum(math.exp(margin - float(value.detach())) * value for value in entropies) / len(x)
        for name, value in norm.items():
            information = fisher.get(f"fisher.{name}", torch.zeros_like(value))
            loss = loss + SURE_OF_ALL["fisher_weight"] * (information * (value - start[name]) ** 2).sum()
        model.zero_grad()
        loss.backward()
        optimizer.step()
    return model, logits.detach()


def test_eata_uses_what_was_stored_and_goes_without_where_nothing_was(
    spec: ModelSpec, make_sources: MakeSources, make_run: Any, tmp_path: Path
) -> None:
    trained = train_model(spec, make_sources(), replace(CONFIG, algorithm="erm"), make_run(), {})
    save(tmp_path / "model.safetensors", trained)
    with_it, without = load(tmp_path), replace(load(tmp_path), extras={})
    x = make_sources(seed=5)[2].train.images.float() / 255
    batches, moved = [x[:8], x[8:16], x[16:]], []
    for source, fisher in ((with_it, of_fisher(trained)), (without, {})):
        adapter = adapt(source, "eata", **SURE_OF_ALL)
        logits = [adapter(batch) for batch in batches][-1]
        model, expected = slow_eata(trained, batches, fisher)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for value, wanted in zip(adapter.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
        moved.append(nn.utils.parameters_to_vector(adapter.model.parameters()).detach())
    assert (moved[0] - moved[1]).abs().max() > 1e-3


def test_nets_that_have_none_are_trained_and_adapted_all_the_same(
    spec: ModelSpec, make_sources: MakeSources, make_run: Any
) -> None:
    bald = train_model(
        replace(spec, backbone="small_none"),
        make_sources(),
        replace(CONFIG, algorithm="erm"),
        make_run(),
        {},
    )
    assert bald.extras == {}
    x = make_sources(seed=5)[0].train.images[:6].float() / 255
    assert adapt(bald, "eata", parameters="all", margin=2.0)(x).isfinite().all()
    bare = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    adapter = adapt(nn.Sequential(bare, nn.Linear(4, 3)), "eata", margin=2.0)
    assert adapter(x).shape == (6, 3)
    assert adapter.penalised == ()
