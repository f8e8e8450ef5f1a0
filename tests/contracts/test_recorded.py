"""Steps recorded on a GPU: a method predicts as it does when its step runs as written."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vicinal import graphs
from vicinal.adapters.methods import METHODS
from vicinal.checkpoint import Trained
from vicinal.types import Head

STEADY = sorted(name for name in METHODS if METHODS[name].build.steady)
BY_NEIGHBORS = {"update": "neighbors", "predict": "neighbors"}
AGREEING = {"update": "marginal", "predict": "own", "agreement": 1.0}
RUNS = [*((name, {}) for name in STEADY), ("vnl", BY_NEIGHBORS), ("vnl", AGREEING)]
EAGER = 10**6  # runs before a step is recorded
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(source: Trained) -> Trained:
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        value = getattr(source, field.name)
        if isinstance(value, nn.Module):
            moved[field.name] = value.cuda()
    extras = {name: value.cuda() for name, value in source.extras.items()}
    return dataclasses.replace(source, **moved, extras=extras)


@pytest.mark.parametrize("net", ["small", "vit"])
@pytest.mark.parametrize("statistics", ["own", "stream"])
@pytest.mark.parametrize(("method", "given"), RUNS)
def test_it_predicts_as_it_does_unrecorded(
    make_case: Any,
    method: str,
    given: dict[str, Any],
    statistics: str,
    net: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with a short batch, after a reset, with an observer, and from a saved state."""
    case = make_case(method, net)
    source = on_gpu(case.source())
    options = given if statistics == "own" else {**given, "statistics": statistics}
    batches = [batch.cuda() for batch in case.stream(6, 6, 6, 6, 4, 6, 6)]

    def told(warm_up: int) -> tuple[list[Tensor], int]:
        monkeypatch.setattr(graphs, "WARM_UP", warm_up)
        adapter = case.adapt(source, lr=1e-4, **options)
        found = [adapter(batch) for batch in batches]
        saved = adapter.state_dict()
        adapter.reset()
        found += [adapter(batch) for batch in batches[:3]]
        adapter.load_state_dict(saved)
        seen: list[Tensor] = []

        def watch(z: Tensor, logits: Tensor, head: Head) -> None:
            seen.append(logits)

        adapter.observer = watch
        found += [adapter(batch) for batch in batches[:3]]
        return [*found, *seen], adapter.recorder.recordings

    (eager, none), (recorded, some) = told(EAGER), told(1)
    assert none == 0
    assert some > 0
    # Where the pass whose gradient is taken predicts as well, there is nothing to observe.
    assert len(eager) in (len(batches) + 6, len(batches) + 9)
    for a, b in zip(eager, recorded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2)  # a GPU adds up in any order


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("method", "told"), [("soft", {}), ("vnl", {"update": "marginal", "doubt": 0.9})])
def test_a_recorded_step_counts_the_images_it_has_seen(
    make_case: Any, method: str, told: dict[str, Any], double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count, or a doubt, frozen into the recording would leave all steps alike."""
    case, dtype = make_case(method, "small"), torch.double if double else torch.float
    source, batches = on_gpu(case.source()), [batch.cuda().to(dtype) for batch in case.stream(*[6] * 8)]
    for net in (source.model, source.phi, source.anchor_phi, source.predict_phi):
        net.to(dtype)
    moved = []
    for warm_up in (EAGER, 1):
        monkeypatch.setattr(graphs, "WARM_UP", warm_up)
        adapter = case.adapt(source, lr=1e-2, horizon=5.0, **told)
        for batch in batches:
            adapter(batch)
        assert float(adapter.seen) == 48
        pairs = zip(adapter.model.parameters(), source.model.parameters(), strict=True)
        moved.append(torch.stack([(a - b).detach().norm() for a, b in pairs]))
        adapter.reset()
        assert float(adapter.seen) == 0
    assert adapter.recorder.recordings == 1
    torch.testing.assert_close(moved[0], moved[1], rtol=0.05, atol=1e-4)
