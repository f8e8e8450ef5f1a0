"""RoTTA against the paper written out again: lists of images for each class, normalization by hand."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.rotta  # noqa: F401  registers the method
from vicinal.adapters.methods import adapt
from vicinal.data.augment import Augment
from vicinal.errors import ConfigError

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
VIEW = Augment(0.81, 1.0, flip=True, brightness=0.4, contrast=0.3, saturation=0.5, hue=0.06)
AUTHORS = {"capacity": 64, "every": 64, "nu": 0.001, "alpha": 0.05, "lr": 1e-3, "ages": 1.0, "doubts": 1.0}


class Robust(nn.Module):
    """BatchNorm on a slow average that each pass in training mode moves and runs on."""

    def __init__(self, layer: nn.BatchNorm2d, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.alpha = layer.weight, layer.bias, layer.eps, alpha
        self.mean, self.var = layer.running_mean.clone(), layer.running_var.clone()

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            own = x.transpose(0, 1).flatten(1)
            mean = (1 - self.alpha) * mean + self.alpha * own.mean(1)
            var = (1 - self.alpha) * var + self.alpha * own.var(1, correction=0)
            self.mean, self.var = mean.detach(), var.detach()
        y = (x - mean[:, None, None]) / (var + self.eps).sqrt()[:, None, None]
        return y * self.weight[:, None, None] + self.bias[:, None, None]


def robust(module: nn.Module, alpha: float) -> Any:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, Robust(child, alpha))
        else:
            robust(child, alpha)
    return module


class SlowMemory:
    def __init__(self, told: dict[str, Any], classes: int = 4) -> None:
        self.told, self.classes = told, classes
        self.lists: list[list[dict[str, Any]]] = [[] for _ in range(classes)]
        self.evicted = self.refused = 0

    def score(self, item: dict[str, Any]) -> float:
        old = 1 / (1 + math.exp(-item["age"] / self.told["capacity"]))
        return self.told["ages"] * old + self.told["doubts"] * item["doubt"] / math.log(self.classes)

    def add(self, image: Tensor, label: int, doubt: float) -> None:
        new = {"image": image, "age": 0, "doubt": doubt}
        if self.room(label, self.score(new)):
            self.lists[label].append(new)
        for item in (item for each in self.lists for item in each):
            item["age"] += 1

    def room(self, label: int, score: float) -> bool:
        counts = [len(each) for each in self.lists]
        if counts[label] < self.told["capacity"] / self.classes:
            if sum(counts) < self.told["capacity"]:
                return True
            classes = [c for c in range(self.classes) if counts[c] == max(counts)]
        else:
            classes = [label]
        worst = max(self.score(item) for c in classes for item in self.lists[c])
        if worst <= score:
            self.refused += 1
            return False
        at = [(c, i) for c in classes for i, item in enumerate(self.lists[c]) if self.score(item) == worst]
        c, i = at[-1]
        del self.lists[c][i]
        self.evicted += 1
        return True


class SlowRotta:
    """With alpha None, BatchNorm runs on the batch (or the memory) alone."""

    def __init__(self, source: Any, **told: Any) -> None:
        self.told = AUTHORS | {"augment": VIEW, "parts": "norm"} | told
        alpha = self.told["alpha"]
        self.student, self.teacher = (
            copy.deepcopy(source.model) if alpha is None else robust(copy.deepcopy(source.model), alpha)
            for _ in range(2)
        )
        norms = [m for m in self.student.modules() if isinstance(m, Robust | nn.BatchNorm2d)]
        moving = [value for layer in norms for value in (layer.weight, layer.bias)]
        self.rule = torch.optim.Adam(moving, lr=self.told["lr"])
        self.memory, self.seen = SlowMemory(self.told), 0
        self.generator = torch.Generator().manual_seed(0)
        self.updates = 0

    def step(self, x: Tensor) -> Tensor:
        p = self.teacher.train(self.told["alpha"] is None)(x).detach()
        for image, row in zip(x, p.softmax(1), strict=True):
            doubt = -sum(float(v) * math.log(float(v) + 1e-6) for v in row)
            self.memory.add(image, int(row.argmax()), doubt)
            self.seen += 1
            if self.seen % self.told["every"] == 0:
                self.learn()
        return p

    def learn(self) -> None:
        items = [item for each in self.memory.lists for item in each]
        x = torch.stack([item["image"] for item in items])
        y = self.teacher.train()(x).softmax(1).detach()
        augment = self.told["augment"]
        p = self.student.train()(x if augment is None else augment(x, self.generator)).softmax(1)
        loss = 0.0
        for i, item in enumerate(items):
            weight = math.exp(-item["age"] / self.told["capacity"])
            loss -= weight / (1 + weight) * (y[i] * p[i].log()).sum() / len(items)
        self.rule.zero_grad()
        loss.backward()
        self.rule.step()
        with torch.no_grad():
            for slow, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.copy_((1 - self.told["nu"]) * slow + self.told["nu"] * now)
        self.updates += 1


def agree(adapter: Any, slow: SlowRotta, batches: list[Tensor]) -> None:
    for x in batches:
        torch.testing.assert_close(adapter(x), slow.step(x), **CLOSE)
    for found, expected in ((adapter.model, slow.student), (adapter.teacher.model, slow.teacher)):
        for a, b in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)


def test_the_defaults_agree_with_the_slow_reference(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter, slow = adapt(source, "rotta"), SlowRotta(source)
    agree(adapter, slow, [images(40, seed) for seed in range(5)])
    assert slow.updates == 3
    assert slow.memory.evicted > 5


@pytest.mark.parametrize("alpha", [0.3, None])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 0.2), (0.0, 2.0)])
def test_a_small_memory_agrees(make_source: Any, images: Any, alpha: Any, weights: Any) -> None:
    source = make_source()
    told = {"capacity": 7, "lr": 1e-2, "augment": Augment(min_scale=0.5)}
    options = {"update_every": 3, "teacher_rate": 0.2, "age_weight": weights[0], **told}
    kind = "batch" if alpha is None else "stream"
    adapter = adapt(
        source, "rotta", norm_rate=alpha, statistics=kind, uncertainty_weight=weights[1], **options
    )
    slow = SlowRotta(source, every=3, nu=0.2, alpha=alpha, ages=weights[0], doubts=weights[1], **told)
    agree(adapter, slow, [images(count, seed) for seed, count in enumerate((8, 5, 7, 6))])
    assert slow.updates == 8
    assert slow.memory.evicted > 3


def test_images_that_are_worse_than_all_in_memory_are_refused(make_source: Any, images: Any) -> None:
    source = make_source()
    told = {"capacity": 5, "augment": None}
    adapter = adapt(source, "rotta", age_weight=0.0, update_every=50, **told)
    slow = SlowRotta(source, ages=0.0, every=50, **told)
    agree(adapter, slow, [images(20, 0), images(20, 1)])
    assert slow.memory.refused > 10
    kept = [item["image"] for each in slow.memory.lists for item in each]
    torch.testing.assert_close(adapter.memory["images"], torch.stack(kept))


def test_the_stream_may_come_in_any_batches_between_updates(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(24)
    one, other = (adapt(source, "rotta", update_every=8, capacity=6, lr=1e-2) for _ in range(2))
    told = [torch.cat([one(part) for part in x.split(size)]) for size in (8,)]
    again = torch.cat([other(part) for part in x.split(1)])
    torch.testing.assert_close(told[0], again, **CLOSE)
    torch.testing.assert_close(one.memory["born"], other.memory["born"])


def test_the_teacher_after_the_update(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(8)
    told = {"update_every": 8, "teacher_rate": 0.5, "lr": 1e-2}
    slow = SlowRotta(source, every=8, nu=0.5, lr=1e-2)
    slow.step(x)
    found = adapt(source, "rotta", predict="own", **told)(x)
    torch.testing.assert_close(found, slow.teacher.eval()(x).detach(), **CLOSE)


def test_without_a_norm_rate_predictions_run_on_the_stream_average(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter, plain = adapt(source, "rotta", norm_rate=None), adapt(source, "bn", statistics="stream")
    for seed, count in enumerate((6, 1, 5)):
        torch.testing.assert_close(adapter(images(count, seed)), plain(images(count, seed)), **CLOSE)


@pytest.mark.parametrize(
    "wrong", [{"capacity": 0}, {"update_every": 0}, {"teacher_rate": 2}, {"norm_rate": -1}]
)
def test_settings_out_of_range_are_refused(make_source: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        adapt(make_source(), "rotta", **wrong)
