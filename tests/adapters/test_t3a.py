"""T3A against its paper written out again: lists of supports, class by class and image by image."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import vicinal.adapters.t3a  # noqa: F401  files the method
from vicinal.adapters.methods import adapt
from vicinal.errors import ConfigError
from vicinal.functional.peers_prototypes import lowest_entropy

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def test_of_supports_that_are_equally_sure_the_older_ones_stay() -> None:
    # More than a sort keeps in order by luck.
    labels, entropy = torch.tensor([1, 0] * 20), torch.full((40,), 0.5)
    assert lowest_entropy(labels, entropy, 3).tolist() == [0, 1, 2, 3, 4, 5]
    entropy[20] = 0.4
    assert lowest_entropy(labels, entropy, 3).tolist() == [0, 1, 2, 3, 5, 20]


def entropy(logits: Tensor) -> float:
    return -sum(float(p) * math.log(float(p)) for p in logits.softmax(0))


class SlowT3A:
    """Supports of each class as a list of (entropy, feature)."""

    def __init__(self, source: Any, per_class: int | None) -> None:
        self.head, self.per_class = source.model.head, per_class
        self.supports: list[list[tuple[float, Tensor]]] = [[] for _ in self.head.bias]
        for row in self.head.weight.detach():
            self.join(row)

    @torch.no_grad()
    def join(self, z: Tensor) -> None:
        logits = self.head(z)
        members = self.supports[int(logits.argmax())]
        members.append((entropy(logits), z / z.norm()))
        members.sort(key=lambda pair: pair[0])
        if self.per_class is not None:
            del members[self.per_class :]

    def predict(self, z: Tensor) -> Tensor:
        logits = torch.zeros(len(z), len(self.supports), dtype=z.dtype)
        for k, members in enumerate(self.supports):
            total = sum(feature for _, feature in members)
            for i in range(len(z)):
                logits[i, k] = z[i] @ (total / total.norm()) if members else -z[i].norm()
        return logits


@torch.no_grad()
def features(model: Any, x: Tensor, on_batch: bool) -> Tensor:
    z = model.train(on_batch).embed(x)
    model.eval()
    return z


@pytest.mark.parametrize("kind", ["source", "batch"])
@pytest.mark.parametrize("predict", ["own", "before"])
@pytest.mark.parametrize("per_class", [1, 3, -1])
def test_a_stream_agrees_with_the_slow_reference(
    make_source: Any, images: Any, per_class: int, predict: str, kind: str
) -> None:
    source = make_source()
    adapter = adapt(source, "t3a", per_class=per_class, predict=predict, statistics=kind)
    slow = SlowT3A(source, None if per_class == -1 else per_class)
    for seed, count in enumerate((7, 12, 5, 9)):
        x = images(count, seed)
        z = features(make_source().model, x, kind == "batch")
        before = slow.predict(z)
        for feature in z:
            slow.join(feature)
        expected = before if predict == "before" else slow.predict(z)
        torch.testing.assert_close(adapter(x), expected, **CLOSE)
    assert max(len(members) for members in slow.supports) >= (3 if per_class != 1 else 1)


def test_the_default_keeps_twenty_of_each_class_on_source_statistics(make_source: Any, images: Any) -> None:
    adapter, twenty = adapt(make_source(), "t3a"), adapt(make_source(), "t3a", per_class=20)
    assert adapter.settings.statistics.kind == "source"
    for seed in range(3):
        x = images(40, seed)
        assert torch.equal(adapter(x), twenty(x))
    counts = adapter.memory["labels"].bincount(minlength=4)
    assert counts.max() == 20
    assert len(adapter.memory["supports"]) == counts.sum()


def test_with_all_supports_memory_does_not_grow(make_source: Any, images: Any) -> None:
    adapter = adapt(make_source(), "t3a", per_class=-1)
    shapes = [
        {name: value.shape for name, value in adapter.memory.items()}
        for seed in range(3)
        if adapter(images(9, seed)).isfinite().all()
    ]
    assert shapes == shapes[:1] * 3


def test_the_least_certain_of_a_class_counts_when_all_are_kept(make_source: Any, images: Any) -> None:
    """The released code drops it: `[:-1]` where K is -1."""
    source, x = make_source(), images(12)
    every, some = SlowT3A(source, None), SlowT3A(source, None)
    z = features(source.model, x, False)
    for feature in z:
        every.join(feature)
        some.join(feature)
    some.supports = [members[:-1] if len(members) > 1 else members for members in some.supports]
    found = adapt(source, "t3a", per_class=-1)(x)
    torch.testing.assert_close(found, every.predict(z), **CLOSE)
    assert (found - some.predict(z)).abs().max() > 1e-3


def test_a_class_without_a_support_is_never_predicted(make_source: Any, images: Any) -> None:
    source = make_source()
    with torch.no_grad():
        source.model.head.bias[1] = -1e3
    adapter = adapt(source, "t3a")
    for seed in range(2):
        logits = adapter(images(9, seed))
        assert (logits.argmax(1) != 1).all()
        assert (logits[:, 1:2] <= logits).all()


@pytest.mark.parametrize("wrong", [0, -2])
def test_a_number_of_supports_out_of_range_is_refused(make_source: Any, wrong: int) -> None:
    with pytest.raises(ConfigError, match="per_class"):
        adapt(make_source(), "t3a", per_class=wrong)
