"""Which ReLUs a layer may do along with its own work, and what becomes of them in a pass."""

import copy

import pytest
import torch
from torch import Tensor, nn

from vicinal.adapters.activations import Activations
from vicinal.models.wrap import Wrapped

USE = (0, 0)


def values() -> Tensor:
    return torch.tensor([[-1.0, 2.0], [3.0, -4.0]])


def passed(activations: Activations, relu: nn.Module, fed: Tensor, *, rectified: bool = False) -> Tensor:
    """Return what a ReLU makes of the last output of a layer."""
    with activations.saved():
        activations.put_out(USE, fed, rectified=rectified)
        made: Tensor = relu(fed)
    return made


def follows(activations: Activations, layer: nn.Module | None = None, use: tuple[int, int] = USE) -> bool:
    """Say what a layer is told in a pass."""
    with activations.saved():
        return activations.follows(use, layer or nn.BatchNorm2d(2))


def test_a_relu_that_follows_a_layer_is_seen_and_then_left_out() -> None:
    relu, layer = nn.ReLU(inplace=True), nn.BatchNorm2d(2)
    activations = Activations(nn.Sequential(relu))
    assert not follows(activations, layer)
    assert torch.equal(passed(activations, relu, values()), values().relu())
    assert follows(activations, layer)
    assert not follows(activations, layer, (0, 1)), "another use of the layer may be followed by anything"
    rectified = values()  # negative ones show who has worked
    assert passed(activations, relu, rectified, rectified=True) is rectified
    assert torch.equal(rectified, values())
    assert "forward" not in relu.__dict__


def test_one_that_is_fed_something_else_works_as_ever() -> None:
    relu = nn.ReLU(inplace=True)
    activations = Activations(nn.Sequential(relu))
    with activations.saved():
        activations.put_out(USE, values(), rectified=True)
        assert torch.equal(relu(values()), values().relu())
    fed = values()
    with activations.saved():
        activations.put_out(USE, fed, rectified=False)
        fed += 1  # a shortcut
        assert torch.equal(relu(fed), (values() + 1).relu())
    assert not follows(activations)


@pytest.mark.parametrize("why", ["keeps what it is fed", "another class", "a forward of its own", "a hook"])
def test_relus_that_stay_what_they_are(why: str) -> None:
    class Another(nn.ReLU):
        pass

    relu = {"keeps what it is fed": nn.ReLU(), "another class": Another(inplace=True)}.get(
        why, nn.ReLU(inplace=True)
    )
    if why == "a forward of its own":
        relu.forward = lambda x: x.relu_()  # type: ignore[method-assign]
    if why == "a hook":
        relu.register_forward_pre_hook(lambda module, fed: None)
    activations = Activations(nn.Sequential(relu))
    before = dict(relu.__dict__)
    assert torch.equal(passed(activations, relu, values()), values().relu())
    assert relu.__dict__ == before
    assert not follows(activations)


def test_a_layer_that_somebody_watches_puts_out_what_it_always_did() -> None:
    relu, layer = nn.ReLU(inplace=True), nn.BatchNorm2d(2)
    activations = Activations(nn.Sequential(relu))
    passed(activations, relu, values())
    assert follows(activations, layer)
    layer.register_forward_hook(lambda module, fed, made: None)
    assert not follows(activations, layer)


@pytest.mark.parametrize("why", ["a hook", "a forward of its own", "keeps what it is fed"])
def test_a_relu_that_somebody_takes_an_interest_in_later_works_again(why: str) -> None:
    relu, layer = nn.ReLU(inplace=True), nn.BatchNorm2d(2)
    activations = Activations(nn.Sequential(relu))
    passed(activations, relu, values())
    with activations.saved():
        assert activations.follows(USE, layer)
    if why == "a hook":
        relu.register_forward_pre_hook(lambda module, fed: None)
    elif why == "a forward of its own":
        relu.forward = lambda x: x.relu_()  # type: ignore[method-assign]
    else:
        relu.inplace = False
    with activations.saved():
        assert not activations.follows(USE, layer)


def test_a_net_of_somebodys_own_is_left_alone() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 2))
    activations = Activations(Wrapped(net))
    passed(activations, net[1], values())
    assert not follows(activations)


def test_a_pass_that_breaks_leaves_nothing_behind() -> None:
    relu = nn.ReLU(inplace=True)
    activations = Activations(nn.Sequential(relu))

    def broken() -> None:
        with activations.saved():
            activations.put_out(USE, values(), rectified=True)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert "forward" not in relu.__dict__
    assert activations._last is None


def test_a_copy_has_relus_of_its_own() -> None:
    relu = nn.ReLU(inplace=True)
    net = nn.Sequential(relu)
    activations = Activations(net)
    other, copied = copy.deepcopy((activations, net))
    with other.saved():
        assert "forward" not in relu.__dict__
        assert "forward" in copied[0].__dict__
