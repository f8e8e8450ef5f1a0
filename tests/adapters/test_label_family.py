"""The label methods against the paper's words written out again: deepcopy, torch.optim.Adam, plain loops."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from vicinal.adapters.methods import adapt
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError
from vicinal.models.classifier import Classifier

LR, DRAWS, SEED = 1e-3, 3, 4
ALGORITHMS = {"neighbor": "neighbor", "vnl_paper": "meta"}
METHODS = ("hard", "soft", "probabilistic", "neighbor", "vnl_paper")
Loss = Callable[[Tensor], Tensor]


class Reference:
    """One method from scratch; `on_batch` is the mode BatchNorm runs in throughout."""

    def __init__(self, source: Trained, method: str, on_batch: bool, draws: int = DRAWS) -> None:
        self.model: Classifier = copy.deepcopy(source.model).train(on_batch)
        self.phi: Any = source.phi
        self.method, self.draws = method, draws
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR)
        self.generator = torch.Generator().manual_seed(SEED)

    def step(self, x: Tensor, steps: int = 1, augment: Augment | None = None) -> Tensor:
        for _ in range(steps):
            z = self.model.embed(x)
            loss = self.told(z.detach(), self.model.head(z).detach())
            view = x if augment is None else augment(x, self.generator)
            self.optimizer.zero_grad()
            loss(self.model(view)).backward()
            self.optimizer.step()
        return self.model(x).detach()

    def told(self, z: Tensor, logits: Tensor) -> Loss:
        """Return the loss that what the model says of the clean batch defines."""
        if self.method == "hard":
            return lambda out: cross_entropy(out, logits.argmax(1))
        if self.method == "soft":  # its label is the very output the gradient is taken of
            return lambda out: torch.distributions.Categorical(logits=out).entropy().mean()
        if self.method == "probabilistic":
            p = logits.softmax(1)
            draws = torch.multinomial(p, self.draws, replacement=True, generator=self.generator)
            return lambda out: sum(cross_entropy(out, draws[:, s]) for s in range(self.draws)) / self.draws
        y_hat = self.neighbor_labels(z, logits)
        return lambda out: cross_entropy(out, y_hat)

    def neighbor_labels(self, z: Tensor, logits: Tensor) -> Tensor:
        """Return Eq. (5) class by class and draw by draw."""
        rows, bias = self.model.head.weight.detach().clone(), self.model.head.bias.detach()
        spread = torch.zeros_like(rows)
        for c in range(len(rows)):
            members = z[logits.argmax(1) == c]
            mean = members.mean(0) if len(members) else torch.zeros_like(z[0])
            hidden = nn.functional.relu(self.phi.trunk[0](mean))
            if len(members):
                rows[c] += self.phi.mean(hidden)
            spread[c] = self.phi.log_std(hidden).exp()
        if self.draws == 0:
            return (z @ rows.T + bias).softmax(1).detach()
        noise = torch.randn(self.draws, *rows.shape, generator=self.generator, dtype=rows.dtype)
        y_hat = torch.zeros_like(logits)
        for s in range(self.draws):
            y_hat += (z @ (rows + spread * noise[s]).T + bias).softmax(1) / self.draws
        return y_hat.detach()


def adapter_of(source: Trained, method: str, kind: str, **options: Any) -> Any:
    return adapt(source, method, statistics=kind, lr=LR, seed=SEED, **{"num_samples": DRAWS, **options})


def compare(adapter: Any, reference: Reference, batches: list[Tensor], **step: Any) -> None:
    start = reference.model.head.weight.detach().clone()
    for x in batches:
        torch.testing.assert_close(adapter(x), reference.step(x, **step), rtol=1e-6, atol=1e-6)
    for (name, found), expected in zip(
        adapter.model.named_parameters(), reference.model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda text, at=name: at + text)
    assert (reference.model.head.weight - start).abs().max() > LR / 2


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize("method", METHODS)
def test_three_batches_agree(make_source: Any, images: Any, method: str, kind: str) -> None:
    source = make_source(ALGORITHMS.get(method, "erm"))
    reference = Reference(source, method, on_batch=kind == "batch")
    compare(adapter_of(source, method, kind), reference, [images(7, seed) for seed in range(3)])


@pytest.mark.parametrize("method", METHODS)
def test_two_updates_a_batch_agree(make_source: Any, images: Any, method: str) -> None:
    source = make_source(ALGORITHMS.get(method, "erm"))
    reference = Reference(source, method, on_batch=True)
    compare(adapter_of(source, method, "batch", steps=2), reference, [images(7, 0), images(5, 1)], steps=2)


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize("method", METHODS)
def test_labels_come_from_the_clean_view_and_gradients_from_the_augmented_one(
    make_source: Any, images: Any, method: str, kind: str
) -> None:
    source, view = make_source(ALGORITHMS.get(method, "erm")), Augment(min_scale=0.5)
    reference = Reference(source, method, on_batch=kind == "batch")
    adapter = adapter_of(source, method, kind, augment=view)
    compare(adapter, reference, [images(7, 0), images(5, 1)], augment=view)


@pytest.mark.parametrize("method", ["neighbor", "vnl_paper"])
def test_without_draws_the_mean_of_w_labels(make_source: Any, images: Any, method: str) -> None:
    source = make_source(ALGORITHMS[method])
    reference = Reference(source, method, on_batch=True, draws=0)
    compare(adapter_of(source, method, "batch", num_samples=0), reference, [images(7, 0), images(5, 1)])


@pytest.mark.parametrize("method", ["neighbor", "vnl_paper"])
def test_prediction_by_labels_updates_nothing(make_source: Any, images: Any, method: str) -> None:
    source = make_source(ALGORITHMS[method])
    reference = Reference(source, method, on_batch=True)
    adapter = adapter_of(source, method, "batch", predict="labels")
    for x in (images(7, 0), images(5, 1)):
        z, logits = reference.model.features_and_logits(x)
        torch.testing.assert_close(adapter(x).exp(), reference.neighbor_labels(z.detach(), logits.detach()))
    for found, expected in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_class_that_nobody_is_taken_for_keeps_its_row(make_source: Any, images: Any) -> None:
    source = make_source("neighbor")
    with torch.no_grad():
        source.model.head.bias[1] = -100
    reference = Reference(source, "neighbor", on_batch=True)
    compare(adapter_of(source, "neighbor", "batch"), reference, [images(7, 0), images(5, 1)])


def test_what_soft_lowers_is_the_entropy(make_source: Any, images: Any) -> None:
    x, source = images(16), make_source()
    entropies = [
        torch.distributions.Categorical(logits=adapter_of(source, "soft", "batch", steps=steps)(x)).entropy()
        for steps in (1, 5, 20)
    ]
    first, second, third = (float(value.mean()) for value in entropies)
    assert first > second > third


@pytest.mark.parametrize(("method", "algorithm"), [("neighbor", "meta"), ("vnl_paper", "neighbor")])
def test_a_phi_of_the_other_training_is_refused(make_source: Any, method: str, algorithm: str) -> None:
    with pytest.raises(AdapterError, match=f"--algorithm {ALGORITHMS[method]}"):
        adapt(make_source(algorithm), method)
