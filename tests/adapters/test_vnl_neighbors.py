"""vnl by nearest neighbors against a slow reference: loops over images, torch.optim.Adam, a list."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters.contract import Settings
from vicinal.adapters.methods import adapt, told
from vicinal.adapters.vnl import VnlSettings
from vicinal.errors import ConfigError

LR, HORIZON = 1e-3, 1000
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
K, TAU, VOTED, WINDOW, CROWD = 4, 0.3, 0.6, 9.0, 5  # of images, a class; none a default


class SlowNeighbors:
    """update="neighbors" on source statistics, image by image, from the docstrings' formulas."""

    def __init__(self, model: Any, weights: tuple[float, float, float]) -> None:
        self.model, self.weights = copy.deepcopy(model).eval(), weights
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        classes = self.model.head.out_features
        self.memory: list[tuple[Tensor, Tensor]] = []
        self.shares, self.classes, self.seen = [1 / classes] * classes, classes, 0

    def labels(self, z: Tensor, p: Tensor) -> Tensor:
        found = []
        for i in range(len(z)):
            others = [(z[j], p[j]) for j in range(len(z)) if j != i] + self.memory
            near = sorted(others, key=lambda other: -float(cosine(z[i], other[0])))
            near = near[: min(K, math.ceil(len(others) / self.classes))]
            weights = [math.exp(float(cosine(z[i], there)) / TAU) for there, _ in near]
            votes = (
                sum(w * y for w, (_, y) in zip(weights, near, strict=True)) / sum(weights) if near else p[i]
            )
            found.append((1 - VOTED) * p[i] + VOTED * votes)
        return torch.stack(found)

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return own predictions and those by neighbors after an update."""
        z, logits = self.model.features_and_logits(x)
        p, log_p = logits.softmax(-1), logits.log_softmax(-1)
        y = self.labels(z.detach(), p.detach())
        entropy, label = -(p * log_p).sum(-1).mean(), -(y * log_p).sum(-1).mean()
        m = p.mean(0)
        share = sum(m[c] * (m[c].log() - math.log(self.shares[c])) for c in range(self.classes))
        a, b, c = self.weights
        self.optimizer.zero_grad()
        (a * entropy + b * label + c * share).backward()
        self.optimizer.param_groups[0]["lr"] = LR * HORIZON / (HORIZON + self.seen)
        self.optimizer.step()
        fade = math.exp(-len(x) / (WINDOW * self.classes))
        self.shares = [
            fade * old + (1 - fade) * new for old, new in zip(self.shares, m.tolist(), strict=True)
        ]
        self.seen += len(x)
        with torch.no_grad():
            z, logits = self.model.features_and_logits(x)
        own = logits.softmax(-1)
        y_hat = self.labels(z, own)
        self.memory = (self.memory + list(zip(z, own, strict=True)))[-CROWD * self.classes :]
        return own, y_hat


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return a @ b / (a.norm() * b.norm())


def vnl(source: Any, **options: Any) -> Any:
    known = {"neighbors": K, "tau": TAU, "voted": VOTED, "share_window": WINDOW, "crowd": CROWD}
    plain = {"lr": LR, "horizon": float(HORIZON), "from_rest": False, "update": "neighbors"}
    return adapt(source, "vnl", **{**plain, **known, **options})


@pytest.mark.parametrize("predict", ["own", "neighbors"])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, 0.0), (1.0, 0.0, 3.0)])
def test_it_agrees_with_the_slow_reference(
    make_source: Any, images: Any, predict: str, weights: tuple[float, float, float]
) -> None:
    source = make_source()
    names = ("entropy_weight", "neighbor_weight", "share_weight")
    told_weights = dict(zip(names, weights, strict=True))
    adapter = vnl(source, statistics="source", predict=predict, **told_weights)
    slow = SlowNeighbors(source.model, weights)
    for seed, count in enumerate((7, 1, 26, 5)):
        x = images(count, seed)
        own, y_hat = slow.step(x)
        expected = own if predict == "own" else y_hat
        torch.testing.assert_close(adapter(x).softmax(-1), expected, **CLOSE)
    for found, expected in zip(adapter.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_every_part_of_the_reference_matters(make_source: Any, images: Any) -> None:
    source, outputs = make_source(), []
    for weights in ((1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)):
        slow = SlowNeighbors(source.model, weights)
        slow.step(images(20))
        outputs += slow.step(images(20, 1))
    apart = [(a - b).abs().max() for i, a in enumerate(outputs) for b in outputs[:i]]
    assert min(apart) > 1e-4


def test_neighbors_predict_after_any_update(make_source: Any, images: Any) -> None:
    for update in ("none", "entropy", "marginal"):
        own, near = (vnl(make_source(), update=update, predict=name) for name in ("own", "neighbors"))
        for seed in range(3):
            x = images(20, seed)
            first, second = own(x), near(x)
        assert not torch.allclose(first.softmax(-1), second.softmax(-1), atol=1e-3)
        for a, b in zip(own.model.parameters(), near.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_phi_may_predict_what_neighbors_taught(make_source: Any, images: Any) -> None:
    adapter = vnl(make_source(), predict="labels")
    adapter(images(20))
    assert int(adapter.neighborhood.count) == 20


@pytest.mark.parametrize("count", [1, 2, 200])
def test_a_first_batch_of_any_size_is_predicted(make_source: Any, images: Any, count: int) -> None:
    assert vnl(make_source(), predict="neighbors")(images(count)).isfinite().all()


def test_any_classifier_is_adapted_by_neighbors_without_training(images: Any) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3),
        torch.nn.BatchNorm2d(6),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(6, 4),
    )
    adapter = adapt(net, "vnl", update="neighbors", predict="neighbors")
    for seed in range(3):
        assert adapter(images(9, seed)).shape == (9, 4)
    adapter.reset()
    assert int(adapter.neighborhood.count) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"neighbors": 0},
        {"crowd": 0},
        {"tau": 0.0},
        {"voted": 1.1},
        {"neighbor_weight": -1.0},
        {"share_weight": -1.0},
        {"share_window": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        VnlSettings(**wrong)


def test_settings_that_came_later_keep_older_names() -> None:
    """Records name the runs they are of by these; a new option belongs into `later`."""
    first = {"update", "entropy_weight", "marginal_weight", "window", "anchor_weight", "doubt"}
    assert told(VnlSettings()).keys() == told(Settings()).keys() | first
    assert told(VnlSettings(tau=0.2)) == {**told(VnlSettings()), "tau": 0.2}
