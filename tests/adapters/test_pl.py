"""PL against its words: confident samples picked one by one, torch.optim.Adam on a deepcopy."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.pl  # noqa: F401  registers the method
from vicinal.adapters.methods import METHODS, adapt
from vicinal.data.augment import Augment
from vicinal.errors import ConfigError

CLOSE = {"rtol": 1e-7, "atol": 1e-7}
SEED = 4


class Reference:
    """Pseudo labels from scratch; counts how many were confident."""

    def __init__(self, model: nn.Module, on_batch: bool, threshold: float, lr: float) -> None:
        self.model: Any = copy.deepcopy(model).train(on_batch)
        self.threshold, self.used, self.passed_over = threshold, 0, 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(SEED)

    def step(self, x: Tensor, steps: int = 1, after: bool = False, augment: Augment | None = None) -> Tensor:
        for _ in range(steps):
            told = self.model(x)
            logits = told if augment is None else self.model(augment(x, self.generator))
            terms = []
            for sure, row in zip(told.detach(), logits, strict=True):
                p = sure.exp() / sure.exp().sum()
                if p.max() > self.threshold:
                    terms.append(row.exp().sum().log() - row[int(p.argmax())])
            self.used, self.passed_over = self.used + len(terms), self.passed_over + len(x) - len(terms)
            loss = sum(terms) / len(terms) if terms else 0 * logits.sum()
            self.model.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self.model(x).detach() if after else told.detach()


def sharp(source: Any) -> Any:
    """Return the model made surer of itself: some of its predictions pass a threshold of 0.9, some do not."""
    with torch.no_grad():
        for value in source.model.head.parameters():
            value.mul_(2.5)
    return source


def compare(adapter: Any, reference: Reference, batches: list[Tensor], **step: Any) -> None:
    for x in batches:
        torch.testing.assert_close(adapter(x), reference.step(x, **step), **CLOSE)
    for found, expected in zip(adapter.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    assert reference.used > 1
    assert reference.passed_over > 1


def test_the_defaults_are_those_of_the_t3a_code(make_source: Any, images: Any) -> None:
    source = sharp(make_source())
    reference = Reference(source.model, False, threshold=0.9, lr=5e-5)
    compare(adapt(source, "pl"), reference, [images(n, n) for n in (8, 7, 6)])
    defaults = METHODS["pl"].defaults
    assert (defaults.predict, defaults.parameters, defaults.optimizer) == ("before", "all", "adam")
    assert (defaults.lr, defaults.threshold, defaults.statistics.kind) == (5e-5, 0.9, "source")


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize(("steps", "predict", "threshold"), [(1, "after", 0.6), (3, "before", 0.8)])
def test_variants_agree(
    make_source: Any, images: Any, kind: str, steps: int, predict: str, threshold: float
) -> None:
    source = sharp(make_source())
    told = {"statistics": kind, "steps": steps, "predict": predict, "threshold": threshold, "lr": 1e-3}
    reference = Reference(source.model, kind == "batch", threshold, lr=1e-3)
    after = predict == "after"
    compare(adapt(source, "pl", **told), reference, [images(8, 1), images(7, 2)], steps=steps, after=after)


@pytest.mark.parametrize("kind", ["batch", "source"])
def test_labels_come_from_the_clean_view(make_source: Any, images: Any, kind: str) -> None:
    source, view = sharp(make_source()), Augment(min_scale=0.5)
    reference = Reference(source.model, kind == "batch", 0.7, lr=1e-3)
    adapter = adapt(source, "pl", statistics=kind, threshold=0.7, lr=1e-3, augment=view, seed=SEED)
    compare(adapter, reference, [images(8, 1), images(7, 2)], augment=view)


def test_without_a_confident_sample_nothing_is_learned(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter = adapt(source, "pl", threshold=0.9999)
    assert adapter(images(5)).isfinite().all()
    for found, expected in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_threshold_that_nothing_can_pass_is_refused(make_source: Any) -> None:
    with pytest.raises(ConfigError, match="threshold"):
        adapt(make_source(), "pl", threshold=1.0)
