"""Weight files that cannot be used: each is one clear line, and no code in them is run."""

import os
import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from vicinal.errors import CheckpointError, ConfigError, VicinalError
from vicinal.models.backbones import build_classifier, load_features, preprocessing_for
from vicinal.models.classifier import Classifier
from vicinal.models.small import WIDTHS

State = dict[str, Tensor]


def one_line(error: pytest.ExceptionInfo[VicinalError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def small(weights: str | Path = "none", channels: int = 3, name: str = "small") -> Classifier:
    return build_classifier(name, 4, weights=str(weights), preprocessing=preprocessing_for(name, channels))


def test_missing_and_mismatching_tensors_are_named_and_counted(tmp_path: Path, state: State) -> None:
    state["4.weight"] = torch.rand(5, 6, 3, 3)
    del state["5.bias"]
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError) as error:
        small(tmp_path / "weights.pth")
    message = one_line(error)
    assert "weights.pth" in message
    assert "2 of 18" in message
    assert f"'4.weight': [5, 6, 3, 3] where {[WIDTHS[1], WIDTHS[0], 3, 3]} is needed" in message


def test_a_refused_file_leaves_the_net_as_it_was(tmp_path: Path, state: State) -> None:
    net = small().features
    before = {name: value.clone() for name, value in net.state_dict().items()}
    del state["5.bias"]
    torch.save(state, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError):
        load_features(net, tmp_path / "weights.pth")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_deeper_net_of_the_same_family_is_refused(tmp_path: Path) -> None:
    torch.save(timm.create_model("resnet34").state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError) as error:
        build_classifier(
            "resnet18",
            2,
            weights=str(tmp_path / "weights.pth"),
            preprocessing=preprocessing_for("resnet18", size=32),
        )
    assert "another model" in one_line(error)
    assert "layer1.2.conv1.weight" in one_line(error)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "text"])
def test_a_damaged_file_is_one_line(tmp_path: Path, state: State, ending: str, damage: str) -> None:
    path = tmp_path / f"weights.{ending}"
    if ending == "pth":
        torch.save(state, path)
    else:
        save_file(state, path)
    whole = path.read_bytes()
    spoilt = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "garbage": os.urandom(500),
        "text": b"hello\n" * 9,
    }
    path.write_bytes(spoilt[damage])
    with pytest.raises(CheckpointError) as error:
        small(path)
    assert path.name in one_line(error)


class Trap:
    """A pickle that makes a file when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("legacy", [True, False])
def test_code_in_a_file_is_never_run(tmp_path: Path, state: State, legacy: bool) -> None:
    path, mark = tmp_path / "weights.pth", tmp_path / "mark"
    if legacy:
        path.write_bytes(pickle.dumps({"state_dict": Trap(mark)}, protocol=2))
    else:
        torch.save({**state, "trap": Trap(mark)}, path)
    with pytest.raises(CheckpointError) as error:
        small(path)
    assert "state_dict" in one_line(error)
    assert not mark.exists()


@pytest.mark.parametrize("held", [[torch.rand(2)], {"epoch": 3}, {}, torch.rand(3), {"state_dict": {"a": 1}}])
def test_a_file_with_no_named_tensors_is_one_line(tmp_path: Path, held: object) -> None:
    torch.save(held, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError) as error:
        small(tmp_path / "weights.pt")
    assert "no tensors" in one_line(error)


@pytest.mark.parametrize("name", ["missing.pth", "tim", "", "weights.bin", "folder.pth"])
def test_weights_that_are_no_file_list_the_choices(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights.bin").touch()
    (tmp_path / "folder.pth").mkdir()
    with pytest.raises(ConfigError) as error:
        small(str(tmp_path / name) if name else "")
    assert all(word in one_line(error) for word in ("none", "timm", ".safetensors", ".pth"))
