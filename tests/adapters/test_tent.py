"""Tent against its paper written out again: deepcopy, torch.optim.Adam, entropies sample by sample."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.tent  # noqa: F401  registers the method
from vicinal.adapters.methods import METHODS, adapt
from vicinal.errors import AdapterError

CLOSE = {"rtol": 1e-7, "atol": 1e-7}
NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


class Reference:
    """Tent from scratch; `on_batch` is the mode BatchNorm runs in throughout."""

    def __init__(self, model: nn.Module, on_batch: bool, everything: bool = False, lr: float = 1e-3) -> None:
        self.model: Any = copy.deepcopy(model).train(on_batch)
        layers = self.model.modules() if not everything else [self.model]
        wanted = [m for m in layers if everything or isinstance(m, NORMS)]
        self.optimizer = torch.optim.Adam([p for m in wanted for p in m.parameters()], lr=lr)

    def step(self, x: Tensor, steps: int = 1, after: bool = False) -> Tensor:
        for _ in range(steps):
            logits = self.model(x)
            loss = 0
            for row in logits:
                p = row.exp() / row.exp().sum()
                loss = loss - sum(p[c] * p[c].log() for c in range(len(p))) / len(logits)
            self.model.zero_grad()
            loss.backward()
            self.optimizer.step()
        return self.model(x).detach() if after else logits.detach()


def compare(adapter: Any, reference: Reference, batches: list[Tensor], **step: Any) -> None:
    for x in batches:
        torch.testing.assert_close(adapter(x), reference.step(x, **step), **CLOSE)
    for found, expected in zip(adapter.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("net", ["small", "small_gn"])
def test_the_defaults_are_the_papers(make_source: Any, images: Any, net: str) -> None:
    source = make_source(backbone=net)
    compare(adapt(source, "tent"), Reference(source.model, True), [images(n, n) for n in (7, 6, 5)])
    defaults = METHODS["tent"].defaults
    assert (defaults.lr, defaults.predict, defaults.parameters) == (1e-3, "before", "norm")
    assert (defaults.optimizer, defaults.statistics.kind, defaults.episodic) == ("adam", "batch", False)


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize("parameters", ["norm", "all"])
@pytest.mark.parametrize(("steps", "predict"), [(1, "after"), (3, "before")])
def test_variants_agree(
    make_source: Any, images: Any, kind: str, parameters: str, steps: int, predict: str
) -> None:
    source = make_source()
    told = {"statistics": kind, "parameters": parameters, "steps": steps, "predict": predict, "lr": 3e-3}
    reference = Reference(source.model, kind == "batch", parameters == "all", lr=3e-3)
    batches = [images(7, 1), images(5, 2)]
    compare(adapt(source, "tent", **told), reference, batches, steps=steps, after=predict == "after")


def test_only_scale_and_shift_move(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter = adapt(source, "tent")
    adapter(images(7))
    norms = {
        f"{name}.{part}"
        for name, layer in source.model.named_modules()
        if isinstance(layer, NORMS)
        for part in ("weight", "bias")
    }
    moved = {
        name
        for name, value in source.model.named_parameters()
        if not torch.equal(adapter.model.get_parameter(name), value)
    }
    assert moved == norms


def test_before_is_what_the_source_says_of_the_first_batch(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(7)
    for kind in ("batch", "source", "blend", "stream"):
        plain = adapt(source, "bn", statistics=kind)(x)
        torch.testing.assert_close(adapt(source, "tent", statistics=kind)(x), plain, **CLOSE)
        assert not torch.allclose(adapt(source, "tent", statistics=kind, predict="after")(x), plain)


def test_a_batch_of_one_is_updated_on_the_stream(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter = adapt(source, "tent")
    torch.testing.assert_close(adapter(images(1)), adapt(source, "bn")(images(1)), **CLOSE)
    weights = [m.weight for m in adapter.model.modules() if isinstance(m, NORMS)]
    sources = [m.weight for m in source.model.modules() if isinstance(m, NORMS)]
    assert not all(torch.equal(a, b) for a, b in zip(weights, sources, strict=True))


def test_a_net_without_normalization_says_what_to_pass(make_source: Any, images: Any) -> None:
    source = make_source(backbone="small_none")
    with pytest.raises(AdapterError, match="parameters="):
        adapt(source, "tent")
    assert adapt(source, "tent", parameters="all")(images(3)).isfinite().all()
