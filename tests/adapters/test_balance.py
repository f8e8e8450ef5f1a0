"""Statistics in which classes count alike, against layers put in by hand and a count of classes by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal.adapters.balance import ClassBalance, Weighed, part_of
from vicinal.adapters.methods import adapt
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError
from vicinal.functional.normalization import Moments, moments_of

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
LR = 1e-3


class Counter:
    """The classes of a stream as the source sees them, counted as the statistics are averaged."""

    def __init__(self, slow: Any, source: Any) -> None:
        self.slow, self.source = slow, copy.deepcopy(source.model).eval()
        classes = len(source.model.head.bias)
        self.shares, self.images, self.agreed = [1 / classes] * classes, 0, 0.75

    def begin(self, x: Tensor) -> None:
        """Tell the layers what the images of a batch count."""
        self.slow.begin()
        self.found = found = self.source(x).argmax(-1).tolist()
        weight = len(x) / (self.slow.count + self.images + len(x))
        weight = max(weight, 1 - (1 - self.slow.floor) ** (len(x) / self.slow.count))
        here = [found.count(label) / len(x) for label in range(len(self.shares))]
        self.shares = [(1 - weight) * old + weight * new for old, new in zip(self.shares, here, strict=True)]
        self.images, self.weight, equal = self.images + len(x), weight, 1 / len(self.shares)
        trust = min(1.0, max(0.0, 4 * self.agreed - 2))
        believed = [equal + trust * (share - equal) for share in self.shares]
        for layer in self.slow.layers:
            layer.each = [equal / believed[label] for label in found]
            layer.missing = sum(abs(share - equal) for share in believed) / 2

    def end(self, logits: Tensor) -> None:
        """Count how often the model has said the same."""
        pairs = zip(logits.argmax(-1).tolist(), self.found, strict=True)
        same = sum(one == other for one, other in pairs) / len(self.found)
        self.agreed = (1 - self.weight) * self.agreed + self.weight * same


@pytest.mark.parametrize("config", [{}, {"source_images": 4, "floor": 0.5}])
@pytest.mark.parametrize("sizes", [(6, 9, 4), (1, 1, 1), (6, 1, 30)])
def test_the_average_of_a_stream_whose_classes_count_alike(
    make_source: Any, images: Any, slow_stream: Any, config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    source = make_source()
    adapter = adapt(source, "bn", statistics=StatisticsConfig("balanced", **config))
    slow = slow_stream(source, config.get("source_images", 20), config.get("floor", 0.05))
    counter = Counter(slow, source)
    for seed, count in enumerate(sizes):
        x = images(count, seed)
        counter.begin(x)
        found = adapter(x)
        torch.testing.assert_close(found, slow.take(x)[1], **CLOSE)
        counter.end(found)
        assert float(adapter.norm.balance.agreed) == pytest.approx(counter.agreed)
        assert adapter.norm.balance.shares.tolist() == pytest.approx(counter.shares)
    assert float(adapter.norm.seen) == pytest.approx(slow.images)
    assert float(adapter.norm.balance.seen) == sum(sizes)


@pytest.mark.parametrize("augment", [None, Augment(min_scale=0.5)])
@pytest.mark.parametrize("steps", [1, 2])
def test_updates_run_on_its_values_and_carry_both_parts_along(
    make_source: Any, images: Any, slow_stream: Any, steps: int, augment: Augment | None
) -> None:
    source = make_source()
    adapter = adapt(source, "soft", statistics="balanced", lr=LR, steps=steps, augment=augment)
    slow, generator = slow_stream(source), torch.Generator().manual_seed(0)
    counter, optimizer = Counter(slow, source), torch.optim.Adam(slow.model.parameters(), lr=LR)
    for seed, count in enumerate((6, 30, 9, 1)):
        x = images(count, seed)
        counter.begin(x)
        if augment is not None:
            slow.look(x)
        for _ in range(steps):
            logits = slow.look(x if augment is None else augment(x, generator))
            optimizer.zero_grad()
            torch.distributions.Categorical(logits=logits).entropy().mean().backward()
            optimizer.step()
        found = adapter(x)
        torch.testing.assert_close(found, slow.take(x)[1], **CLOSE)
        counter.end(found)
    assert counter.agreed > 0.5, "so that shares are believed, at least in part"


def test_both_parts_are_carried_along_with_an_update_after_the_prediction(
    make_source: Any, images: Any, slow_stream: Any
) -> None:
    source = make_source()
    adapter = adapt(source, "tent", statistics="balanced", lr=LR, parameters="all")
    slow = slow_stream(source)
    counter, optimizer = Counter(slow, source), torch.optim.Adam(slow.model.parameters(), lr=LR)
    for seed, count in enumerate((6, 30, 9, 1)):
        x = images(count, seed)
        counter.begin(x)
        found = adapter(x)
        torch.testing.assert_close(found, slow.take(x)[1].detach(), **CLOSE)
        joined = [layer.seen for layer in slow.layers]
        optimizer.zero_grad()
        torch.distributions.Categorical(logits=slow.look(x)).entropy().mean().backward()
        optimizer.step()
        slow.carry(x, joined)
        counter.end(found)
    homes = [layer.home[0] for layer in slow.layers]
    assert any(not torch.equal(home, layer.source[0]) for home, layer in zip(homes, slow.layers, strict=True))
    for index, home in enumerate(homes):
        torch.testing.assert_close(adapter.norm.get_buffer(f"home_mean_{index}"), home, **CLOSE)


def one_class(adapter: Any, x: Tensor) -> Tensor:
    """Return the images of a batch that the source takes for its most frequent class."""
    c = adapter.source.model.eval()(x).argmax(-1)
    return x[c == c.mode().values]


def test_a_stream_of_one_class_goes_back_to_the_sources_statistics(make_source: Any, images: Any) -> None:
    source = make_source()
    stream, balanced = (adapt(source, "bn", statistics=kind) for kind in ("stream", "balanced"))
    x = one_class(balanced, images(64))
    plain = source.model.eval()(x).detach()
    away = []
    for adapter in (stream, balanced):
        for _ in range(40):
            if adapter is balanced:
                adapter.norm.balance.agreed.fill_(1.0)
            logits = adapter(x)
        away.append(float((logits - plain).square().mean()))
    assert float(balanced.norm.balance.shares.max()) > 0.95
    assert away[1] < 0.25 * away[0]


def test_what_is_known_of_a_batch_that_fails_is_forgotten(make_source: Any, images: Any) -> None:
    failed, fresh = (adapt(make_source(), "bn", statistics="balanced") for _ in range(2))

    def fail(*_: Any) -> None:
        raise RuntimeError

    handle = failed.model.head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError):
        failed(images(6))
    handle.remove()
    for seed in range(2):
        assert torch.equal(failed(images(5, seed)), fresh(images(5, seed)))


def test_a_frozen_copy_is_told_what_images_count_and_tells_nobody(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter = adapt(source, "vnl", statistics="balanced", predict="own", lr=1e-12)
    still = adapt(source, "bn", statistics="balanced")
    for seed in range(3):
        adapter(images(6, seed))
        still(images(6, seed))
    assert torch.equal(adapter.norm.balance.shares, still.norm.balance.shares)
    assert torch.equal(adapter.norm.balance.seen, still.norm.balance.seen)
    assert not hasattr(adapter.anchor_norm, "balance")
    for name in ("stream_mean_0", "stream_variance_1"):
        torch.testing.assert_close(adapter.anchor_norm.get_buffer(name), still.norm.get_buffer(name))


def test_a_net_without_batch_normalization_has_nothing_to_balance(make_source: Any) -> None:
    assert not hasattr(adapt(make_source(backbone="small_gn"), "bn", statistics="balanced").norm, "balance")


def test_the_source_stays_as_it_is_when_the_adapter_is_set_to_train(make_source: Any, images: Any) -> None:
    trained, left = (adapt(make_source(), "bn", statistics="balanced") for _ in range(2))
    for seed in range(3):
        trained.train()
        assert torch.equal(trained(images(6, seed)), left(images(6, seed)))


class Rows(nn.Module):
    """A layer that folds places into the batch, as some nets do, or keeps them behind the channels."""

    def __init__(self, folds: bool) -> None:
        super().__init__()
        self.norm, self.folds = nn.BatchNorm1d(4), folds

    def forward(self, x: Tensor) -> Tensor:  # (N, T, C)
        if self.folds:
            return self.norm(x.flatten(0, 1)).view(x.shape)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Places(nn.Module):
    """A net of one such layer."""

    def __init__(self, folds: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.rows, self.head = nn.Conv2d(3, 4, 3), Rows(folds), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rows(self.conv(x).flatten(2).transpose(1, 2)).amax(1))


@pytest.mark.parametrize("method", ["bn", "soft"])
def test_rows_of_an_image_count_as_the_image_does(images: Any, method: str) -> None:
    nets = [Places(folds).eval() for folds in (True, False)]
    for net in nets:  # all classes are predicted
        net.head.bias.data -= net(images(64).float()).mean(0).detach()
    folded, plain = (adapt(net, method, statistics="balanced") for net in nets)
    for seed in range(4):
        for adapter in (folded, plain):
            adapter.norm.balance.agreed.fill_(1.0)
        x = images(9, seed).float()
        torch.testing.assert_close(folded(x), plain(x), rtol=1e-4, atol=1e-5)
    each = plain.norm.weighed.each
    assert float(each.max() / each.min()) > 1.2, "some classes are rarer than others"


def test_views_of_a_batch_count_as_the_batch_and_other_images_alike() -> None:
    told = Weighed(torch.tensor([1.0, 2.0]), torch.tensor(0.3), torch.ones(2) / 2)
    moments = Moments(torch.zeros(3), torch.ones(3))
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    once = part_of(x, told, moments, moments, torch.tensor(0.5), None)
    views = part_of(torch.cat([x, x, x]), told.seen_in(3), moments, moments, torch.tensor(0.5), None)
    torch.testing.assert_close(views.batch, once.batch)
    other = part_of(torch.cat([x, x[:1]]), told, moments, moments, torch.tensor(0.5), None)
    torch.testing.assert_close(other.batch, moments_of(torch.cat([x, x[:1]])))


def test_teachers_are_told_what_images_count_and_keep_no_source_of_their_own(make_source: Any) -> None:
    for method in ("cotta", "rotta"):
        adapter = adapt(make_source(), method, statistics="balanced")
        assert sum(isinstance(module, ClassBalance) for module in adapter.modules()) == 1


def test_a_net_without_a_linear_head_is_told_what_balanced_statistics_need() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(AdapterError, match="balanced statistics count classes"):
        adapt(net, "bn", statistics="balanced")


class TwoHeads(nn.Module):
    """A net whose last linear layer is not what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(x))
        return logits[:, :3]


def test_logits_that_are_not_the_last_layers_are_one_line(images: Any) -> None:
    adapter = adapt(TwoHeads(), "bn", statistics="balanced")
    with pytest.raises(AdapterError, match="3 logits and its last linear layer 5"):
        adapter(images(6).float())
