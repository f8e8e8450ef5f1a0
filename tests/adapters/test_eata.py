"""EATA against its paper: samples chosen one by one, the penalty inside the loss, torch.optim.SGD."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal.adapters.eata import fisher_information
from vicinal.adapters.methods import METHODS, adapt
from vicinal.checkpoint import load, save
from vicinal.errors import AdapterError, ConfigError

CLOSE = {"rtol": 1e-7, "atol": 1e-7}
PAPER = {"margin": 0.4, "similarity": 0.4, "average": 0.9, "fisher_weight": 2000.0, "lr": 2.5e-4}
OTHER = {"margin": 0.7, "similarity": 0.6, "average": 0.6, "fisher_weight": 300.0, "lr": 1e-2}


class Reference:
    """EATA from scratch; counts what was chosen, unreliable and redundant, and how often nothing was left."""

    def __init__(self, source: Any, on_batch: bool, momentum: float = 0.9, **constants: float) -> None:
        self.model: Any = copy.deepcopy(source.model).train(on_batch)
        self.source = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.extras, self.constants, self.mean = source.extras, constants, None
        layers = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
        values = [value for layer in layers for value in layer.parameters()]
        self.optimizer = torch.optim.SGD(values, lr=constants["lr"], momentum=momentum)
        self.seen = {"chosen": 0, "unreliable": 0, "redundant": 0, "idle": 0}

    def chosen(self, p: Tensor, margin: float) -> list[int]:
        found = []
        for i, row in enumerate(p):
            cosine = 0.0 if self.mean is None else float(row @ self.mean / (row.norm() * self.mean.norm()))
            if -(row * row.log()).sum() >= margin:
                self.seen["unreliable"] += 1
            elif cosine >= self.constants["similarity"]:
                self.seen["redundant"] += 1
            else:
                found.append(i)
        self.seen["chosen"] += len(found)
        return found

    def penalty(self) -> Tensor:
        names = [name for name in self.source if f"fisher.{name}" in self.extras]
        drift = {name: self.model.get_parameter(name) - self.source[name] for name in names}
        terms = [(self.extras[f"fisher.{name}"] * drift[name] ** 2).sum() for name in names]
        return self.constants["fisher_weight"] * sum(terms, torch.zeros(()))

    def step(self, x: Tensor, steps: int = 1, after: bool = False) -> Tensor:
        for _ in range(steps):
            logits = self.model(x)
            p = logits.softmax(1)
            margin = self.constants["margin"] * math.log(p.shape[1])
            found = self.chosen(p.detach(), margin)
            if not found:
                self.seen["idle"] += 1
                continue
            entropies = [-(p[i] * p[i].log()).sum() for i in found]
            weighted = [math.exp(margin - float(value.detach())) * value for value in entropies]
            self.model.zero_grad()
            (sum(weighted) / len(weighted) + self.penalty()).backward()
            self.optimizer.step()
            new, keep = p[found].detach().mean(0), self.constants["average"]
            self.mean = new if self.mean is None else keep * self.mean + (1 - keep) * new
        return self.model(x).detach() if after else logits.detach()


def sharp(source: Any, fisher: bool = True) -> Any:
    """Return the model made surer of itself, with Fisher information of some images."""
    with torch.no_grad():
        for value in source.model.head.parameters():
            value.mul_(3)
    generator = torch.Generator().manual_seed(0)
    if fisher:
        names = [f"fisher.{name}" for name, _ in source.model.named_parameters()]
        values = [torch.rand(v.shape, generator=generator).double() for v in source.model.parameters()]
        source.extras = dict(zip(names, values, strict=True))
    return source


def compare(adapter: Any, reference: Reference, batches: list[Tensor], **step: Any) -> None:
    for x in batches:
        torch.testing.assert_close(adapter(x), reference.step(x, **step), **CLOSE)
    for found, expected in zip(adapter.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("net", ["small", "small_gn"])
def test_the_defaults_are_the_papers(make_source: Any, images: Any, net: str) -> None:
    source = sharp(make_source(backbone=net))
    reference = Reference(source, True, **PAPER)
    compare(adapt(source, "eata"), reference, [images(n, n) for n in (12, 11, 10, 9)])
    assert min(reference.seen["chosen"], reference.seen["unreliable"], reference.seen["redundant"]) > 0
    defaults = METHODS["eata"].defaults
    assert {name: getattr(defaults, name) for name in PAPER} == PAPER
    assert (defaults.optimizer, defaults.momentum, defaults.parameters) == ("sgd", 0.9, "norm")
    assert (defaults.predict, defaults.statistics.kind) == ("before", "batch")


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize("fisher", [True, False])
@pytest.mark.parametrize(("steps", "predict"), [(1, "after"), (2, "before")])
def test_variants_agree(
    make_source: Any, images: Any, kind: str, fisher: bool, steps: int, predict: str
) -> None:
    source = sharp(make_source(), fisher)
    told = {"statistics": kind, "steps": steps, "predict": predict, "momentum": 0.5}
    reference = Reference(source, kind == "batch", momentum=0.5, **OTHER)
    batches = [images(n, n) for n in (12, 11, 10)]
    compare(adapt(source, "eata", **OTHER, **told), reference, batches, steps=steps, after=predict == "after")
    assert min(reference.seen["chosen"], reference.seen["unreliable"], reference.seen["redundant"]) > 0


def test_where_nothing_is_chosen_momentum_rests(make_source: Any, images: Any) -> None:
    source = sharp(make_source())
    strict = {**PAPER, "similarity": 0.01, "lr": 1e-2}  # after the first batch every sample is redundant
    reference = Reference(source, True, **strict)
    adapter = adapt(source, "eata", similarity=0.01, lr=1e-2)
    compare(adapter, reference, [images(12, n) for n in range(3)])
    assert reference.seen["idle"] == 2


@pytest.mark.parametrize("weight", [0.0, 2000.0])
def test_the_penalty_pulls_back_to_the_source(make_source: Any, images: Any, weight: float) -> None:
    source = sharp(make_source())
    told = {"margin": 0.9, "similarity": 2.0, "lr": 1e-4, "momentum": 0.0}
    free = adapt(sharp(make_source(), fisher=False), "eata", **told)
    held = adapt(source, "eata", fisher_weight=weight, **told)
    for n in range(8):
        free(images(12, n))
        held(images(12, n))
    start = nn.utils.parameters_to_vector(source.model.parameters())
    ends = [nn.utils.parameters_to_vector(adapter.model.parameters()) for adapter in (free, held)]
    drift = [float((end - start).detach().norm()) for end in ends]
    assert (drift[1] < 0.7 * drift[0]) == (weight > 0)
    assert (drift[1] == drift[0]) == (weight == 0)


def test_fisher_information_is_the_mean_square_of_batch_gradients(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(17)
    before = copy.deepcopy(source.model.state_dict())
    found = fisher_information(source.model, x.split(6))
    model = copy.deepcopy(source.model).train()
    expected: dict[str, Tensor] = {}
    for batch in (x[:6], x[6:12], x[12:]):
        model.zero_grad()
        logits = model(batch)
        sum(-row.log_softmax(0)[int(row.argmax())] / len(batch) for row in logits).backward()
        for name, layer in model.named_modules():
            if isinstance(layer, nn.BatchNorm2d):
                for part, value in layer.named_parameters():
                    key = f"fisher.{name}.{part}"
                    expected[key] = expected.get(key, 0) + value.grad**2 / 3
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **CLOSE)
    for name, value in source.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(value.grad is None and value.requires_grad for value in source.model.parameters())


def test_fisher_information_travels_in_the_checkpoint(make_source: Any, images: Any, tmp_path: Any) -> None:
    source = make_source()
    source.model.float()
    source.extras = fisher_information(source.model, images(8).float().split(4))
    save(tmp_path / "model.safetensors", source)
    adapter = adapt(load(tmp_path), "eata")
    assert len(adapter.penalised) == len(source.extras) > 0
    assert not any("fisher" in name or "start" in name for name in adapter.state_dict())


def test_wrong_input_is_refused(make_source: Any, images: Any) -> None:
    source = sharp(make_source())
    name = next(name for name, m in source.model.named_modules() if isinstance(m, nn.BatchNorm2d))
    source.extras[f"fisher.{name}.weight"] = torch.ones(3)
    with pytest.raises(AdapterError, match="another shape"):
        adapt(source, "eata")
    with pytest.raises(AdapterError, match="at least one batch"):
        fisher_information(source.model, [])
    with pytest.raises(AdapterError, match="no parameters"):
        fisher_information(make_source(backbone="small_none").model, [images(4)])
    for wrong in ({"margin": 0.0}, {"similarity": 0.0}, {"average": 1.0}, {"fisher_weight": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            adapt(make_source(), "eata", **wrong)
