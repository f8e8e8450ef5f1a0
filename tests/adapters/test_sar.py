"""SAR against its paper: the climb and the descent by hand, reliable samples one by one, torch.optim.SGD."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.sar  # noqa: F401  registers the method
from vicinal.adapters.methods import METHODS, adapt
from vicinal.adapters.snapshots import scale_step
from vicinal.errors import AdapterError, ConfigError

CLOSE = {"rtol": 1e-7, "atol": 1e-7}
PAPER = {"margin": 0.4, "rho": 0.05, "recovery": 0.2, "average": 0.9, "lr": 2.5e-4}
OTHER = {"margin": 0.8, "rho": 0.4, "recovery": 0.45, "average": 0.5, "lr": 2e-2}


class Reference:
    """SAR from scratch; counts recoveries, samples left out at first and samples lost by the climb."""

    def __init__(self, model: nn.Module, on_batch: bool, momentum: float = 0.9, **constants: float) -> None:
        self.model: Any = copy.deepcopy(model).train(on_batch)
        self.source, self.on_batch = copy.deepcopy(model.state_dict()), on_batch
        self.momentum, self.constants = momentum, constants
        self.seen = {"unreliable": 0, "lost": 0, "recoveries": 0, "nothing": 0}
        self.average: float | None = None
        self.start()

    def start(self) -> None:
        layers = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
        self.values = [value for layer in layers for value in layer.parameters()]
        self.optimizer = torch.optim.SGD(self.values, lr=self.constants["lr"], momentum=self.momentum)

    def gradient(self, entropies: list[Tensor], logits: Tensor) -> float:
        loss = sum(entropies) / len(entropies) if entropies else 0 * logits.sum()
        self.model.zero_grad()
        loss.backward()
        return float(loss.detach())

    def step(self, x: Tensor, steps: int = 1, after: bool = False) -> Tensor:
        for _ in range(steps):
            logits = self.model(x)
            margin = self.constants["margin"] * math.log(logits.shape[1])
            entropies = [-(row.softmax(0) * row.log_softmax(0)).sum() for row in logits]
            reliable = [i for i in range(len(x)) if entropies[i] < margin]
            self.gradient([entropies[i] for i in reliable], logits)
            length = math.sqrt(sum(float((value.grad**2).sum()) for value in self.values))
            old = [value.detach().clone() for value in self.values]
            with torch.no_grad():
                for value in self.values:
                    value += self.constants["rho"] * value.grad / (length + 1e-12)
            second = self.model(x)
            entropies = [-(row.softmax(0) * row.log_softmax(0)).sum() for row in second]
            still = [i for i in reliable if entropies[i] < margin]
            loss = self.gradient([entropies[i] for i in still], second)
            with torch.no_grad():
                for value, where in zip(self.values, old, strict=True):
                    value.copy_(where)
            self.optimizer.step()
            self.count(len(x), len(reliable), len(still))
            if still:
                keep = self.constants["average"]
                self.average = loss if self.average is None else keep * self.average + (1 - keep) * loss
            if self.average is not None and self.average < self.constants["recovery"]:
                self.recover()
        return self.model(x).detach() if after else logits.detach()

    def count(self, images: int, reliable: int, still: int) -> None:
        self.seen["unreliable"] += images - reliable
        self.seen["lost"] += reliable - still
        self.seen["nothing"] += reliable == 0

    def recover(self) -> None:
        self.seen["recoveries"] += 1
        self.model.load_state_dict(self.source)
        self.average = None
        self.start()


def sharp(source: Any, factor: float = 3.0) -> Any:
    """Return the model made surer of itself."""
    with torch.no_grad():
        for value in source.model.head.parameters():
            value.mul_(factor)
    return source


def compare(adapter: Any, reference: Reference, batches: list[Tensor], **step: Any) -> None:
    for x in batches:
        torch.testing.assert_close(adapter(x), reference.step(x, **step), **CLOSE)
    for found, expected in zip(adapter.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    told = -1.0 if reference.average is None else reference.average
    assert float(adapter.loss_average) == pytest.approx(told, abs=1e-9)


@pytest.mark.parametrize("net", ["small", "small_gn", "small_ln"])
def test_the_defaults_are_the_papers(make_source: Any, images: Any, net: str) -> None:
    source = sharp(make_source(backbone=net), 2.5)
    reference = Reference(source.model, True, **PAPER)
    compare(adapt(source, "sar"), reference, [images(n, n) for n in (12, 11, 10, 9)])
    assert reference.seen["unreliable"] > 0
    defaults = METHODS["sar"].defaults
    assert {name: getattr(defaults, name) for name in PAPER} == PAPER
    assert (defaults.optimizer, defaults.momentum, defaults.parameters) == ("sgd", 0.9, "norm")
    assert (defaults.predict, defaults.statistics.kind, defaults.exclude) == ("before", "batch", None)


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize(("steps", "predict"), [(1, "after"), (2, "before")])
def test_variants_agree_through_recoveries(
    make_source: Any, images: Any, kind: str, steps: int, predict: str
) -> None:
    source = sharp(make_source())
    reference = Reference(source.model, kind == "batch", momentum=0.5, **OTHER)
    adapter = adapt(source, "sar", statistics=kind, steps=steps, predict=predict, momentum=0.5, **OTHER)
    batches = [images(10, n) for n in range(8)]
    compare(adapter, reference, batches, steps=steps, after=predict == "after")
    assert reference.seen["unreliable"] > 0
    assert 0 < reference.seen["recoveries"] < steps * len(batches)


def test_samples_that_the_climb_makes_unreliable_do_not_count(make_source: Any, images: Any) -> None:
    source = sharp(make_source(), 2.0)
    told = {**PAPER, "rho": 2.0, "lr": 1e-2, "recovery": 0.0}
    reference = Reference(source.model, True, **told)
    compare(adapt(source, "sar", **told), reference, [images(12, n) for n in range(4)])
    assert reference.seen["lost"] > 0


def test_where_no_sample_is_reliable_only_momentum_goes_on(make_source: Any, images: Any) -> None:
    source = sharp(make_source(), 2.0)
    unsure = images(1, 5).expand(6, -1, -1, -1) * 0 + 0.5  # alike: batch statistics leave nothing to see
    told = {**PAPER, "margin": 0.5, "lr": 1e-2, "recovery": 0.0}
    adapter, reference = adapt(source, "sar", **told), Reference(source.model, True, **told)
    compare(adapter, reference, [images(12, 1), unsure])
    assert reference.seen["nothing"] == 1
    fresh = adapt(source, "sar", **told)
    fresh(unsure)
    for found, start in zip(fresh.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, start)


def test_a_collapsed_model_is_the_source_again_and_the_stream_goes_on(make_source: Any, images: Any) -> None:
    source = sharp(make_source(), 50.0)  # as sure of everything as a collapsed one
    adapter = adapt(source, "sar", margin=0.9, recovery=0.5, seed=3)
    before = adapter.generator.get_state()
    torch.rand(3, generator=adapter.generator)
    random = adapter.generator.get_state()
    for count in (1, 2):
        adapter(images(6, count))
        assert adapter.steps_taken == count
        for found, start in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
            assert torch.equal(found, start)
    assert torch.equal(adapter.generator.get_state(), random)
    assert not torch.equal(random, before)
    assert float(adapter.loss_average) == -1
    assert not adapter.optimizer.state


def test_what_was_made_of_its_steps_stays_through_a_recovery(make_source: Any, images: Any) -> None:
    """Steps that a guard has shortened are not long again, nor those that a horizon shortens."""
    adapter = adapt(sharp(make_source(), 50.0), "sar", margin=0.9, recovery=0.5, horizon=20.0)
    full = adapter.optimizer.param_groups[0]["lr"]
    scale_step(adapter, 0.5)
    for count in (1, 2):
        adapter(images(6, count))
        assert adapter.optimizer.param_groups[0]["lr"] == full / 2
        assert float(adapter.step_share()) == pytest.approx(20 / (20 + 6 * count))
    assert float(adapter.loss_average) == -1, "it has recovered"


def test_excluded_layers_stay(make_source: Any, images: Any) -> None:
    source = sharp(make_source())
    names = [name for name, m in source.model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    adapter = adapt(source, "sar", margin=0.9, lr=0.1, recovery=0.0, exclude=(names[-1],))
    adapter(images(8))
    for name in names:
        same = torch.equal(adapter.model.get_submodule(name).bias, source.model.get_submodule(name).bias)
        assert same == (name == names[-1])
    with pytest.raises(AdapterError, match="'layer4', which is no layer"):
        adapt(source, "sar", exclude=("layer4",))
    with pytest.raises(AdapterError, match="nothing to update"):
        adapt(source, "sar", exclude=("features",))


class Staged(nn.Module):
    """A net whose layers are called as a ResNet's, a ViT's or nobody's are."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            *above, last = name.split(".")
            owner: Any = self
            for part in above:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.add_module(last, nn.GroupNorm(1, 3))
        self.names = names
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("names", "moving"),
    [
        (("bn1", "layer1.bn", "layer4.bn", "layer4.bn2"), {"bn1", "layer1.bn"}),
        (
            ("blocks.0.norm", "blocks.8.norm", "blocks.9.norm", "blocks.11.norm", "norm"),
            {"blocks.0.norm", "blocks.8.norm"},
        ),
        (("stages.norm", "stages.blocks.9", "pre_norm"), {"stages.norm", "stages.blocks.9", "pre_norm"}),
        (("norm",), {"norm"}),
    ],
)
def test_the_last_layers_stay_where_the_authors_leave_them_out(
    names: tuple[str, ...], moving: set[str]
) -> None:
    adapter = adapt(Staged(*names), "sar")
    updated = {id(value) for value in adapter.optimizer.param_groups[0]["params"]}
    layers = {name: adapter.model.get_submodule(f"net.{name}") for name in names}
    assert {name for name, layer in layers.items() if id(layer.weight) in updated} == moving
    assert all(layer.weight.requires_grad == (name in moving) for name, layer in layers.items())
    everything = adapt(Staged(*names), "sar", exclude=())
    assert len(everything.optimizer.param_groups[0]["params"]) == 2 * len(names)


def test_constants_out_of_range_are_refused(make_source: Any) -> None:
    for wrong in ({"margin": 0.0}, {"rho": -1.0}, {"recovery": -0.1}, {"average": 1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            adapt(make_source(), "sar", **wrong)
