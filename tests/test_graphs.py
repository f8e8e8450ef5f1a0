"""Recorded steps give what they give as written; without a GPU they run as written."""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from vicinal import graphs
from vicinal.adapters.methods import METHODS
from vicinal.graphs import Branch, Recorder, overwritten, suited

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEADY = [name for name in METHODS if METHODS[name].build.steady]


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, times: int) -> None:
    for time in range(times):
        parameter.grad = torch.full_like(parameter, 1.0 + time)
        optimizer.step()


def made(kind: str) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.arange(3.0))
    if kind == "adam":
        return parameter, torch.optim.Adam([parameter], lr=0.1)
    return parameter, torch.optim.SGD([parameter], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("before", [0, 2])
def test_an_overwritten_optimizer_goes_on_like_a_loaded_one(kind: str, before: int) -> None:
    parameter, optimizer = made(kind)
    stepped(optimizer, parameter, before)
    saved, value = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    stepped(optimizer, parameter, 3)
    held = {id(t) for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)}

    assert overwritten(optimizer, saved)
    with torch.no_grad():
        parameter.copy_(value)
    assert held == {id(t) for entry in optimizer.state.values() for t in entry.values()}
    stepped(optimizer, parameter, 2)

    other, loaded = made(kind)
    with torch.no_grad():
        other.copy_(value)
    loaded.load_state_dict(saved)
    stepped(loaded, other, 2)
    assert torch.equal(parameter, other)


def test_a_state_that_does_not_fit_is_not_written() -> None:
    parameter, optimizer = made("adam")
    stepped(optimizer, parameter, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    fresh, other = made("adam")
    assert not overwritten(other, saved), "it has no tensors to write to"
    stepped(other, fresh, 1)
    now = copy.deepcopy(other.state_dict()["state"])
    saved["param_groups"][0]["lr"] = 0.2
    assert not overwritten(other, saved), "a recorded step has another step size"
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], now[0]["exp_avg"])


def test_how_an_optimizer_runs_does_not_come_from_a_file() -> None:
    _, optimizer = made("adam")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"capturable": True, "fused": True}
    group = suited(saved, optimizer)["param_groups"][0]
    assert not group["capturable"]
    assert not group["fused"]


def test_without_a_gpu_a_step_runs_as_it_is_written() -> None:
    calls: list[float] = []

    def step(x: Tensor) -> dict[str, Tensor]:
        calls.append(float(x.sum()))  # a look at a number, which no recording could take
        return {"twice": 2 * x}

    recorder = Recorder()
    for value in range(4):
        assert recorder.run(step, torch.full((2,), float(value)))["twice"].tolist() == [2.0 * value] * 2
    assert calls == [0.0, 2.0, 4.0, 6.0]
    assert recorder.recordings == 0


def test_what_is_recorded_is_said_by_the_methods() -> None:
    assert {"erm", "bn", "tent", "soft", "hard", "vnl", "vnl_paper", "labels"} <= set(STEADY)
    assert not {"eata", "sar", "cotta", "memo", "rotta"} & set(STEADY), "they look at numbers on their way"


@gpu
def test_a_recorded_step_draws_on_from_its_generator() -> None:
    def drawn(warm: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(3)
        recorder, found = Recorder((generator,)), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "WARM_UP", warm)
            for _ in range(6):
                noise = recorder.run(
                    lambda x: {"y": x + torch.randn(4, generator=generator, device="cuda")},
                    torch.zeros(4, device="cuda"),
                )
                found.append(noise["y"].cpu())
        return found

    assert all(torch.equal(a, b) for a, b in zip(drawn(10**6), drawn(1), strict=True))


@gpu
def test_a_step_that_looks_at_numbers_refuses_and_runs_on() -> None:
    def step(x: Tensor) -> dict[str, Tensor]:
        return {"y": x if float(x.sum()) > 0 else -x}

    recorder = Recorder()
    for value in (-1.0, 1.0, -2.0, 2.0):
        found = recorder.run(step, torch.full((2,), value, device="cuda"))["y"]
        assert found.tolist() == [abs(value)] * 2
    assert recorder.refused


@gpu
def test_a_step_that_refuses_goes_on_drawing_where_it_was() -> None:
    def drawn(generator: torch.Generator, recorder: Recorder) -> list[float]:
        def step(x: Tensor) -> dict[str, Tensor]:
            noise = torch.randn((), generator=generator, device="cuda")
            return {"y": x + float(noise)}

        return [float(recorder.run(step, torch.zeros((), device="cuda"))["y"]) for _ in range(5)]

    never, once = (torch.Generator("cuda").manual_seed(4) for _ in range(2))
    unrecorded, recorder = Recorder(), Recorder((once,))
    unrecorded.refused = "not asked"
    assert drawn(once, recorder) == drawn(never, unrecorded)
    assert recorder.refused


@gpu
def test_recordings_that_nobody_holds_do_not_break_one_that_is_made() -> None:
    def one() -> Recorder:
        recorder = Recorder()
        for _ in range(3):
            recorder.run(lambda x: {"y": 2 * x, "z": torch.stack([x] * 3)}, torch.ones(3, device="cuda"))
        recorder.itself = recorder  # type: ignore[attr-defined]  # a circle, which only a collection frees
        return recorder

    was = gc.get_threshold()
    gc.set_threshold(20)  # many collections, wherever they fall
    try:
        assert [one().refused for _ in range(10)] == [""] * 10
    finally:
        gc.set_threshold(*was)


def test_nothing_is_collected_while_a_step_is_recorded() -> None:
    def collects() -> bool:
        with graphs._without_collecting():
            return gc.isenabled()

    def stopped() -> None:
        with graphs._without_collecting():
            raise ValueError("stopped")

    assert not collects()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="stopped"):
        stopped()
    assert gc.isenabled()
    gc.disable()
    try:
        with graphs._without_collecting():
            pass
        assert not gc.isenabled(), "who has switched it off wants it off"
    finally:
        gc.enable()


def branched(x: Tensor) -> dict[str, Tensor]:
    with Branch(x.device) as branch:
        beside = (x @ x).sin()
    own = x.exp()
    branch.join()
    branch.join()  # once is enough, twice does no harm
    return {"y": own * beside}


def test_a_branch_is_done_in_its_place_where_nothing_is_recorded() -> None:
    x = torch.arange(9.0).view(3, 3)
    assert torch.equal(branched(x)["y"], x.exp() * (x @ x).sin())


def test_an_error_in_a_branch_comes_through() -> None:
    with pytest.raises(RuntimeError, match="shapes"), Branch(torch.device("cpu")):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@gpu
def test_a_branch_of_a_recorded_step_gives_what_it_gives_in_its_place() -> None:
    recorder = Recorder()
    for seed in range(6):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).cuda()
        torch.testing.assert_close(recorder.run(branched, x)["y"], branched(x)["y"])
    assert (recorder.refused, recorder.recordings) == ("", 1)
