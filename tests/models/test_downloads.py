"""Weights "timm": what is asked of timm, and what is said when it cannot give them."""

import pytest
import timm
from torch import nn

from vicinal.errors import ConfigError, VicinalError
from vicinal.models import backbones
from vicinal.models.backbones import build_classifier, preprocessing_for


def one_line(error: pytest.ExceptionInfo[VicinalError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["small", "small_gn", "resnet50_v1"])
def test_our_own_nets_have_no_weights_to_download(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_classifier(name, 2, weights="timm", preprocessing=preprocessing_for(name))
    message = one_line(error)
    assert "--weights FILE" in message
    assert "--weights none" in message


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the list of what timm was asked: pretrained or not; pretrained fails as it does offline."""
    asked: list[bool] = []
    real = timm.create_model

    def create(name: str, pretrained: bool = False, **kwargs: object) -> nn.Module:
        asked.append(pretrained)
        if pretrained:
            real(name, False, **kwargs)
            raise OSError("cannot reach the hub\nand a second line")
        return real(name, False, **kwargs)

    monkeypatch.setattr(backbones.timm, "create_model", create)
    return asked


def test_weights_that_cannot_be_downloaded_are_one_line(offline: list[bool]) -> None:
    with pytest.raises(ConfigError) as error:
        build_classifier("resnet18", 2, weights="timm", preprocessing=preprocessing_for("resnet18", size=32))
    message = one_line(error)
    assert "resnet18" in message
    assert "--weights FILE" in message
    assert "--weights none" in message
    assert offline[0] is True


def test_weights_none_downloads_nothing(offline: list[bool]) -> None:
    build_classifier("resnet18", 2, weights="none", preprocessing=preprocessing_for("resnet18", size=32))
    assert offline
    assert not any(offline)


def test_a_bad_size_is_not_blamed_on_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*args: object, **kwargs: object) -> nn.Module:
        raise ValueError("windows of 7 do not fit\nand a second line")

    monkeypatch.setattr(backbones.timm, "create_model", create)
    with pytest.raises(ConfigError) as error:
        build_classifier("resnet18", 2, weights="timm", preprocessing=preprocessing_for("resnet18", size=2))
    assert "2 px (windows of 7 do not fit)" in one_line(error)
    assert "--weights" not in one_line(error)


def test_downloaded_weights_are_asked_for_with_the_right_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    real = timm.create_model

    def create(name: str, pretrained: bool = False, **kwargs: object) -> nn.Module:
        asked.append((name, pretrained, kwargs))
        return real(name, False, **kwargs)

    monkeypatch.setattr(backbones.timm, "create_model", create)
    preprocessing = preprocessing_for("test_vit", 1, 32)
    build_classifier("test_vit", 2, weights="timm", preprocessing=preprocessing)
    assert asked == [("test_vit", True, {"num_classes": 0, "in_chans": 1, "img_size": 32})]
