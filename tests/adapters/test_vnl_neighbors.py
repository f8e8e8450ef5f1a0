"""vnl by nearest neighbors against a slow reference: loops over images, torch.optim.Adam, a list."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters.methods import adapt, told
from vicinal.adapters.settings import Settings
from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.errors import ConfigError

LR, HORIZON = 1e-3, 1000
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
K, TAU, VOTED, WINDOW, CROWD = 4, 0.3, 0.6, 9.0, 5  # of images, a class; none a default


class SlowNeighbors:
    """update="neighbors" on source statistics, image by image, from the docstrings' formulas."""

    def __init__(
        self, model: Any, weights: tuple[float, float, float], rounds: int = 1, joint: bool = False
    ) -> None:
        self.model, self.weights = copy.deepcopy(model).eval(), weights
        self.anchor, self.rounds, self.joint = copy.deepcopy(model).eval(), rounds, joint
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        classes = self.model.head.out_features
        self.memory: list[tuple[tuple[Tensor, Tensor], Tensor]] = []
        self.shares, self.classes, self.seen = [1 / classes] * classes, classes, 0

    def labels(self, z: list[tuple[Tensor, Tensor]], p: Tensor, rounds: int) -> Tensor:
        everyone = [*zip(z, p, strict=True), *self.memory]
        said = [y for _, y in everyone]
        for number in range(rounds):
            heard = [y**2 / (y**2).sum() for y in said] if number else said
            said = [self.label(everyone, i, heard) for i in range(len(everyone))]
        return torch.stack(said[: len(p)])

    def label(
        self, everyone: list[tuple[tuple[Tensor, Tensor], Tensor]], i: int, heard: list[Tensor]
    ) -> Tensor:
        here, own = everyone[i]
        near = {j: self.similarity(here, there) for j, (there, _) in enumerate(everyone) if j != i}
        asked = sorted(near, key=lambda j: -near[j])[: min(K, math.ceil(len(near) / self.classes))]
        weights = [math.exp(near[j] / TAU) for j in asked]
        votes = sum(w * heard[j] for w, j in zip(weights, asked, strict=True)) / sum(weights) if near else own
        return (1 - VOTED) * own + VOTED * votes

    def similarity(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> float:
        own, by_anchor = (float(cosine(one, other)) for one, other in zip(a, b, strict=True))
        return (own + by_anchor) / 2 if self.joint else own

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return own predictions and those by neighbors after an update."""
        z, logits = self.model.features_and_logits(x)
        p, log_p = logits.softmax(-1), logits.log_softmax(-1)
        with torch.no_grad():
            z_anchor, _ = self.anchor.features_and_logits(x)
        y = self.labels(list(zip(z.detach(), z_anchor, strict=True)), p.detach(), 1)
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
        both = list(zip(z, z_anchor, strict=True))
        y_hat = self.labels(both, own, self.rounds)
        self.memory = (self.memory + list(zip(both, own, strict=True)))[-CROWD * self.classes :]
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


@pytest.mark.parametrize(("rounds", "joint"), [(2, False), (3, True), (1, True)])
def test_rounds_and_joint_features_agree_with_the_slow_reference(
    make_source: Any, images: Any, rounds: int, joint: bool
) -> None:
    source = make_source()
    adapter = vnl(source, statistics="source", predict="neighbors", rounds=rounds, joint=joint)
    slow = SlowNeighbors(source.model, (1.0, 1.0, 1.0), rounds, joint)
    plain = SlowNeighbors(source.model, (1.0, 1.0, 1.0))
    for seed, count in enumerate((7, 1, 26, 5)):
        x = images(count, seed)
        _, expected = slow.step(x)
        torch.testing.assert_close(adapter(x).softmax(-1), expected, **CLOSE)
        _, without = plain.step(x)
    assert (expected - without).abs().max() > 1e-3
    for found, wanted in zip(adapter.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_model_that_is_not_updated_is_its_own_anchor(make_source: Any, images: Any) -> None:
    """Both features would be the same, so their mean cosine is: no second pass for it."""
    one, both = (
        vnl(make_source(), update="none", predict="neighbors", joint=joint) for joint in (False, True)
    )
    for seed in range(2):
        x = images(20, seed)
        assert torch.equal(one(x), both(x))
    assert not hasattr(both, "anchor")


def test_whoever_does_not_ask_neighbors_has_no_second_pass_for_them(make_source: Any) -> None:
    assert not hasattr(vnl(make_source(), update="entropy", predict="own", joint=True), "anchor")
    assert hasattr(vnl(make_source(), update="entropy", predict="neighbors", joint=True), "anchor")


@pytest.mark.parametrize(
    "other", [{"rounds": 3}, {"crowd": 9}, {"neighbors": 3}, {"tau": 0.2}, {"voted": 0.5}, {"joint": True}]
)
def test_a_temperature_of_other_votes_is_not_taken_over(make_source: Any, other: dict[str, Any]) -> None:
    def taken(chosen: dict[str, Any], **options: Any) -> float:
        rule = {**chosen, "output_temperature": 0.5}
        source = replace(make_source(), choice={"methods": {"vnl": {"stream": rule}}})
        return float(adapt(source, "vnl", **options).settings.output_temperature)

    (name,) = other
    votes, own = {"update": "none", "predict": "neighbors"}, {"update": "marginal", "predict": "own"}
    assert taken(votes, **other) == 1.0
    assert taken(votes) == taken(votes, **{name: getattr(VnlSettings(), name)}) == 0.5
    assert taken(own, **other) == 0.5, "where nobody votes it makes no difference"


@pytest.mark.parametrize("update", ["entropy", "marginal"])
@pytest.mark.parametrize("statistics", ["source", "stream"])
def test_joint_features_are_those_of_the_same_image_by_the_source_model(
    make_source: Any, images: Any, update: str, statistics: str
) -> None:
    """Against the plain adapter's own features and a source model that is shown the same batches."""
    source, options = make_source(), {"update": update, "statistics": statistics}
    both = vnl(source, predict="neighbors", rounds=2, joint=True, **options)
    plain = vnl(source, predict="own", **options)
    still = vnl(source, predict="own", update="none", statistics=statistics)
    slow = SlowNeighbors(source.model, (1.0, 1.0, 1.0), 2, joint=True)
    for seed, count in enumerate((7, 1, 26, 5)):
        x = images(count, seed)
        found = both(x).softmax(-1)
        (z, p), (z_anchor, _) = (seen_by(adapter, x) for adapter in (plain, still))
        seen = list(zip(z, z_anchor, strict=True))
        torch.testing.assert_close(found, slow.labels(seen, p, 2), **CLOSE)
        slow.memory = (slow.memory + list(zip(seen, p, strict=True)))[-CROWD * slow.classes :]


def seen_by(adapter: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and predictions of a batch as an adapter comes to them, and let it go on."""
    kept: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        whole = adapter.model.features_and_logits
        patch.setattr(adapter.model, "features_and_logits", lambda x: kept.append(whole(x)) or kept[-1])
        p = adapter(x).softmax(-1)
    return kept[-1][0].detach(), p


def test_what_is_learned_from_neighbors_takes_joint_features_too(make_source: Any, images: Any) -> None:
    one, both = (vnl(make_source(), predict="own", joint=joint) for joint in (False, True))
    slow = SlowNeighbors(make_source().model, (1.0, 1.0, 1.0), joint=True)
    same = vnl(make_source(), predict="own", joint=True, statistics="source")
    for seed in range(3):
        x = images(20, seed)
        first, second = one(x), both(x)
        expected, _ = slow.step(x)
        torch.testing.assert_close(same(x).softmax(-1), expected, **CLOSE)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("update", ["none", "entropy", "marginal", "neighbors"])
@pytest.mark.parametrize("one", [{"predict": "own"}, {"predict": "neighbors", "rounds": 3}], ids=str)
def test_who_predicts_changes_nothing_that_is_learned(
    make_source: Any, images: Any, update: str, one: dict[str, Any]
) -> None:
    first, second = (vnl(make_source(), update=update, **way) for way in (one, {"predict": "neighbors"}))
    for seed in range(3):
        x = images(20, seed)
        found, other = first(x), second(x)
    assert not torch.allclose(found.softmax(-1), other.softmax(-1), atol=1e-3)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
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
        {"crowd_limit": 0},
        {"tau": 0.0},
        {"voted": 1.1},
        {"rounds": 0},
        {"rounds": 1.5},
        {"rounds": True},
        {"crowd": 1.5},
        {"neighbors": 2.5},
        {"tau": math.inf},
        {"tau": "x"},
        {"joint": "no"},
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


def test_under_autocast_memory_keeps_the_precision_of_the_model(make_source: Any, images: Any) -> None:
    adapter = vnl(make_source(), predict="neighbors", rounds=2, joint=True)
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(2):
            assert adapter(images(9, seed)).isfinite().all()
    memory, weight = adapter.neighborhood, adapter.model.head.weight
    assert memory.z.dtype == memory.y.dtype == weight.dtype


def test_a_crowd_that_votes_in_rounds_is_limited(make_source: Any) -> None:
    """Its cost grows with the square of the crowd; that of one round does not."""
    options = {"predict": "neighbors", "crowd": 40, "crowd_limit": 50}
    once, rounds = (vnl(make_source(), rounds=n, **options) for n in (1, 2))
    classes = len(once.model.linear.bias)
    assert len(once.neighborhood.z) == 40 * classes > 50
    assert len(rounds.neighborhood.z) == 50
