"""MEMO against the paper written out again: one image at a time, a fresh copy of the source for each."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal.adapters.memo import MemoSettings
from vicinal.adapters.methods import adapt
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import ConfigError

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class PriorNorm(nn.Module):
    """BatchNorm on so much of the source's moments and the rest of what it is fed, held constant."""

    def __init__(self, layer: nn.BatchNorm2d, strength: float) -> None:
        super().__init__()
        self.layer, self.prior = layer, strength / (strength + 1)

    def forward(self, x: Tensor) -> Tensor:
        own = x.detach().transpose(0, 1).flatten(1)
        mean = self.prior * self.layer.running_mean + (1 - self.prior) * own.mean(1)
        var = self.prior * self.layer.running_var + (1 - self.prior) * own.var(1, correction=0)
        y = (x - mean[:, None, None]) / (var + self.layer.eps).sqrt()[:, None, None]
        return y * self.layer.weight[:, None, None] + self.layer.bias[:, None, None]


def with_prior(module: nn.Module, strength: float = 16) -> Any:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, PriorNorm(child, strength))
        else:
            with_prior(child, strength)
    return module


class SlowMemo:
    """The method at its defaults unless told otherwise; `mode` is how BatchNorm runs."""

    def __init__(self, source: Any, mode: str = "blend", **told: Any) -> None:
        self.told = {"lr": 2.5e-4, "views": 32, "steps": 1, "augment": AugMix(), "momentum": 0.0} | told
        self.mode, self.generator = mode, torch.Generator().manual_seed(0)
        self.source = source.model if mode != "blend" else with_prior(copy.deepcopy(source.model))
        self.online: Any = None

    def batch(self, x: Tensor, online: bool = False, before: bool = False) -> Tensor:
        told = self.told
        drawn = [told["augment"].draw(told["views"], 8, 8, self.generator) for _ in range(told["steps"])]
        return torch.cat([self.image(x[i : i + 1], drawn, online, before) for i in range(len(x))])

    def image(self, x: Tensor, drawn: list[Any], online: bool, before: bool) -> Tensor:
        if not online or self.online is None:
            net = copy.deepcopy(self.source).train(self.mode == "batch")
            rule = torch.optim.SGD(net.parameters(), lr=self.told["lr"], momentum=self.told["momentum"])
            self.online = net, rule
        net, rule = self.online
        for draws in drawn:
            views = self.told["augment"].apply(x.repeat(self.told["views"], 1, 1, 1), draws).double()
            earlier = self.predict(net, x, views)
            mean = sum(p.softmax(0) for p in net(views)) / len(views)
            rule.zero_grad()
            (-(mean * mean.log()).sum()).backward()
            rule.step()
        return earlier if before else self.predict(net, x, views)

    def predict(self, net: Any, x: Tensor, views: Tensor) -> Tensor:
        return (net(torch.cat([x, views]))[:1] if self.mode == "batch" else net(x)).detach()


@pytest.mark.parametrize("told", [{}, {"steps": 2}], ids=["all", "but steps"])
def test_the_defaults_agree_with_the_slow_reference(make_source: Any, images: Any, told: Any) -> None:
    source = make_source()
    adapter, slow = adapt(source, "memo", **told), SlowMemo(source, **told)
    for seed, count in enumerate((3, 1, 2)):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x), slow.batch(x), **CLOSE)
    plain = adapt(source, "memo", lr=1e-12)(x)
    assert (adapter(x) - plain).abs().max() > 1e-5, "a step too small to see proves nothing"


@pytest.mark.parametrize("kind", ["source", "batch", "blend"])
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_every_mode_agrees(make_source: Any, images: Any, kind: str, online: bool, before: bool) -> None:
    source, view = make_source(), Augment(min_scale=0.5)
    told = {"lr": 1e-2, "views": 5, "steps": 2, "augment": view, "momentum": 0.5}
    options = {**told, "online": online, "predict": "before" if before else "own"}
    adapter = adapt(source, "memo", statistics=kind, **options)
    slow = SlowMemo(source, kind, **told)
    for seed in range(2):
        x = images(3, seed)
        torch.testing.assert_close(adapter(x), slow.batch(x, online, before), **CLOSE)
    if not online:
        for found, expected in zip(adapter.model.parameters(), source.model.parameters(), strict=True):
            assert torch.equal(found, expected)


def test_on_stream_statistics_predictions_run_on_the_average(make_source: Any, images: Any) -> None:
    """So small a step leaves what `bn` does on the same stream."""
    source = make_source()
    adapter = adapt(source, "memo", statistics="stream", lr=1e-13, views=2)
    plain = adapt(source, "bn", statistics=adapter.settings.statistics)
    for seed, count in enumerate((4, 1, 3)):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x), plain(x), **CLOSE)


def test_images_do_not_see_each_other(make_source: Any, images: Any) -> None:
    source, x = make_source(), images(4)
    whole, alone = adapt(source, "memo", lr=1e-2, views=3), adapt(source, "memo", lr=1e-2, views=3)
    torch.testing.assert_close(alone(x[2:3]), whole(x)[2:3], **CLOSE)


@pytest.mark.parametrize("wrong", [{"views": 0}, {"augment": None}])
def test_settings_out_of_range_are_refused(make_source: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="memo needs"):
        adapt(make_source(), "memo", **wrong)


def test_steps_that_shorten_along_the_stream_need_a_stream() -> None:
    with pytest.raises(ConfigError, match="anew with every image"):
        MemoSettings(horizon=100.0)
    assert MemoSettings(horizon=100.0, online=True).horizon == 100.0
