"""TTT++ against the authors' formulas written out again: pairs by loops, moments by torch.cov."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.ttt_pp  # noqa: F401  registers the method
from vicinal.adapters.methods import adapt
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError, ConfigError

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
VIEW = Augment(0.2, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, gray=0.2)
AUTHORS = {
    "lr": 1e-3,
    "t": 0.5,
    "base": 0.07,
    "features": 0.05,
    "projection": 0.2,
    "means": 0.5,
    "queue": 256,
}


@pytest.fixture
def source(make_source: Any, images: Any) -> Any:
    """Return a model whose stored moments are those of other images than it is shown."""
    trained = make_source("ttt_pp")
    width = trained.model.head.in_features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6)).double()
    with torch.no_grad():
        z = 1.3 * trained.model.embed(images(40, seed=50)) + 0.1
        parts = {"features": z, "projection": head(z)}
    trained.extras = {f"ttt_pp.head.{name}": value for name, value in head.state_dict().items()}
    for number, (name, value) in enumerate(parts.items(), start=1):
        trained.extras[f"ttt_pp.{name}.mean"] = value.mean(0)
        trained.extras[f"ttt_pp.{name}.covariance"] = torch.cov(value.T)
        trained.extras[f"ttt_pp.{name}.distances"] = torch.tensor([0.02, 0.003]).double() * number
    return trained


class SlowTtt:
    def __init__(self, source: Any, on_batch: bool = True, **told: Any) -> None:
        self.told = AUTHORS | {"augment": VIEW} | told
        self.extras = source.extras
        self.model = copy.deepcopy(source.model).train(on_batch)
        width = self.model.head.in_features
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 6)).double()
        prefix = "ttt_pp.head."
        weights = {n.removeprefix(prefix): v for n, v in self.extras.items() if n.startswith(prefix)}
        self.head.load_state_dict(weights)
        self.rule = torch.optim.SGD(self.model.features.parameters(), lr=self.told["lr"], momentum=0.9)
        self.generator = torch.Generator().manual_seed(0)
        self.queues: dict[str, list[Tensor]] = {"features": [], "projection": []}

    def contrast(self, x: Tensor) -> Tensor:
        views = torch.cat([self.told["augment"](x, self.generator) for _ in range(2)])
        p, count, t = self.head(self.model.embed(views)), len(x), self.told["t"]
        total = torch.zeros((), dtype=torch.float64)
        for i in range(2 * count):
            like = [p[i] @ p[j] / (p[i].norm() * p[j].norm()) / t for j in range(2 * count) if j != i]
            partner = (i + count) % (2 * count)
            total = total - like[partner - (partner > i)] + torch.stack(like).logsumexp(0)
        return t / self.told["base"] * total / (2 * count)

    def apart(self, name: str, value: Tensor) -> Tensor:
        old = self.queues[name][-(self.told["queue"] - len(value)) :]
        whole = torch.stack([*old, *value])
        mean, cov, (mean_unit, cov_unit) = (
            self.extras[f"ttt_pp.{name}.{what}"] for what in ("mean", "covariance", "distances")
        )
        width = len(mean)
        coral = ((torch.cov(whole.T) - cov) ** 2).sum() / (4 * width**2)
        return coral / cov_unit + self.told["means"] * ((whole.mean(0) - mean) ** 2).mean() / mean_unit

    def learn(self, x: Tensor, remember: bool = True) -> None:
        z = self.model.embed(x)
        parts = {"features": z, "projection": self.head(z)}
        loss = self.contrast(x)
        for name, value in parts.items():
            loss = loss + self.told[name] * self.apart(name, value)
        self.rule.zero_grad()
        loss.backward()
        self.rule.step()
        for name, value in parts.items():
            self.queues[name] += list(value.detach()) if remember else []


def agree(adapter: Any, slow: SlowTtt) -> None:
    for a, b in zip(adapter.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_the_defaults_agree_with_the_slow_reference(source: Any, images: Any) -> None:
    adapter, slow = adapt(source, "ttt_pp"), SlowTtt(source)
    for seed, count in enumerate((7, 5, 6)):
        x = images(count, seed)
        slow.learn(x)
        torch.testing.assert_close(adapter(x), slow.model(x).detach(), **CLOSE)
    agree(adapter, slow)
    assert adapter.settings.queue == AUTHORS["queue"]
    assert torch.equal(adapter.model.head.weight, source.model.head.weight)
    for found, expected in zip(adapter.projection.parameters(), slow.head.parameters(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "told",
    [
        {"temperature": 0.2, "base_temperature": 0.5},
        {"features_weight": 2.0, "projection_weight": 0.0},
        {"projection_weight": 3.0, "mean_factor": 0.0},
        {"queue": 9, "mean_factor": 4.0},
    ],
    ids=lambda told: "-".join(told),
)
def test_other_settings_agree(source: Any, images: Any, told: dict[str, Any]) -> None:
    names = {"temperature": "t", "base_temperature": "base", "mean_factor": "means", "queue": "queue"}
    names |= {"features_weight": "features", "projection_weight": "projection"}
    view = Augment(min_scale=0.5)
    adapter = adapt(source, "ttt_pp", statistics="source", augment=view, lr=1e-2, **told)
    changed = {names[name]: value for name, value in told.items()}
    slow = SlowTtt(source, on_batch=False, augment=view, lr=1e-2, **changed)
    for seed in range(3):
        x = images(6, seed)
        slow.learn(x)
        torch.testing.assert_close(adapter(x), slow.model(x).detach(), **CLOSE)
    agree(adapter, slow)


def test_steps_and_the_prediction_before(source: Any, images: Any) -> None:
    adapter = adapt(source, "ttt_pp", steps=2, predict="before", lr=1e-2)
    slow = SlowTtt(source, lr=1e-2)
    for seed in range(2):
        x = images(6, seed)
        slow.learn(x, remember=False)
        expected = slow.model(x).detach()
        slow.learn(x)
        torch.testing.assert_close(adapter(x), expected, **CLOSE)


def test_the_queue_is_no_longer_than_told_and_holds_the_newest(source: Any, images: Any) -> None:
    adapter = adapt(source, "ttt_pp", queue=8)
    for seed, (count, held) in enumerate(((5, 5), (6, 8), (10, 10), (1, 8))):
        adapter(images(count, seed))
        assert {len(value) for value in adapter.memory.values()} == {held}


def test_an_image_alone_is_held_by_moments_only(source: Any, images: Any) -> None:
    still = adapt(source, "ttt_pp", features_weight=0.0, projection_weight=0.0, lr=1.0)
    still(images(1))
    for found, expected in zip(still.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    moved = adapt(source, "ttt_pp", lr=1e-2)
    moved(images(1))
    pairs = zip(moved.model.features.parameters(), source.model.features.parameters(), strict=True)
    assert any((a != b).any() for a, b in pairs)


def test_what_it_needs_is_said_in_one_line(make_source: Any, source: Any) -> None:
    with pytest.raises(AdapterError, match="--algorithm ttt_pp; this one was trained with 'erm'"):
        adapt(make_source(), "ttt_pp")
    for wrong in ({"temperature": 0.0}, {"queue": 0}, {"augment": None}):
        with pytest.raises(ConfigError, match="ttt_pp needs"):
            adapt(source, "ttt_pp", **wrong)
