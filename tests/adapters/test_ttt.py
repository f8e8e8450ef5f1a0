"""TTT against the paper written out again: rotations by flips and transposes, plain SGD."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import vicinal.adapters.ttt  # noqa: F401  registers the method
from vicinal.adapters.methods import adapt
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError, ConfigError

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture
def source(make_source: Any) -> Any:
    trained = make_source("ttt")
    noise = torch.Generator().manual_seed(3)
    width = trained.model.head.in_features
    trained.extras = {
        "ttt.weight": torch.randn(4, width, generator=noise, dtype=torch.float64),
        "ttt.bias": torch.randn(4, generator=noise, dtype=torch.float64),
        "other.weight": torch.zeros(1),
    }
    return trained


def turned(image: Tensor, count: int) -> Tensor:
    for _ in range(count):
        image = image.transpose(-2, -1).flip(-2)
    return image


class SlowTtt:
    def __init__(self, source: Any, on_batch: bool, lr: float = 1e-3) -> None:
        self.model = copy.deepcopy(source.model).train(on_batch)
        self.head = nn.Linear(self.model.head.in_features, 4).double()
        self.head.load_state_dict({"weight": source.extras["ttt.weight"], "bias": source.extras["ttt.bias"]})
        self.rule = torch.optim.SGD([*self.model.features.parameters(), *self.head.parameters()], lr=lr)
        self.generator = torch.Generator().manual_seed(0)

    def learn(self, x: Tensor, chance: bool = False, augment: Augment | None = None) -> None:
        view = x if augment is None else augment(x, self.generator)
        turns = [k for k in range(4) for _ in range(len(x))]
        if chance:
            turns = torch.randint(4, (len(x),), generator=self.generator).tolist()
        shown = torch.stack([turned(view[i % len(x)], k) for i, k in enumerate(turns)])
        loss = cross_entropy(self.head(self.model.embed(shown)), torch.tensor(turns))
        self.rule.zero_grad()
        loss.backward()
        self.rule.step()


@pytest.mark.parametrize("kind", ["source", "batch"])
@pytest.mark.parametrize("rotations", ["all", "random"])
def test_three_batches_agree(source: Any, images: Any, kind: str, rotations: str) -> None:
    told = {} if rotations == "all" else {"rotations": rotations}  # all is the default
    adapter = adapt(source, "ttt", statistics=kind, **told)
    slow = SlowTtt(source, kind == "batch")
    for seed, count in enumerate((7, 5, 6)):
        x = images(count, seed)
        slow.learn(x, rotations == "random")
        torch.testing.assert_close(adapter(x), slow.model(x).detach(), **CLOSE)
    assert adapt(source, "ttt").settings.statistics.kind == "batch"
    for found, expected in ((adapter.model, slow.model), (adapter.rotation, slow.head)):
        for a, b in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, **CLOSE)
    assert (slow.head.weight - source.extras["ttt.weight"]).abs().max() > 1e-4
    assert torch.equal(adapter.model.head.weight, source.model.head.weight)


def test_steps_views_and_the_prediction_before(source: Any, images: Any) -> None:
    view = Augment(min_scale=0.5)
    adapter = adapt(source, "ttt", steps=3, predict="before", lr=1e-2, augment=view)
    slow = SlowTtt(source, on_batch=True, lr=1e-2)
    for seed in range(2):
        x = images(6, seed)
        for _ in range(3):
            expected = slow.model(x).detach()
            slow.learn(x, augment=view)
        torch.testing.assert_close(adapter(x), expected, **CLOSE)


def test_one_image_is_learned_on_the_stream_s_statistics(source: Any, images: Any, slow_stream: Any) -> None:
    adapter, stream = adapt(source, "ttt", statistics="batch", lr=1e-2), slow_stream(source)
    for layer in stream.layers:  # its rotations are four, but they are one image
        layer.share, layer.constant = 1 / 21, True
    source.model = stream.model
    slow, x = SlowTtt(source, on_batch=False, lr=1e-2), images(1)
    adapter(x)
    slow.learn(x)
    for a, b in zip(adapter.model.parameters(), slow.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_what_it_needs_is_said_in_one_line(make_source: Any, source: Any, images: Any) -> None:
    with pytest.raises(AdapterError, match="--algorithm ttt; this one was trained with 'erm'"):
        adapt(make_source(), "ttt")
    with pytest.raises(ConfigError, match="rotations 'some'"):
        adapt(source, "ttt", rotations="some")
    adapter = adapt(source, "ttt")
    with pytest.raises(AdapterError, match="square, not 8 x 6"):
        adapter(images(4)[..., :6])


def test_the_checkpoint_s_head_is_not_the_adapter_s(source: Any, images: Any) -> None:
    before = source.extras["ttt.weight"].clone()
    adapt(source, "ttt", lr=1e-1)(images(6))
    assert torch.equal(source.extras["ttt.weight"], before)
