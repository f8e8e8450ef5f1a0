"""Weights of the features from local files, in every form they come in."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from vicinal.errors import CheckpointError, VicinalError
from vicinal.models.backbones import build_classifier, load_features, preprocessing_for
from vicinal.models.classifier import Classifier
from vicinal.models.small import WIDTHS

RESNET50_V1 = Path(__file__).parents[3] / "shared" / "weights" / "resnet50_v1_imagenet.safetensors"
State = dict[str, Tensor]


def one_line(error: pytest.ExceptionInfo[VicinalError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def small(weights: str | Path = "none", channels: int = 3, name: str = "small") -> Classifier:
    return build_classifier(name, 4, weights=str(weights), preprocessing=preprocessing_for(name, channels))


def assert_loaded(model: Classifier, state: State, ignore: str = "-") -> None:
    got = model.features.state_dict()
    assert got.keys() == state.keys()
    for name, value in state.items():
        if not name.endswith(ignore):
            torch.testing.assert_close(got[name], value, rtol=0, atol=0, check_dtype=False)


# What loads


@pytest.mark.parametrize("ending", ["pth", "pt", "PTH", "safetensors"])
def test_every_file_type_loads(tmp_path: Path, state: State, ending: str) -> None:
    path = tmp_path / f"weights.{ending}"
    if ending == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    assert_loaded(small(path), state)


@pytest.mark.parametrize(
    "nest",
    [
        lambda s: {"state_dict": s, "epoch": 3, "optimizer": {"lr": 0.1}},
        lambda s: {"model": s},
        lambda s: {"model_state_dict": s},
        lambda s: {"model": {"state_dict": s}},
        lambda s: {"state_dict": {"model": {"model_state_dict": s}}},
        lambda s: {**s, "note": "a string beside the tensors"},
    ],
)
def test_nests_are_opened(tmp_path: Path, state: State, nest: Callable[[State], object]) -> None:
    torch.save(nest(state), tmp_path / "weights.pth")
    assert_loaded(small(tmp_path / "weights.pth"), state)


@pytest.mark.parametrize(
    "prefix",
    ["module.", "backbone.", "model.", "features.", "encoder.", "module.backbone.", "model.module.encoder."],
)
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_wrappers_prefixes_are_stripped(tmp_path: Path, state: State, prefix: str, ending: str) -> None:
    wrapped = {prefix + name: value for name, value in state.items()}
    wrapped |= {"module.fc.weight": torch.rand(9, WIDTHS[-1]), "head.bias": torch.rand(9)}
    path = tmp_path / f"weights.{ending}"
    if ending == "pth":
        torch.save(wrapped, path)
    else:
        save_file(wrapped, path)
    assert_loaded(small(path), state)


def test_a_prefix_that_is_part_of_the_net_s_own_names_stays(tmp_path: Path) -> None:
    net = nn.Sequential(OrderedDict(features=nn.Linear(2, 3), model=nn.Linear(3, 3)))
    state = {name: torch.rand_like(value) for name, value in net.state_dict().items()}
    for prefix in ("", "module.", "features."):
        torch.save({prefix + name: value for name, value in state.items()}, tmp_path / "weights.pth")
        nn.init.zeros_(net.features.weight)
        load_features(net, tmp_path / "weights.pth")
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_a_whole_classifier_of_ours_gives_its_features(tmp_path: Path) -> None:
    source = small()
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    assert_loaded(small(tmp_path / "weights.pth"), source.features.state_dict())


@pytest.mark.parametrize("head", ["fc", "classifier", "head", "heads.head"])
def test_the_classifier_s_own_tensors_are_dropped(tmp_path: Path, state: State, head: str) -> None:
    extra = {f"{head}.weight": torch.rand(1000, WIDTHS[-1]), f"{head}.bias": torch.rand(1000)}
    torch.save({**state, **extra}, tmp_path / "weights.pth")
    model = small(tmp_path / "weights.pth")
    assert_loaded(model, state)
    assert model.head.out_features == 4


def test_a_head_that_shares_its_name_with_features_is_dropped(tmp_path: Path) -> None:
    whole = timm.create_model("test_convnext", num_classes=10)
    assert {"head.norm.weight", "head.fc.weight"} <= whole.state_dict().keys()
    torch.save(whole.state_dict(), tmp_path / "weights.pth")
    model = build_classifier(
        "test_convnext",
        2,
        weights=str(tmp_path / "weights.pth"),
        preprocessing=preprocessing_for("test_convnext", size=64),
    )
    torch.testing.assert_close(model.features.get_parameter("head.norm.weight"), whole.head.norm.weight)


def test_old_files_without_batch_counters_load(tmp_path: Path, state: State) -> None:
    old = {name: value for name, value in state.items() if "num_batches" not in name}
    torch.save(old, tmp_path / "weights.pth")
    assert_loaded(small(tmp_path / "weights.pth"), state, ignore="num_batches_tracked")


def test_half_precision_becomes_single(tmp_path: Path, state: State) -> None:
    save_file({name: value.half() for name, value in state.items()}, tmp_path / "weights.safetensors")
    model = small(tmp_path / "weights.safetensors")
    assert_loaded(model, {name: value.half() for name, value in state.items()})
    assert {value.dtype for value in model.features.parameters()} == {torch.float32}


# In order


def renamed(state: State) -> State:
    """Return the tensors in their order under names of another code base, their last parts kept."""
    return {f"_part{index}.{name.rpartition('.')[2]}": state[name] for index, name in enumerate(state)}


@pytest.mark.parametrize("counters", [True, False])
@pytest.mark.parametrize("wrapper", ["", "module."])
def test_other_names_in_the_same_order_load(
    tmp_path: Path, state: State, counters: bool, wrapper: str
) -> None:
    foreign = {wrapper + n: v for n, v in renamed(state).items() if counters or "num_batches" not in n}
    head = {"_fc.weight": torch.rand(1000, WIDTHS[-1]), "_fc.bias": torch.rand(1000)}
    torch.save({**foreign, **head}, tmp_path / "weights.pth")
    assert_loaded(small(tmp_path / "weights.pth"), state, ignore="num_batches_tracked")


def test_efficientnet_lite_in_another_code_base_s_names_loads_in_order(tmp_path: Path) -> None:
    whole = timm.create_model("efficientnet_lite0").eval()
    torch.save(renamed(whole.state_dict()), tmp_path / "weights.pth")
    preprocessing = preprocessing_for("efficientnet_lite0", size=32, mean=[0.498], std=[0.502])
    model = build_classifier(
        "efficientnet_lite0", 2, weights=str(tmp_path / "weights.pth"), preprocessing=preprocessing
    ).eval()
    x = torch.rand(2, 3, 32, 32)
    expected = whole.forward_head(whole.forward_features((x - 0.498) / 0.502), pre_logits=True)
    torch.testing.assert_close(model.embed(x), expected)


def swap(state: State, first: int, second: int) -> State:
    names = list(renamed(state))
    names[first], names[second] = names[second], names[first]
    return {name: renamed(state)[name] for name in names}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: swap(s, 1, 2),  # BatchNorm's weight and bias: equal shapes, other last names
        lambda s: swap(s, 0, 6),  # convolutions of other shapes
        lambda s: dict(list(renamed(s).items())[:-2]),
        lambda s: {**renamed(s), "_conv.weight": torch.rand(8, 8, 3, 3)},  # a deeper net goes on
    ],
)
def test_another_order_does_not_load(tmp_path: Path, state: State, spoil: Callable[[State], State]) -> None:
    torch.save(spoil(state), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError) as error:
        small(tmp_path / "weights.pth")
    assert "'0.weight': nothing" in one_line(error)


def test_safetensors_never_load_in_order(tmp_path: Path) -> None:
    net = nn.Linear(3, 3, bias=False)
    save_file({"other.weight": torch.rand(3, 3)}, tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError):
        load_features(net, tmp_path / "weights.safetensors")
    torch.save({"other.weight": torch.ones(3, 3)}, tmp_path / "weights.pth")
    load_features(net, tmp_path / "weights.pth")
    assert torch.equal(net.weight, torch.ones(3, 3))


# Gray


@pytest.mark.parametrize("rename", [dict, renamed])
def test_rgb_weights_are_summed_for_gray_images(
    tmp_path: Path, state: State, rename: Callable[[State], State]
) -> None:
    torch.save(rename(state), tmp_path / "weights.pth")
    gray, rgb = (small(tmp_path / "weights.pth", channels).eval() for channels in (1, 3))
    torch.testing.assert_close(gray.features[0].weight, state["0.weight"].sum(1, keepdim=True))
    x = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(gray.embed(x), rgb.embed(x.expand(-1, 3, -1, -1)))


def test_gray_weights_do_not_fit_rgb_images(tmp_path: Path) -> None:
    torch.save(small(channels=1).features.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError) as error:
        small(tmp_path / "weights.pth")
    assert "1 of 18" in one_line(error)
    width = WIDTHS[0]
    assert f"'0.weight': [{width}, 1, 3, 3] where [{width}, 3, 3, 3] is needed" in one_line(error)


def test_nothing_is_summed_for_rgb_images(tmp_path: Path, state: State) -> None:
    state["4.weight"] = state["4.weight"].repeat(1, 3, 1, 1)
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError):
        small(tmp_path / "weights.pth")


# The real thing


@pytest.mark.skipif(
    not RESNET50_V1.is_file(), reason="shared/weights/resnet50_v1_imagenet.safetensors is not here"
)
def test_imagenet_resnet50_v1_agrees_with_torchvision_in_the_v1_layout() -> None:
    from safetensors.torch import load_file

    model = build_classifier(
        "resnet50_v1", 7, weights=str(RESNET50_V1), preprocessing=preprocessing_for("resnet50_v1", size=64)
    ).eval()
    reference = torchvision.models.resnet50()
    reference.load_state_dict(load_file(RESNET50_V1))
    for layer in (reference.layer2, reference.layer3, reference.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    reference.fc = nn.Identity()
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    normalize = torchvision.transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    with torch.no_grad():
        z, expected = model.embed(x), reference.eval()(normalize(x))
        reference.layer3[0].conv1.stride, reference.layer3[0].conv2.stride = (1, 1), (2, 2)
        elsewhere = reference(normalize(x))
    assert z.shape == (2, 2048)
    assert z.isfinite().all()
    torch.testing.assert_close(z, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(z, elsewhere, rtol=1e-2, atol=1e-2)
