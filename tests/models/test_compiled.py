"""Compiled features: the same losses and gradients; where nothing can be compiled the net runs as written."""

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vicinal.models import classifier
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.models.classifier import Classifier

X, Y = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


def net(compiled: bool) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_classifier("small", 4, preprocessing=Preprocessing(8, 3, (0.5,) * 3, (0.25,) * 3))
    model.compiled = compiled
    return model.train()


def gradients(model: Classifier, state: dict[str, Tensor] | None = None) -> list[Tensor]:
    loss = cross_entropy(model.head(model.embed(X, state)), Y)
    wanted = list(model.features.parameters()) if state is None else list(state.values())[:3]
    return list(torch.autograd.grad(loss, wanted))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_losses_gradients_and_buffers_are_the_same() -> None:
    plain, fast = net(compiled=False), net(compiled=True)
    for _ in range(2):
        torch.testing.assert_close(gradients(fast), gradients(plain), rtol=1e-4, atol=1e-6)
    assert fast.compiled
    torch.testing.assert_close(dict(fast.named_buffers()), dict(plain.named_buffers()))
    # Under other weights, with buffers of their own.
    other = {name: value.detach() + 0.1 for name, value in plain.features.named_parameters()}
    states: list[dict[str, Any]] = [
        {**{name: value.clone().requires_grad_() for name, value in other.items()}, **buffers}
        for buffers in (copy.deepcopy(dict(plain.features.named_buffers())) for _ in range(2))
    ]
    found, expected = (gradients(model, state) for model, state in zip((fast, plain), states, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(*states)


def test_passes_without_gradients_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifier, "fused", lambda: pytest.fail("compiled"))
    with torch.no_grad():
        assert net(compiled=True)(X).shape == (6, 4)


def test_where_nothing_can_be_compiled_the_net_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Tensor:
        raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no compiler"), None)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(classifier, "fused", lambda: refuse)
    model = net(compiled=True)
    with pytest.warns(UserWarning, match="could not be compiled and runs as written"):
        found = gradients(model)
    assert not model.compiled
    torch.testing.assert_close(found, gradients(net(compiled=False)))
