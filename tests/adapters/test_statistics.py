"""Normalization statistics against layers put in by hand that compute them channel by channel."""

import contextlib
import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from vicinal.adapters.layers import running
from vicinal.adapters.methods import adapt
from vicinal.adapters.statistics import KINDS, StatisticsConfig
from vicinal.data.augment import Augment
from vicinal.errors import ConfigError
from vicinal.models.classifier import Classifier

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
LR = 1e-3
Pair = tuple[Tensor, Tensor]


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]


def mode(model: nn.Module, on_batch: bool) -> nn.Module:
    for layer in norms(model.eval()):
        layer.train(on_batch)
        layer.momentum = 0.0
    return model


@torch.no_grad()
def seen_by_layers(model: nn.Module, x: Tensor, on_batch: bool) -> list[Pair]:
    """Return mean and variance of what enters every BatchNorm layer, channel by channel."""
    held: list[Pair] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        channels = [inputs[0][:, c].flatten() for c in range(inputs[0].shape[1])]
        means = [values.sum() / len(values) for values in channels]
        spreads = [((v - m) ** 2).sum() / len(v) for v, m in zip(channels, means, strict=True)]
        held.append((torch.stack(means), torch.stack(spreads)))

    hooks = [layer.register_forward_pre_hook(keep) for layer in norms(model)]
    mode(model, on_batch)(x)
    for hook in hooks:
        hook.remove()
    return held


def stored(model: nn.Module) -> list[Pair]:
    return [(layer.running_mean.clone(), layer.running_var.clone()) for layer in norms(model)]


def check_buffers(adapter: Any, expected: list[Pair]) -> None:
    for found, wanted in zip(stored(adapter.model), expected, strict=True):
        torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("backbone", ["small", "small_gn"])
def test_batch_statistics_are_those_of_training_mode(make_source: Any, images: Any, backbone: str) -> None:
    source = make_source(backbone=backbone)
    adapter, training = adapt(source, "bn"), copy.deepcopy(source.model).train()
    for seed, count in enumerate((6, 2, 9)):
        x = images(count, seed)
        assert torch.equal(adapter(x), training(x).detach())


def test_source_statistics_are_those_of_evaluation_mode(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter = adapt(source, "bn", statistics="source")
    for count in (6, 1):
        assert torch.equal(adapter(images(count)), source.model(images(count)).detach())


@pytest.mark.parametrize("config", [{}, {"source_images": 4, "floor": 0.5}, {"source_images": 1}])
@pytest.mark.parametrize("sizes", [(6, 9, 4), (1, 1, 1), (6, 1, 5)])
def test_the_average_over_a_stream(
    make_source: Any, images: Any, slow_stream: Any, config: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    source = make_source()
    adapter = adapt(source, "bn", statistics=StatisticsConfig("stream", **config))
    slow = slow_stream(source, config.get("source_images", 20), config.get("floor", 0.05))
    for seed, count in enumerate(sizes):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x), slow.predict(x), **CLOSE)
        check_buffers(adapter, slow.average)


def test_a_long_stream_forgets_the_source(make_source: Any, images: Any) -> None:
    source = make_source()
    adapter = adapt(source, "bn", statistics=StatisticsConfig("stream", source_images=5))
    x = images(10)
    for _ in range(80):
        adapter(x)
    # The first layer sees the pixels alone: its average must arrive at the batch's own moments.
    (mean, variance), *_ = seen_by_layers(copy.deepcopy(source.model), x, on_batch=True)
    torch.testing.assert_close(norms(adapter.model)[0].running_mean, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(norms(adapter.model)[0].running_var, variance, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("augment", [None, Augment(min_scale=0.5)])
@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_average_is_carried_along_by_updates(
    make_source: Any, images: Any, slow_stream: Any, follow: bool, steps: int, augment: Augment | None
) -> None:
    source = make_source()
    statistics = StatisticsConfig("stream", follow_updates=follow)
    adapter = adapt(source, "soft", statistics=statistics, lr=LR, steps=steps, augment=augment)
    slow, generator = slow_stream(source), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(slow.model.parameters(), lr=LR)
    for seed, count in enumerate((6, 9, 1)):
        x = images(count, seed)
        slow.begin()
        if augment is not None and follow:
            slow.look(x)
        for _ in range(steps):
            logits = slow.look(x if augment is None else augment(x, generator), remember=follow)
            optimizer.zero_grad()
            torch.distributions.Categorical(logits=logits).entropy().mean().backward()
            optimizer.step()
        torch.testing.assert_close(adapter(x), slow.take(x)[1], **CLOSE)
        check_buffers(adapter, slow.average)


@pytest.mark.parametrize("follow", [True, False])
def test_what_is_predicted_before_the_update_joins_once_and_is_carried_along_after_it(
    make_source: Any, images: Any, slow_stream: Any, follow: bool
) -> None:
    source = make_source()
    statistics = StatisticsConfig("stream", follow_updates=follow)
    adapter = adapt(source, "tent", statistics=statistics, lr=LR, parameters="all")
    slow = slow_stream(source)
    optimizer = torch.optim.Adam(slow.model.parameters(), lr=LR)
    for seed, count in enumerate((6, 9, 1)):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x), slow.predict(x), **CLOSE)
        joined = [layer.seen for layer in slow.layers]
        optimizer.zero_grad()
        torch.distributions.Categorical(logits=slow.look(x)).entropy().mean().backward()
        optimizer.step()
        if follow:
            slow.carry(x, joined)
        check_buffers(adapter, slow.average)


def fed_to(layers: list[Any], model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what every layer is fed in a pass."""
    fed: list[torch.Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, given: fed.append(given[0])) for layer in layers]
    model(x)
    for hook in hooks:
        hook.remove()
    return fed


OF_OTHERS: dict[str, dict[str, Any]] = {
    "tent": {},
    "pl": {"threshold": 0.0},
    "shot_im": {},
    "sar": {"margin": 10.0},
    "eata": {"margin": 1.1, "similarity": 2.0},
    "delta": {"renormalize": False},
    "tast_bn": {},
    "cotta": {"teacher_weight": 0.5},
    "rotta": {"norm_rate": None, "update_every": 12, "teacher_rate": 0.5},
}


@pytest.mark.parametrize("predict", ["own", "before"])
@pytest.mark.parametrize("method", OF_OTHERS)
def test_no_method_leaves_an_average_of_features_that_are_no_more(
    make_source: Any, images: Any, method: str, predict: str
) -> None:
    source, x = make_source(), images(12, 0)
    # An average that is the newest batch: along one and the same it has to be what its layers are fed.
    statistics = StatisticsConfig("stream", floor=1.0)
    options = {"predict": predict, "parameters": "all", "lr": 1e-3, "augment": None} | OF_OTHERS[method]
    adapter = adapt(source, method, statistics=statistics, **options)
    start = copy.deepcopy(adapter.predictor[0].state_dict())
    for _ in range(3):
        adapter(x)
    models = {id(model): model for model in (adapter.model, adapter.predictor[0])}
    for model in models.values():
        assert any(not torch.equal(value, start[name]) for name, value in model.named_parameters())
        for layer, given in zip(norms(model), fed_to(norms(model), model.eval(), x), strict=True):
            mean, variance = given.mean((0, 2, 3)), given.var((0, 2, 3), correction=0)
            torch.testing.assert_close(layer.running_mean, mean, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(layer.running_var, variance, rtol=1e-2, atol=1e-3)


def test_a_blend_of_batch_and_source(make_source: Any, images: Any, slow_stream: Any) -> None:
    source = make_source()
    adapter = adapt(source, "bn", statistics="blend")
    for seed, count in enumerate((6, 2, 30)):
        x, slow = images(count, seed), slow_stream(source)  # nothing is kept from batch to batch
        torch.testing.assert_close(adapter(x), slow.predict(x), **CLOSE)
        check_buffers(adapter, slow.average)


@pytest.mark.parametrize("kind", ["batch", "blend"])
def test_a_batch_of_one_joins_an_average(make_source: Any, images: Any, slow_stream: Any, kind: str) -> None:
    source = make_source()
    adapter, slow = adapt(source, "bn", statistics=kind), slow_stream(source)
    for seed in range(3):
        x = images(1, seed)
        torch.testing.assert_close(adapter(x), slow.predict(x), **CLOSE)


def test_one_image_after_blended_batches_joins_an_average_without_them(
    make_source: Any, images: Any, slow_stream: Any
) -> None:
    source = make_source()
    adapter, slow = adapt(source, "bn", statistics="blend"), slow_stream(source)
    for seed, count in enumerate((30, 30, 1)):
        x = images(count, seed)
        found = adapter(x)
    torch.testing.assert_close(found, slow.predict(x), **CLOSE)
    check_buffers(adapter, slow.average)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["bn", "soft", "vnl"])
def test_the_source_keeps_its_running_buffers(make_source: Any, images: Any, method: str, kind: str) -> None:
    source = make_source()
    before = copy.deepcopy(dict(source.model.named_buffers()))
    adapter = adapt(source, method, statistics=kind)
    for seed, count in enumerate((6, 1, 5)):
        adapter(images(count, seed))
    after = dict(source.model.named_buffers())
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", ["batch", "source"])
def test_running_buffers_of_the_copy_stay_the_sources(make_source: Any, images: Any, kind: str) -> None:
    source = make_source()
    adapter = adapt(source, "hard", statistics=kind)
    for seed in range(3):
        adapter(images(6, seed))
    for found, expected in zip(stored(adapter.model), stored(source.model), strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_normalize_and_activate_in_one(
    kind: str, images: Any, slow_stream: Any, make_source: Any
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = timm.create_model("efficientnet_lite0", num_classes=0).double()
        model = Classifier(features, 1280, 4, [0.5] * 3, [0.25] * 3).double().eval()
    source = make_source()
    source.model = model
    assert {type(layer).__name__ for layer in norms(model)} == {"BatchNormAct2d"}
    adapter, slow = adapt(source, "bn", statistics=kind), slow_stream(source)
    for seed, count in enumerate((3, 1)):
        x = images(count, seed, side=32)
        found = adapter(x)
        assert found.isfinite().all()
        if kind == "stream":
            torch.testing.assert_close(found, slow.predict(x), rtol=1e-4, atol=1e-4)


def test_layers_without_running_statistics_are_left_alone(make_source: Any, images: Any) -> None:
    source = make_source()
    source.model.features[1] = nn.BatchNorm2d(24, track_running_stats=False).double()
    for kind in KINDS:
        adapter = adapt(source, "hard", statistics=kind)
        assert len(adapter.norm._layers) == 2
        assert adapter(images(6)).isfinite().all()


def small_steps(source: Any, kind: str, **told: Any) -> Any:
    return adapt(source, "soft", statistics=kind, lr=1e-12, **told)


@pytest.mark.parametrize("augment", [None, Augment(min_scale=0.5)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(1,) * 6, (6, 1, 5, 1, 1)])
def test_an_update_of_no_size_changes_nothing(
    make_source: Any, images: Any, kind: str, sizes: tuple[int, ...], augment: Augment | None
) -> None:
    source = make_source()
    adapter, still = small_steps(source, kind, augment=augment), adapt(source, "bn", statistics=kind)
    for seed, count in enumerate(sizes):
        x = images(count, seed)
        torch.testing.assert_close(adapter(x), still(x), rtol=1e-6, atol=1e-6)


class Twice(nn.Module):
    """Features that use a layer twice."""

    def __init__(self, features: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.again = nn.Conv2d(24, 24, 3, padding=1).double()

    def forward(self, x: Tensor) -> Tensor:
        first, norm = self.features[:2]
        return self.features[2:](norm(self.again(norm(first(x)).relu())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["soft", "rotta", "delta", "tent"])
def test_a_layer_may_be_used_twice(make_source: Any, images: Any, method: str, kind: str) -> None:
    source = make_source()
    torch.manual_seed(0)
    source.model.features = Twice(source.model.features)
    adapter, still = small_steps(source, kind), adapt(source, "bn", statistics=kind)
    other = adapt(source, method, statistics=kind, **({"update_every": 3} if method == "rotta" else {}))
    for seed in range(3):
        x = images(6, seed)
        torch.testing.assert_close(adapter(x), still(x), rtol=1e-6, atol=1e-6)
        assert other(x).isfinite().all()


@pytest.mark.parametrize("missing", ["weight", "bias", "both"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["soft", "delta", "rotta", "memo"])
def test_layers_without_scale_or_shift(
    make_source: Any, images: Any, method: str, kind: str, missing: str
) -> None:
    source = make_source()
    for layer in norms(source.model):
        for name in ("weight", "bias"):
            if missing in (name, "both"):
                setattr(layer, name, None)
    told: dict[str, Any] = {"parameters": "all", **({"update_every": 3} if method == "rotta" else {})}
    adapter, still = small_steps(source, kind), adapt(source, "bn", statistics=kind)
    other = adapt(source, method, statistics=kind, **told, **({"views": 4} if method == "memo" else {}))
    for seed in range(2):
        x = images(6, seed)
        torch.testing.assert_close(adapter(x), still(x), rtol=1e-6, atol=1e-6)
        assert other(x).isfinite().all()


class Failing(nn.Module):
    """A layer that fails when told to, as one that finds no memory left."""

    fails: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fails is not None:
            raise self.fails
        return x


@pytest.mark.parametrize("why", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["bn", "soft", "tent", "delta"])
def test_a_pass_that_fails_leaves_nothing_behind(
    make_source: Any, images: Any, method: str, kind: str, why: type[BaseException]
) -> None:
    source = make_source()
    weak = Failing()
    layers = list(source.model.features)
    source.model.features = nn.Sequential(*layers[:4], weak, *layers[4:])
    failed, fresh = (adapt(source, method, statistics=kind) for _ in range(2))
    assert isinstance(failed.model.features[4], Failing)
    first, second = images(6), images(5, 1)
    assert torch.equal(failed(first), fresh(first))
    failed.model.features[4].fails = why
    with pytest.raises(why):
        failed(second)
    failed.model.features[4].fails = None
    for layer in norms(failed.model):
        assert not layer.training
        assert not layer._forward_pre_hooks
        assert not layer._forward_hooks
        assert not {"weight", "bias", "running_mean", "running_var", "forward"} & layer.__dict__.keys()
        assert layer.track_running_stats
    assert torch.equal(failed(second), fresh(second))


def test_an_interruption_inside_a_layer_leaves_no_tensor_behind(
    make_source: Any, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source()
    interrupted, fresh = (adapt(source, "soft", statistics="stream") for _ in range(2))

    def interrupt(*_: Any, **__: Any) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "batch_norm", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted(images(6))
    assert torch.equal(interrupted(images(6)), fresh(images(6)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["bn", "soft", "delta", "rotta"])
def test_batches_are_not_counted(make_source: Any, images: Any, method: str, kind: str) -> None:
    """Nobody asks for the count, and on a GPU it is a kernel a layer."""
    adapter = adapt(
        make_source(), method, statistics=kind, **({"update_every": 3} if method == "rotta" else {})
    )
    before = [int(layer.num_batches_tracked) for layer in norms(adapter.model)]
    for seed in range(3):
        adapter(images(6, seed))
    assert [int(layer.num_batches_tracked) for layer in norms(adapter.model)] == before


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_synchronized_between_processes(make_source: Any, images: Any, kind: str) -> None:
    source, told = make_source(), []
    for convert in (lambda model: model, nn.SyncBatchNorm.convert_sync_batchnorm):
        source.model = convert(source.model)
        adapter = adapt(source, "soft", statistics=kind)
        told.append(torch.stack([adapter(images(6, seed)) for seed in range(2)]))
    assert type(source.model.features[1]) is nn.SyncBatchNorm
    assert torch.equal(*told)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_layer_with_a_forward_of_its_own_keeps_it(fails: bool, training: bool) -> None:
    layer = nn.BatchNorm2d(3).train(training)
    layer.forward = own = lambda x: nn.BatchNorm2d.forward(layer, x) + 1
    x = torch.rand(4, 3, 2, 2)

    def values(index: int, x: Tensor) -> Any:
        if fails:
            raise RuntimeError
        return {"bias": torch.ones(3)}

    with contextlib.suppress(RuntimeError), running([layer], values, on_batch=True):
        found = layer(x)
    if not fails:
        torch.testing.assert_close(found.mean((0, 2, 3)), torch.full((3,), 2.0))
    assert layer.forward is own
    assert layer.track_running_stats
    assert layer.training is training


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "Batch"}, {"source_images": 0}, {"floor": -0.1}, {"floor": 1.1}, {"floor": float("nan")}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        StatisticsConfig(**wrong)
