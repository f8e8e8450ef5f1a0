"""TSD against its paper written out again: a list for the memory bank, loops over images and neighbors."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import vicinal.adapters.tsd  # noqa: F401  files the method
from vicinal.adapters.methods import adapt
from vicinal.data.augment import Augment
from vicinal.errors import ConfigError

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CLASSES, LR = 4, 1e-3


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


class SlowTsd:
    """The bank is a list of (entropy, label, feature, prediction)."""

    def __init__(self, source: Any, on_batch: bool, **told: Any) -> None:
        self.model = copy.deepcopy(source.model).train(on_batch)
        defaults = {"per_class": 3, "neighbors": 3, "local_weight": 0.1, "scale": 1.0, "consistent": True}
        self.told = {**defaults, "lr": LR, **told}
        self.bank: list[tuple[float, int, Tensor, Tensor]] = []
        rows = self.model.head.weight.detach().clone()
        self.enter(rows, self.model.head(rows).detach())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.told["lr"])
        self.agreed: list[int] = []

    def enter(self, z: Tensor, logits: Tensor) -> None:
        for feature, said in zip(z, logits, strict=True):
            p = said.softmax(0)
            entropy = -sum(float(v) * math.log(float(v)) for v in p)
            self.bank.append((entropy, int(p.argmax()), feature, p))
        chosen = []
        for k in range(CLASSES):
            mine = sorted((one for one in self.bank if one[1] == k), key=lambda one: one[0])
            chosen += mine if self.told["per_class"] == -1 else mine[: self.told["per_class"]]
        self.bank = chosen

    def loss(self, z: Tensor, logits: Tensor) -> Tensor:
        terms = []
        for i in range(len(z)):
            r = []
            for k in range(CLASSES):
                mine = [feature / feature.norm() for _, label, feature, _ in self.bank if label == k]
                r.append(cosine(z[i], torch.stack(mine).mean(0)) if mine else -torch.ones((), dtype=z.dtype))
            log_r = (self.told["scale"] * torch.stack(r)).log_softmax(0)
            p = logits[i].softmax(0)
            if self.told["consistent"] and int(p.argmax()) != int(log_r.argmax()):
                continue
            term = -sum(float(p[k].detach()) * log_r[k] for k in range(CLASSES))
            near = sorted(self.bank, key=lambda one, i=i: -float(cosine(z[i].detach(), one[2])))[
                : self.told["neighbors"]
            ]
            for _, _, feature, q in near:
                pull = float(cosine(z[i].detach(), feature)) * (p - q).square().sum()
                term = term + self.told["local_weight"] * pull / len(near)
            terms.append(term)
        self.agreed.append(len(terms))
        return sum(terms) / len(terms) if terms else 0 * z.sum()

    def step(self, x: Tensor, steps: int = 1, predict: str = "own", view: Tensor | None = None) -> Tensor:
        for step in range(steps):
            z, logits = self.model.features_and_logits(x if view is None else view)
            before = logits if view is None else self.model(x)
            if step == 0:
                clean = (z, logits) if view is None else self.model.features_and_logits(x)
                self.enter(*(value.detach() for value in clean))
            self.optimizer.zero_grad()
            self.loss(z, logits).backward()
            self.optimizer.step()
        return before.detach() if predict == "before" else self.model(x).detach()


def tsd(source: Any, **told: Any) -> Any:
    return adapt(source, "tsd", **{"per_class": 3, "lr": LR, **told})


def compare(adapter: Any, slow: SlowTsd) -> None:
    for (name, found), wanted in zip(adapter.model.named_parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("kind", ["source", "batch"])
@pytest.mark.parametrize(("steps", "predict"), [(1, "own"), (1, "before"), (2, "own"), (2, "before")])
def test_a_stream_agrees_with_the_slow_reference(
    make_source: Any, images: Any, kind: str, steps: int, predict: str
) -> None:
    source = make_source()
    adapter = tsd(source, statistics=kind, steps=steps, predict=predict)
    slow = SlowTsd(source, kind == "batch")
    counts = (7, 5, 6)
    for seed, count in enumerate(counts):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x), slow.step(x, steps, predict), **CLOSE)
    compare(adapter, slow)
    assert 0 < sum(slow.agreed) < steps * sum(counts)  # the consistency filter has something to do
    moved = zip(slow.model.parameters(), source.model.parameters(), strict=True)
    assert max(float((new - old).detach().abs().max()) for new, old in moved) > LR / 2


@pytest.mark.parametrize(
    "told",
    [
        {"per_class": 1},
        {"per_class": -1},
        {"neighbors": 1},
        {"local_weight": 0.0},
        {"local_weight": 2.0},
        {"scale": 5.0},
        {"consistent": False},
        {"lr": 1e-2},
    ],
)
def test_every_constant_is_what_it_says(make_source: Any, images: Any, told: dict[str, Any]) -> None:
    source = make_source()
    adapter, plain, slow = tsd(source, **told), tsd(source), SlowTsd(source, True, **told)
    differ = False
    for seed, count in enumerate((7, 5, 6)):
        x = images(count, seed)
        found = adapter(x)
        torch.testing.assert_close(found, slow.step(x), **CLOSE)
        differ |= not torch.allclose(found, plain(x), rtol=1e-5, atol=1e-5)
    assert differ


def test_the_bank_holds_the_clean_batch_and_the_gradient_is_of_the_view(
    make_source: Any, images: Any
) -> None:
    source, view = make_source(), Augment(min_scale=0.5)
    adapter, slow = tsd(source, augment=view), SlowTsd(source, True)
    generator = torch.Generator()
    for seed in range(2):
        x = images(6, seed)
        generator.set_state(adapter.generator.get_state())
        seen = view(x, generator)
        torch.testing.assert_close(adapter(x), slow.step(x, view=seen), **CLOSE)


def test_the_defaults(make_source: Any) -> None:
    settings = adapt(make_source(), "tsd").settings
    found = (settings.lr, settings.per_class, settings.neighbors, settings.local_weight, settings.scale)
    assert found == (1e-4, 100, 3, 0.1, 1.0)
    assert (settings.statistics.kind, settings.predict, settings.parameters) == ("batch", "own", "all")
    assert settings.consistent


def test_a_batch_on_which_nobody_agrees_moves_nothing(make_source: Any) -> None:
    adapter = tsd(make_source())
    z = adapter.memory["supports"].clone().requires_grad_()  # each the prototype of its own class
    logits = 5 * torch.eye(CLASSES, dtype=z.dtype)[adapter.memory["labels"]]
    assert adapter._loss(z, logits) > 0
    nobody = logits.roll(1, dims=1).requires_grad_()
    loss = adapter._loss(z, nobody)
    loss.backward()
    assert loss == 0
    assert not z.grad.any()
    assert not nobody.grad.any()


@pytest.mark.parametrize(
    "wrong", [{"neighbors": 0}, {"local_weight": -0.1}, {"scale": 0.0}, {"per_class": 0}]
)
def test_settings_out_of_range_are_refused(make_source: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        adapt(make_source(), "tsd", **wrong)
