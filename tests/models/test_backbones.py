"""Backbones by name: entries, timm names, input constants, and what a caller may ask for."""

import pytest
import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from vicinal.errors import ConfigError, UnknownNameError, VicinalError
from vicinal.models.backbones import (
    BACKBONES,
    Preprocessing,
    build_classifier,
    default_weights,
    preprocessing_for,
)

SMALL = ("small", "small_gn", "small_ln", "small_none")


def one_line(error: pytest.ExceptionInfo[VicinalError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def strides(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the stride of every convolution that has one other than 1, by name."""
    convs = {name: part for name, part in net.named_modules() if isinstance(part, nn.Conv2d)}
    return {name: conv.stride for name, conv in convs.items() if conv.stride != (1, 1)}


# Names


def test_our_own_names_are_registered_and_clash_with_none_of_timm() -> None:
    assert set(BACKBONES) == {*SMALL, "resnet50_v1"}
    assert not [name for name in BACKBONES if timm.is_model(name)]


@pytest.mark.parametrize(
    ("name", "closest"), [("resnet_18", "resnet18"), ("resnet18.a1_in1q", "resnet18.a1_in1k")]
)
def test_an_unknown_name_lists_ours_and_the_closest_of_timm(name: str, closest: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        preprocessing_for(name)
    message = one_line(error)
    assert f"'{name}'" in message
    assert "any timm name" in message
    assert closest in message
    assert all(own in message for own in BACKBONES)


@pytest.mark.parametrize("name", ["", "qqqqqqqqqqqq", "hf-hub:no/such", "resnet18/a"])
def test_a_name_like_no_other_is_still_one_clear_line(name: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        build_classifier(name, 2, preprocessing=preprocessing_for("small"))
    message = one_line(error)
    assert "any timm name" in message


def test_default_weights() -> None:
    assert [default_weights(name) for name in SMALL] == ["none"] * 4
    assert default_weights("resnet18") == "timm"
    assert default_weights("resnet50_v1") == "timm"  # asks for a file: see the test of weights timm below
    with pytest.raises(UnknownNameError):
        default_weights("no_such_net")


# Preprocessing


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_small_nets_take_gray_or_rgb_images_of_16_px(name: str, channels: int) -> None:
    expected = Preprocessing(16, channels, (0.5,) * channels, (0.5,) * channels)
    assert preprocessing_for(name, channels) == expected


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "efficientnet_lite0", "test_resnet"])
def test_timm_nets_keep_timm_s_own_constants(name: str) -> None:
    with torch.device("meta"):
        config = resolve_model_data_config(timm.create_model(name))
    got = preprocessing_for(name)
    assert (got.channels, got.size, got.size) == config["input_size"]
    assert (got.mean, got.std) == (config["mean"], config["std"])


def test_constants_differ_between_timm_nets() -> None:
    assert preprocessing_for("vit_tiny_patch16_224").mean == (0.5, 0.5, 0.5)
    assert preprocessing_for("resnet18").mean == (0.485, 0.456, 0.406)


@pytest.mark.filterwarnings("ignore:Mapping deprecated")
def test_a_name_timm_calls_deprecated_has_the_constants_of_its_successor() -> None:
    new = preprocessing_for("tf_efficientnet_l2.ns_jft_in1k")
    assert new.size == 800
    assert preprocessing_for("tf_efficientnet_l2_ns") == new


def test_gray_images_get_the_average_of_the_channels() -> None:
    got = preprocessing_for("resnet18", channels=1)
    assert got.mean == pytest.approx([(0.485 + 0.456 + 0.406) / 3])
    assert got.std == pytest.approx([(0.229 + 0.224 + 0.225) / 3])


def test_given_values_win() -> None:
    got = preprocessing_for("efficientnet_lite0", size=64, mean=[0.498], std=(0.5, 0.4, 0.3))
    assert got == Preprocessing(64, 3, (0.498,) * 3, (0.5, 0.4, 0.3))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 33}, "4 to 32"),
        ({"size": 3}, "4 to 32"),
        ({"size": 0}, "4 to 32"),
        ({"channels": 2}, "1 channel"),
        ({"channels": 0}, "1 channel"),
        ({"std": (0.5, 0.0, 0.5)}, "std"),
        ({"mean": (0.5, float("nan"), 0.5)}, "mean"),
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"mean": ()}, "mean"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        preprocessing_for("small", **settings)  # type: ignore[arg-type]
    assert says in one_line(error)


def test_a_size_below_one_is_refused_for_timm_names_too() -> None:
    with pytest.raises(ConfigError) as error:
        preprocessing_for("resnet18", size=0)
    assert "resnet18" in one_line(error)


# Building


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("channels", "size"), [(1, 4), (1, 16), (3, 32)])
def test_small_classifiers_answer_at_every_size_they_promise(name: str, channels: int, size: int) -> None:
    model = build_classifier(name, 5, preprocessing=preprocessing_for(name, channels, size))
    assert model(torch.rand(2, channels, size, size)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "channels", "size", "width"),
    [
        ("resnet18", 3, 32, 512),
        ("resnet18", 1, 32, 512),
        ("vit_tiny_patch16_224", 3, 32, 192),
        ("efficientnet_lite0", 3, 32, 1280),
        ("mobilenetv3_small_050", 3, 32, 1024),  # its num_features says 288
        ("test_convnext", 3, 64, 64),
    ],
)
def test_any_timm_name_works_with_no_entry(name: str, channels: int, size: int, width: int) -> None:
    model = build_classifier(name, 3, preprocessing=preprocessing_for(name, channels, size)).eval()
    x = torch.rand(2, channels, size, size)
    z, logits = model.features_and_logits(x)
    assert z.shape == (2, width)
    assert logits.shape == (2, 3)


def test_timm_features_are_timm_s_own_on_normalized_images() -> None:
    preprocessing = preprocessing_for("resnet18", size=32)
    torch.manual_seed(3)
    ours = build_classifier("resnet18", 4, preprocessing=preprocessing).eval()
    torch.manual_seed(3)
    theirs = timm.create_model("resnet18", num_classes=0).eval()
    x = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    torch.testing.assert_close(ours.embed(x), theirs((x - mean) / std))


def test_a_vit_at_another_size_gets_position_embeddings_for_it() -> None:
    net = build_classifier(
        "vit_tiny_patch16_224", 2, preprocessing=preprocessing_for("vit_tiny_patch16_224", size=32)
    )
    assert net.features.get_parameter("pos_embed").shape == (1, 1 + 2 * 2, 192)


def test_building_leaves_the_net_in_training_mode_and_its_statistics_fresh() -> None:
    model = build_classifier("small", 2, preprocessing=preprocessing_for("small"))
    assert all(part.training for part in model.modules())
    norm = next(part for part in model.modules() if isinstance(part, nn.BatchNorm2d))
    assert not norm.running_mean.any()
    assert norm.num_batches_tracked == 0


def test_same_seed_same_classifier() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(build_classifier("small", 2, preprocessing=preprocessing_for("small")).state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_size_the_net_cannot_take_is_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        build_classifier("test_vit", 2, preprocessing=preprocessing_for("test_vit", size=8))
    assert "test_vit" in one_line(error)
    assert "8 px" in one_line(error)


class Map(nn.Module):
    """A net that keeps space."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_net_that_emits_no_vector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", lambda *args, **kwargs: Map())
    with pytest.raises(ConfigError) as error:
        build_classifier("resnet18", 2, preprocessing=preprocessing_for("resnet18"))
    assert "feature vector" in one_line(error)


# resnet50_v1


def test_resnet50_v1_strides_its_first_1x1_convolutions() -> None:
    preprocessing = Preprocessing(32, 3, *[preprocessing_for("resnet50_v1").mean] * 2)
    net = build_classifier("resnet50_v1", 2, preprocessing=preprocessing).features
    blocks = [f"layer{layer}.0" for layer in (2, 3, 4)]
    expected = {f"{block}.{part}": (2, 2) for block in blocks for part in ("conv1", "downsample.0")}
    assert strides(net) == {"conv1": (2, 2), **expected}


def test_resnet50_v1_wants_imagenet_s_constants() -> None:
    got = preprocessing_for("resnet50_v1")
    assert got == Preprocessing(224, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
