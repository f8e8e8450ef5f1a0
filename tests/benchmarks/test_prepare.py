from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vicinal.benchmarks.prepare import TrainRequest, prepare_training, roles_for
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError, DataError
from vicinal.models.backbones import build_classifier


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for domain in ("one", "three", "two"):
        for label in ("a", "b"):
            (tmp_path / "own" / domain / label).mkdir(parents=True)
            for index in range(3):
                image = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                image.save(tmp_path / "own" / domain / label / f"{index}.png")
    return tmp_path / "own"


def test_digits_need_nothing_said() -> None:
    ready = prepare_training(TrainRequest("digits", seed=4))
    assert (ready.spec.backbone, ready.spec.weights) == ("small", "none")
    assert (ready.spec.preprocessing.size, ready.spec.preprocessing.channels) == (16, 1)
    assert [target.name for target in ready.roles.targets] == ["0", "90"]
    facts = ready.provenance
    assert (facts["dataset"], facts["targets"], facts["data_seed"]) == ("digits", ["0", "90"], 4)
    assert facts["data_options"] == {}
    assert facts["data"]["size"] == 16
    assert ready.config.seed == 4
    assert ready.out_of_fold is not None


def test_a_folder_is_known_by_its_whole_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    ready = prepare_training(TrainRequest("own", ("two",), "small", size=8, out_of_fold=None))
    assert ready.provenance["dataset"] == str(folder)
    assert [source.name for source in ready.roles.sources] == ["one", "three"]
    assert ready.out_of_fold is None
    assert ready.spec.preprocessing.channels == 3


def test_settings_are_checked_before_images_are_read(folder: Path) -> None:
    (folder / "one" / "a" / "0.png").write_bytes(b"text")
    with pytest.raises(ConfigError, match="batch_size"):
        prepare_training(TrainRequest(str(folder), ("two",), "small", training={"batch_size": 0}))
    with pytest.raises(DataError, match=r"one/a/0\.png"):
        prepare_training(TrainRequest(str(folder), ("two",), "small", size=8))


def test_pretrained_nets_get_smaller_steps(folder: Path, tmp_path: Path) -> None:
    request = TrainRequest(str(folder), ("two",), "resnet18", "timm", size=32)
    pretrained = prepare_training(request)
    scratch = prepare_training(TrainRequest(str(folder), ("two",), "resnet18", "none", size=32))
    assert pretrained.config.backbone_lr < scratch.config.backbone_lr
    assert pretrained.out_of_fold is not None
    assert scratch.out_of_fold is not None
    assert max(pretrained.out_of_fold.step_sizes) < min(scratch.out_of_fold.step_sizes)


def test_left_out_domains_are_offered_votes_for_pretrained_nets_alone(folder: Path) -> None:
    def offered(weights: str, **options: Any) -> tuple[str, ...]:
        request = TrainRequest(str(folder), ("two",), "resnet18", weights, size=32, out_of_fold=options)
        out_of_fold = prepare_training(request).out_of_fold
        assert out_of_fold is not None
        return out_of_fold.predictors

    assert offered("timm") == ("own", "labels", "neighbors")
    assert offered("timm", predictors=("own",)) == ("own",)
    assert offered("none") == ("own", "labels")


def test_roles_are_those_of_the_training_unless_told_otherwise(folder: Path) -> None:
    ready = prepare_training(TrainRequest(str(folder), ("two",), "small", size=8))
    model = build_classifier("small", 2, preprocessing=ready.spec.preprocessing)
    trained = Trained(
        model, "small", ("a", "b"), ready.spec.preprocessing, "erm", provenance=ready.provenance
    )
    assert [target.name for target in roles_for(trained).targets] == ["two"]
    assert [target.name for target in roles_for(trained, targets=("one",)).targets] == ["one"]
    moved = folder.rename(folder.with_name("moved"))
    with pytest.raises(DataError, match=rf"no longer at '{folder}'.*--data"):
        roles_for(trained)
    assert [target.name for target in roles_for(trained, str(moved)).targets] == ["two"]
    moved.rename(folder)
    trained.provenance.pop("dataset")
    with pytest.raises(ConfigError, match="--data"):
        roles_for(trained)
    trained.classes = ("a", "c")
    with pytest.raises(DataError, match=r"2 classes \(a, b\).*trained on 2 \(a, c\)"):
        roles_for(trained, str(folder))


def test_source_domains_can_be_named_and_are_on_record() -> None:
    ready = prepare_training(TrainRequest("digits", ("90",), sources=("15", "45", "60")))
    assert [source.name for source in ready.roles.sources] == ["15", "45", "60"]
    assert ready.provenance["sources"] == ["15", "45", "60"]
