"""DELTA against its paper: renormalization layers put in by hand, weights sample by sample, Adam."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.delta  # noqa: F401  registers the method
from vicinal.adapters.methods import METHODS, adapt
from vicinal.data.augment import Augment
from vicinal.errors import ConfigError

CLOSE = {"rtol": 1e-7, "atol": 1e-7}


class Renormalized(nn.Module):
    """A BatchNorm layer with test-time batch renormalization, channel by channel."""

    def __init__(self, layer: nn.BatchNorm2d, smoothing: float) -> None:
        super().__init__()
        self.layer, self.smoothing = layer, smoothing
        self.average: list[tuple[Tensor, Tensor]] | None = None
        self.joins = True

    def forward(self, x: Tensor) -> Tensor:
        out, new = [], []
        for c in range(x.shape[1]):
            mean = x[:, c].mean()
            deviation = ((x[:, c] - mean).pow(2).mean() + self.layer.eps).sqrt()
            own = mean.detach(), deviation.detach()
            m, s = own if self.average is None else self.average[c]
            normalized = (x[:, c] - mean) / deviation * (own[1] / s) + (own[0] - m) / s
            out.append(normalized * self.layer.weight[c] + self.layer.bias[c])
            a = self.smoothing
            new.append((a * m + (1 - a) * own[0], a * s + (1 - a) * own[1]))
        if self.joins:
            self.average = new
        return torch.stack(out, 1)


class Reference:
    """DELTA from scratch; `tbr` says whether layers renormalize, else they run on the batch."""

    def __init__(self, model: nn.Module, tbr: bool = True, **constants: float) -> None:
        self.model: Any = copy.deepcopy(model).train()
        self.balance, self.frequency = constants.get("balance", 0.95), None
        self.layers = []
        for name, layer in list(self.model.named_modules()):
            if tbr and isinstance(layer, nn.BatchNorm2d):
                self.layers.append(Renormalized(layer, constants.get("smoothing", 0.95)))
                parent, _, last = name.rpartition(".")
                setattr(self.model.get_submodule(parent), last, self.layers[-1])
        norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        values = [value for layer in norms for value in (layer.weight, layer.bias)]
        self.optimizer = torch.optim.Adam(values, lr=constants.get("lr", 1e-3))
        self.weights: list[list[float]] = []

    def joining(self, joins: bool) -> None:
        for layer in self.layers:
            layer.joins = joins

    def loss(self, logits: Tensor) -> Tensor:
        p = logits.softmax(1)
        if self.frequency is None:
            self.frequency = [1 / p.shape[1]] * p.shape[1]
        raw = [1 / self.frequency[int(row.argmax())] for row in p]
        weights = [w * len(raw) / sum(raw) for w in raw]
        self.weights.append(weights)
        mean = p.detach().mean(0).tolist()
        self.frequency = [
            self.balance * q + (1 - self.balance) * m for q, m in zip(self.frequency, mean, strict=True)
        ]
        return sum(w * -(row * row.log()).sum() for w, row in zip(weights, p, strict=True)) / len(p)

    def step(self, x: Tensor, steps: int = 1, after: bool = False) -> Tensor:
        for count in range(steps):
            self.joining(count == 0)  # a batch joins the averages once
            logits = self.model(x)
            self.model.zero_grad()
            self.loss(logits).backward()
            self.optimizer.step()
        self.joining(False)
        return self.model(x).detach() if after else logits.detach()


def norms(model: Any) -> list[nn.BatchNorm2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]


def compare(adapter: Any, reference: Reference, batches: list[Tensor], **step: Any) -> None:
    for x in batches:
        torch.testing.assert_close(adapter(x), reference.step(x, **step), **CLOSE)
    for found, expected in zip(norms(adapter.model), norms(reference.model), strict=True):
        torch.testing.assert_close(found.weight, expected.weight, **CLOSE)
        torch.testing.assert_close(found.bias, expected.bias, **CLOSE)
    for found, layer in zip(norms(adapter.model), reference.layers, strict=False):
        mean, deviation = (torch.stack(part) for part in zip(*layer.average, strict=True))
        torch.testing.assert_close(found.running_mean, mean, **CLOSE)
        torch.testing.assert_close(found.running_var, deviation**2 - found.eps, **CLOSE)


def test_the_defaults_are_the_papers(make_source: Any, images: Any) -> None:
    source = make_source()
    reference = Reference(source.model)
    compare(adapt(source, "delta"), reference, [images(n, n) for n in (7, 6, 5, 8)])
    assert max(reference.weights[-1]) > 1.001  # not Tent: classes weigh differently by now
    defaults = METHODS["delta"].defaults
    assert (defaults.smoothing, defaults.balance, defaults.lr) == (0.95, 0.95, 1e-3)
    assert (defaults.predict, defaults.parameters, defaults.optimizer) == ("before", "norm", "adam")
    assert (defaults.statistics.kind, defaults.renormalize) == ("stream", True)


@pytest.mark.parametrize(("steps", "predict"), [(1, "after"), (3, "before"), (2, "after")])
def test_variants_agree(make_source: Any, images: Any, steps: int, predict: str) -> None:
    source, constants = make_source(), {"smoothing": 0.7, "balance": 0.6, "lr": 3e-3}
    reference, adapter = Reference(source.model, **constants), None
    adapter = adapt(source, "delta", steps=steps, predict=predict, **constants)
    batches = [images(n, n) for n in (7, 6, 5)]
    compare(adapter, reference, batches, steps=steps, after=predict == "after")


def test_on_batch_statistics_only_the_classes_are_balanced(make_source: Any, images: Any) -> None:
    source = make_source()
    reference = Reference(source.model, tbr=False, balance=0.5)
    adapter = adapt(source, "delta", statistics="batch", balance=0.5)
    compare(adapter, reference, [images(n, n) for n in (7, 6, 5)])


def test_without_balance_or_stream_it_is_tent(make_source: Any, images: Any) -> None:
    import vicinal.adapters.tent  # noqa: F401

    source = make_source()
    one, other = adapt(source, "delta", statistics="batch", balance=1.0), adapt(source, "tent")
    for n in (7, 6, 5):
        torch.testing.assert_close(one(images(n, n)), other(images(n, n)), **CLOSE)


def test_the_house_average_takes_over_where_told(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(7)
    plain = adapt(source, "bn", statistics="stream")(x)
    torch.testing.assert_close(adapt(source, "delta", renormalize=False)(x), plain, **CLOSE)
    batch = adapt(source, "bn", statistics="batch")(x)
    torch.testing.assert_close(adapt(source, "delta")(x), batch, **CLOSE)  # averages start as the first batch


def test_an_augmented_view_leaves_averages_and_predictions_alone(make_source: Any, images: Any) -> None:
    source, view = make_source(), Augment(min_scale=0.5)
    plain, augmented = adapt(source, "delta"), adapt(source, "delta", augment=view)
    assert torch.equal(plain(images(7)), augmented(images(7)))
    for one, other in zip(norms(plain.model), norms(augmented.model), strict=True):
        torch.testing.assert_close(one.running_mean, other.running_mean, **CLOSE)
        assert not torch.allclose(one.weight, other.weight, rtol=0, atol=1e-6)


def test_a_single_image_runs_on_the_averages_and_joins_them(make_source: Any, images: Any) -> None:
    source = make_source()
    for first in ([], [images(7)]):
        adapter, inputs = adapt(source, "delta", smoothing=0.8), []
        for x in first:
            adapter(x)
        layer, frozen = norms(adapter.model)[0], copy.deepcopy(adapter.model).eval()
        handle = layer.register_forward_hook(lambda _, given, __, seen=inputs: seen.append(given[0]))
        mean, variance = layer.running_mean.clone(), layer.running_var.clone() + layer.eps
        torch.testing.assert_close(adapter(images(1, 3)), frozen(images(1, 3)).detach(), **CLOSE)
        handle.remove()
        x = inputs[0].detach()[0].flatten(1)
        shift = x.mean(1) - mean
        spread = 0.8 * variance + 0.2 * (x.var(1, correction=0) + layer.eps) + 0.16 * shift**2
        torch.testing.assert_close(layer.running_mean, mean + 0.2 * shift, **CLOSE)
        torch.testing.assert_close(layer.running_var + layer.eps, spread, **CLOSE)


def test_a_class_that_never_comes_does_not_break_the_weights(make_source: Any, images: Any) -> None:
    adapter = adapt(make_source(), "delta", balance=0.0)
    adapter(images(5))
    adapter.memory["frequency"] = torch.tensor([1.0, 0.0, 0.0, 0.0]).double()
    assert adapter(images(5, 1)).isfinite().all()
    assert all(value.isfinite().all() for value in adapter.model.parameters())


def test_constants_out_of_range_are_refused(make_source: Any) -> None:
    for wrong in ({"smoothing": 1.0}, {"balance": 1.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            adapt(make_source(), "delta", **wrong)
