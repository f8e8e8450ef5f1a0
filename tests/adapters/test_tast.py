"""TAST and TAST-BN against their paper written out again: loops over heads, images, classes and neighbors."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.tast
import vicinal.adapters.tast_bn  # noqa: F401  files the methods
from vicinal.adapters.methods import adapt
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError, ConfigError

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CLASSES = 4


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b) / (a.norm() * b.norm())


def entropy(logits: Tensor) -> float:
    return -sum(float(p) * math.log(float(p)) for p in logits.softmax(0))


def prototype_logits(z: Tensor, members: list[list[Tensor]], scale: float) -> Tensor:
    """Return scale * cos(z, mean of each class) of one feature; -scale where a class has no member."""
    cosines = [cosine(z, torch.stack(m).mean(0)) if m else -torch.ones((), dtype=z.dtype) for m in members]
    return scale * torch.stack(cosines)


def kept(supports: list[tuple[float, int, Tensor]], per_class: int) -> list[tuple[float, int, Tensor]]:
    chosen = []
    for k in range(CLASSES):
        mine = sorted((one for one in supports if one[1] == k), key=lambda one: one[0])
        chosen += mine if per_class == -1 else mine[:per_class]
    return chosen


def neighbors_of(z: Tensor, features: list[Tensor], k: int) -> list[int]:
    return sorted(range(len(features)), key=lambda j: -float(cosine(z, features[j]).detach()))[:k]


def by_class(features: list[Tensor], labels: list[int]) -> list[list[Tensor]]:
    return [[f for f, label in zip(features, labels, strict=True) if label == k] for k in range(CLASSES)]


def votes(said: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean of the one-hot argmax and mean of the softmax of some logits."""
    hard = torch.zeros(CLASSES, dtype=said[0].dtype)
    for logits in said:
        hard[logits.argmax()] += 1 / len(said)
    return hard, torch.stack([logits.softmax(0) for logits in said]).mean(0)


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(0)
    return sum(target[k] * (target[k].log() - log_p[k]) for k in range(CLASSES) if target[k] > 0)


class SlowTast:
    """Features are frozen; heads are taken over from the adapter, which drew them."""

    def __init__(self, source: Any, adapter: Any, on_batch: bool, **told: Any) -> None:
        self.model = copy.deepcopy(source.model).train(on_batch)
        self.told = {"per_class": 3, "k": 2, "scale": 10.0, "lr": 1e-3, "steps": 1, **told}
        self.supports: list[tuple[float, int, Tensor]] = []
        self.join(self.model.head.weight.detach())
        drawn = adapter.heads
        self.weight, self.alpha, self.gamma, self.beta = (
            value.detach().clone().requires_grad_()
            for value in (drawn.weight, drawn.alpha, drawn.gamma, drawn.beta)
        )
        heads = [self.weight, self.alpha, self.gamma, self.beta]
        self.optimizer = torch.optim.Adam(heads, lr=self.told["lr"])

    @torch.no_grad()
    def join(self, z: Tensor) -> None:
        for feature in z:
            logits = self.model.head(feature)
            self.supports.append((entropy(logits), int(logits.argmax()), feature))
        self.supports = kept(self.supports, self.told["per_class"])

    def project(self, z: Tensor, e: int) -> Tensor:
        return self.gamma[e] * (self.weight @ (self.alpha[e] * z)) + self.beta[e]

    def outcome(self, z: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss on the view and the prediction of the clean batch."""
        labels = [label for _, label, _ in self.supports]
        features = [feature for _, _, feature in self.supports]
        loss, y = torch.zeros((), dtype=z.dtype), torch.zeros(len(z), CLASSES, dtype=z.dtype)
        for e in range(len(self.alpha)):
            projected = [self.project(feature, e) for feature in features]
            members = by_class(projected, labels)
            said = [prototype_logits(u, members, self.told["scale"]).detach() for u in projected]
            for i in range(len(z)):
                target, p = votes([said[j] for j in neighbors_of(z[i], features, self.neighbors())])
                y[i] += p / len(self.alpha)
                logits = prototype_logits(self.project(view[i], e), members, self.told["scale"])
                loss = loss + divergence(target, logits) / len(z)
        return loss, y

    def neighbors(self) -> int:
        kept = self.told["per_class"]
        return max(1, min(self.told["k"], len(self.supports) // CLASSES if kept == -1 else kept))

    def step(self, x: Tensor, view: Tensor | None = None, predict: str = "before") -> Tensor:
        with torch.no_grad():
            z = self.model.embed(x)
            seen = z if view is None else self.model.embed(view)
        self.join(z)
        for _ in range(self.told["steps"]):
            loss, y = self.outcome(z, seen)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return y if predict == "before" else self.outcome(z, seen)[1].detach()


def tast(source: Any, **told: Any) -> Any:
    return adapt(source, "tast", **{"per_class": 3, "neighbors": 2, "heads": 3, **told})


@pytest.mark.parametrize("kind", ["source", "batch"])
@pytest.mark.parametrize(("steps", "predict"), [(1, "before"), (3, "before"), (2, "own")])
def test_tast_agrees_with_the_slow_reference(
    make_source: Any, images: Any, kind: str, steps: int, predict: str
) -> None:
    source = make_source()
    adapter = tast(source, statistics=kind, steps=steps, predict=predict)
    slow = SlowTast(source, adapter, kind == "batch", steps=steps)
    start = slow.weight.detach().clone()
    for seed, count in enumerate((5, 4, 6)):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x).exp(), slow.step(x, predict=predict), **CLOSE)
    for name in ("weight", "alpha", "gamma", "beta"):
        torch.testing.assert_close(getattr(adapter.heads, name), getattr(slow, name), **CLOSE)
    assert (slow.weight - start).abs().max() > 5e-4
    for found, wanted in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("told", "slow_told"),
    [
        ({"per_class": 1}, {"per_class": 1}),
        ({"per_class": -1}, {"per_class": -1}),
        ({"per_class": -1, "neighbors": 8}, {"per_class": -1, "k": 8}),
        ({"neighbors": 1}, {"k": 1}),
        ({"neighbors": 4}, {"k": 3}),
        ({"scale": 2.0}, {"scale": 2.0}),
        ({"lr": 1e-2}, {"lr": 1e-2}),
    ],
)
def test_every_constant_of_tast_is_what_it_says(
    make_source: Any, images: Any, told: dict[str, Any], slow_told: dict[str, Any]
) -> None:
    source = make_source()
    adapter, plain = tast(source, **told), tast(source)
    slow = SlowTast(source, adapter, False, **slow_told)
    differ = False
    for seed, count in enumerate((6, 5, 4)):
        x = images(count, seed)
        found = adapter(x)
        torch.testing.assert_close(found.exp(), slow.step(x), **CLOSE)
        differ |= not torch.allclose(found, plain(x), rtol=1e-5, atol=1e-5)
    assert differ


def test_the_heads_of_tast_are_drawn_by_kaiming_from_the_seed(make_source: Any) -> None:
    source = make_source()
    adapter = adapt(source, "tast", seed=3)
    features = source.model.head.in_features
    heads = adapter.heads
    assert heads.weight.shape == (features // 4, features)
    assert heads.alpha.shape == (20, features)
    assert heads.gamma.shape == (20, features // 4)
    for value in (heads.weight, heads.alpha, heads.gamma):
        assert float(value.detach().std() * math.sqrt(value.shape[1] / 2)) == pytest.approx(1, abs=0.15)
    assert not heads.beta.any()
    assert torch.equal(adapt(source, "tast", seed=3).heads.weight, heads.weight)
    assert not torch.equal(adapt(source, "tast", seed=4).heads.weight, heads.weight)
    settings = adapter.settings
    assert (settings.lr, settings.scale, settings.neighbors, settings.per_class) == (1e-3, 10.0, 4, 20)
    assert (settings.statistics.kind, settings.predict, settings.optimizer) == ("source", "before", "adam")


def test_tast_learns_from_the_view_and_labels_by_the_clean_batch(make_source: Any, images: Any) -> None:
    source, view = make_source(), Augment(min_scale=0.5)
    adapter = tast(source, augment=view, seed=2)
    slow = SlowTast(source, adapter, False)
    generator = torch.Generator()
    for seed in range(2):
        x = images(5, seed)
        generator.set_state(adapter.generator.get_state())
        seen = view(x, generator)
        torch.testing.assert_close(adapter(x).exp(), slow.step(x, seen), **CLOSE)


class SlowTastBN:
    """Supports are images; everything passes through the network together."""

    def __init__(self, source: Any, kind: str, per_class: int = 2, k: int = 2, scale: float = 10.0) -> None:
        self.model = copy.deepcopy(source.model).train(kind == "batch")
        self.per_class, self.k, self.scale = per_class, k, scale
        layers = [layer for layer in self.model.modules() if isinstance(layer, nn.BatchNorm2d)]
        self.norm = [value for layer in layers for value in layer.parameters()]
        self.optimizer = torch.optim.Adam(self.norm, lr=1e-3)
        self.supports: list[tuple[float, int, Tensor]] = []

    def outcome(self, x: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        stored = torch.stack([image for _, _, image in self.supports])
        both = self.model.embed(torch.cat([view, stored]))
        clean = self.model.embed(torch.cat([x, stored])).detach()[: len(x)]
        z, features = both[: len(x)], list(both[len(x) :])
        members = by_class(features, [label for _, label, _ in self.supports])
        said = [prototype_logits(f, members, self.scale).detach() for f in features]
        loss, y = torch.zeros((), dtype=x.dtype), []
        for i in range(len(x)):
            near = neighbors_of(clean[i], features, min(self.k, self.per_class))
            target, p = votes([said[j] for j in near])
            y.append(p)
            loss = loss + divergence(target, prototype_logits(z[i], members, self.scale)) / len(x)
        return loss, torch.stack(y)

    def step(self, x: Tensor, steps: int = 1, predict: str = "before", view: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            for image, logits in zip(x, self.model(x), strict=True):
                self.supports.append((entropy(logits), int(logits.argmax()), image))
        self.supports = kept(self.supports, self.per_class)
        for _ in range(steps):
            loss, y = self.outcome(x, x if view is None else view)
            self.model.zero_grad()
            loss.backward()
            self.optimizer.step()
        return y if predict == "before" else self.outcome(x, x)[1].detach()


def tast_bn(source: Any, **told: Any) -> Any:
    return adapt(source, "tast_bn", **{"per_class": 2, "neighbors": 2, **told})


@pytest.mark.parametrize("kind", ["source", "batch"])
@pytest.mark.parametrize(("steps", "predict"), [(1, "before"), (3, "before"), (2, "own")])
def test_tast_bn_agrees_with_the_slow_reference(
    make_source: Any, images: Any, kind: str, steps: int, predict: str
) -> None:
    source = make_source()
    adapter, slow = tast_bn(source, statistics=kind, steps=steps, predict=predict), SlowTastBN(source, kind)
    for seed, count in enumerate((6, 4, 5)):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x).exp(), slow.step(x, steps, predict), **CLOSE)
    for found, wanted in zip(adapter.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)
    first, moved = next(iter(slow.norm)), make_source().model
    assert (first - next(v for n, v in moved.named_parameters() if v.shape == first.shape)).abs().max() > 5e-4
    assert torch.equal(adapter.model.head.weight, source.model.head.weight)


@pytest.mark.parametrize(
    ("told", "slow_told"),
    [
        ({"per_class": 1}, {"per_class": 1}),
        ({"per_class": -1, "support_limit": 12}, {"per_class": 3}),
        ({"per_class": 5, "support_limit": 7}, {"per_class": 1}),
        ({"neighbors": 1}, {"k": 1}),
        ({"per_class": 3, "neighbors": 4}, {"per_class": 3, "k": 3}),
        ({"scale": 2.0}, {"scale": 2.0}),
    ],
)
def test_every_constant_of_tast_bn_is_what_it_says(
    make_source: Any, images: Any, told: dict[str, Any], slow_told: dict[str, Any]
) -> None:
    source = make_source()
    adapter, plain, slow = tast_bn(source, **told), tast_bn(source), SlowTastBN(source, "batch", **slow_told)
    differ = False
    for seed, count in enumerate((7, 6)):
        x = images(count, seed)
        found = adapter(x)
        torch.testing.assert_close(found.exp(), slow.step(x), **CLOSE)
        differ |= not torch.allclose(found, plain(x), rtol=1e-5, atol=1e-5)
    assert differ


def test_tast_bn_learns_from_the_view_and_labels_by_the_clean_batch(make_source: Any, images: Any) -> None:
    source, view = make_source(), Augment(min_scale=0.5)
    adapter, slow = tast_bn(source, augment=view, predict="own"), SlowTastBN(source, "batch")
    generator = torch.Generator()
    for seed in range(2):
        x = images(5, seed)
        generator.set_state(adapter.generator.get_state())
        seen = view(x, generator)
        torch.testing.assert_close(adapter(x).exp(), slow.step(x, predict="own", view=seen), **CLOSE)


def test_the_defaults_of_tast_bn(make_source: Any) -> None:
    adapter = adapt(make_source(), "tast_bn")
    settings = adapter.settings
    assert (settings.lr, settings.scale, settings.neighbors, settings.support_limit) == (1e-3, 10.0, 4, 150)
    assert (settings.statistics.kind, settings.predict, settings.parameters) == ("batch", "before", "norm")
    assert adapter.per_class == 20
    assert adapter.memory == {}


@pytest.mark.parametrize("predict", ["before", "own"])
@pytest.mark.parametrize("kind", ["stream", "blend"])
def test_a_batch_counts_once_in_the_statistics_of_tast_bn(
    make_source: Any, images: Any, kind: str, predict: str
) -> None:
    adapter, plain = (
        tast_bn(make_source(), statistics=kind, predict=predict),
        adapt(make_source(), "bn", statistics=kind),
    )
    for seed, count in enumerate((6, 1, 5)):
        adapter(images(count, seed))
        plain(images(count, seed))
    assert adapter.norm.seen == plain.norm.seen


def test_without_normalization_layers_tast_bn_says_what_to_choose(make_source: Any) -> None:
    with pytest.raises(AdapterError, match="parameters="):
        adapt(make_source(backbone="small_none"), "tast_bn")


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("tast", {"heads": 0}),
        ("tast", {"scale": 0.0}),
        ("tast", {"reduction": 0}),
        ("tast", {"neighbors": 0}),
        ("tast", {"optimizer": "sgd"}),
        ("tast_bn", {"support_limit": 0}),
        ("tast_bn", {"neighbors": 0}),
        ("tast_bn", {"scale": -1.0}),
    ],
)
def test_settings_out_of_range_are_refused(make_source: Any, method: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        adapt(make_source(), method, **wrong)
