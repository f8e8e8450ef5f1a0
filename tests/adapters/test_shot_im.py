"""SHOT-IM against its words: loops over samples and classes, torch.optim.Adam on a deepcopy."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vicinal.adapters.shot_im  # noqa: F401  registers the method
from vicinal.adapters.methods import METHODS, adapt
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError, ConfigError

CLOSE = {"rtol": 1e-7, "atol": 1e-7}
SEED = 4


class Reference:
    """The method from scratch."""

    def __init__(self, model: nn.Module, on_batch: bool, lr: float, **constants: float) -> None:
        self.model: Any = copy.deepcopy(model).train(on_batch)
        self.threshold, self.weight, self.floor = (constants[n] for n in ("threshold", "weight", "floor"))
        self.optimizer = torch.optim.Adam(self.model.features.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(SEED)

    def loss(self, logits: Tensor, told: Tensor) -> Tensor:
        p = torch.stack([row.exp() / row.exp().sum() for row in logits])
        entropy = -sum(v * v.log() for row in p for v in row) / len(p)
        marginal = [p[:, c].mean() for c in range(p.shape[1])]
        diversity = sum(m * torch.log(m + self.floor) for m in marginal)
        sure = [i for i in range(len(p)) if told[i].softmax(0).max() > self.threshold]
        labels = [-p[i, int(told[i].argmax())].log() for i in sure]
        return entropy + diversity + self.weight * (sum(labels) / len(labels) if labels else 0)

    def step(self, x: Tensor, steps: int = 1, after: bool = False, augment: Augment | None = None) -> Tensor:
        for _ in range(steps):
            told = self.model(x)
            logits = told if augment is None else self.model(augment(x, self.generator))
            self.model.zero_grad()
            self.loss(logits, told.detach()).backward()
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


def test_the_defaults_are_those_of_the_t3a_code(make_source: Any, images: Any) -> None:
    source = sharp(make_source())
    for told, weight in (({}, 0.1), ({"label_weight": 0.0}, 0.0)):  # its SHOT and its SHOTIM
        reference = Reference(source.model, False, 5e-5, threshold=0.9, weight=weight, floor=1e-5)
        compare(adapt(source, "shot_im", **told), reference, [images(n, n) for n in (8, 7, 6)])
    defaults = METHODS["shot_im"].defaults
    assert (defaults.lr, defaults.predict, defaults.parameters) == (5e-5, "before", "features")
    assert (defaults.threshold, defaults.label_weight, defaults.floor) == (0.9, 0.1, 1e-5)
    assert (defaults.optimizer, defaults.statistics.kind) == ("adam", "source")


@pytest.mark.parametrize("kind", ["batch", "source"])
@pytest.mark.parametrize(
    ("steps", "predict", "threshold", "weight", "floor"),
    [(1, "after", 0.6, 0.7, 0.05), (3, "before", 0.8, 0.0, 1e-3)],
)
def test_variants_agree(
    make_source: Any,
    images: Any,
    kind: str,
    steps: int,
    predict: str,
    threshold: float,
    weight: float,
    floor: float,
) -> None:
    source = sharp(make_source())
    told = {"statistics": kind, "steps": steps, "predict": predict, "lr": 1e-3}
    constants = {"threshold": threshold, "floor": floor}
    adapter = adapt(source, "shot_im", label_weight=weight, **constants, **told)
    reference = Reference(source.model, kind == "batch", 1e-3, weight=weight, **constants)
    compare(adapter, reference, [images(8, 1), images(7, 2)], steps=steps, after=predict == "after")


def test_labels_come_from_the_clean_view(make_source: Any, images: Any) -> None:
    source, view = sharp(make_source()), Augment(min_scale=0.5)
    reference = Reference(source.model, False, 1e-3, threshold=0.6, weight=1.0, floor=1e-5)
    told = {"threshold": 0.6, "label_weight": 1.0, "lr": 1e-3, "augment": view, "seed": SEED}
    compare(adapt(source, "shot_im", **told), reference, [images(8, 1), images(7, 2)], augment=view)


def test_the_head_stays_and_information_grows(make_source: Any, images: Any) -> None:
    def information(logits: Tensor) -> Tensor:
        each = torch.distributions.Categorical(logits=logits)
        return torch.distributions.Categorical(probs=each.probs.mean(0)).entropy() - each.entropy().mean()

    source, x = sharp(make_source()), images(32)
    adapter = adapt(source, "shot_im", lr=1e-5, steps=10, label_weight=0.0)
    assert information(adapter(x)) > information(adapt(source, "erm")(x)) + 1e-3
    assert torch.equal(adapter.model.head.weight, source.model.head.weight)
    assert torch.equal(adapter.model.head.bias, source.model.head.bias)


def test_of_one_image_only_a_confident_label_teaches(make_source: Any, images: Any) -> None:
    source = sharp(make_source())
    told = {"label_weight": 0.1, "floor": 1e-12, "optimizer": "sgd", "lr": 1.0}
    unsure = adapt(source, "shot_im", threshold=0.9999, **told)
    unsure(images(1))
    taught = adapt(source, "shot_im", threshold=0.1, **told)
    taught(images(1))
    for found, other, start in zip(
        unsure.model.features.parameters(),
        taught.model.features.parameters(),
        source.model.features.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(found, start, rtol=0, atol=1e-9)
        assert start.abs().max() == 0 or not torch.allclose(other, start, rtol=0, atol=1e-7)


def test_a_model_without_a_head_is_refused_unless_told_what_to_update(images: Any) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), *pooled)
    net = net.double()
    with pytest.raises(AdapterError, match="head="):
        adapt(net, "shot_im")
    assert adapt(net, "shot_im", parameters="norm")(images(5)).shape == (5, 4)


def test_constants_out_of_range_are_refused(make_source: Any) -> None:
    for wrong in ({"threshold": 1.0}, {"label_weight": -1.0}, {"floor": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            adapt(make_source(), "shot_im", **wrong)
