"""What a user can mend is one line on stderr, exit code 2, and no file that was not there before.

But for one: the split of own data is made and kept when the data are first looked at.
"""

import shutil
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from vicinal.adapters.methods import METHODS
from vicinal.adapters.statistics import KINDS
from vicinal.checkpoint import read_tensors, write_tensors
from vicinal.data.splits import STORED
from vicinal.data.streams import STREAMS

SMALL = ("--backbone", "small", "--size", 16, "--iterations", 2, "--batch-size", 2, "--device", "cpu")
Refused = Callable[..., str]


@pytest.fixture
def refused(vicinal: Any, snapshot: Any) -> Refused:
    """Return a caller that gives the line of a refusal, having seen that no file came or changed."""

    def call(*words: object) -> str:
        before = snapshot()
        line = vicinal(*words).line
        assert _without_splits(snapshot()) == _without_splits(before)
        return str(line)

    return call


def _without_splits(files: dict[str, bytes]) -> dict[str, bytes]:
    def is_split(path: PurePath) -> bool:
        return path.name == STORED.name or path.match(f"{STORED.name}/split-*.csv")

    return {path: content for path, content in files.items() if not is_split(PurePath(path))}


def test_an_empty_folder_of_domains(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "'empty' holds no domain folders" in refused("train", "empty", "--target", "a", *SMALL)


def test_data_that_do_not_exist(refused: Refused) -> None:
    line = refused("train", "nowhere", *SMALL)
    assert "nowhere" in line
    assert "digits" in line
    assert "folder" in line


def test_a_folder_of_one_domain(refused: Refused, domains_of: Any) -> None:
    root = domains_of(dark=2)
    assert "only the domain 'dark'" in refused("train", root, "--target", "dark", *SMALL)


def test_domains_with_different_classes(refused: Refused, domains: Path) -> None:
    shutil.move(domains / "mid" / "right", domains / "mid" / "wrong")
    line = refused("train", domains, "--target", "light", *SMALL)
    assert "'right' is missing from mid" in line
    assert "'wrong' is only in mid" in line


def test_one_source_domain_is_not_enough(refused: Refused, domains: Path) -> None:
    line = refused("train", domains, "--target", "light", "--target", "mid", "--target", "dim", *SMALL)
    assert "at least two source domains" in line


def test_a_folder_needs_a_target(refused: Refused, domains: Path) -> None:
    assert "--target: one of dark, dim, light, mid" in refused("train", domains, *SMALL)


@pytest.mark.parametrize("damage", ["text", "truncated", "empty"])
@pytest.mark.parametrize("command", ["train", "evaluate", "adapt"])
def test_an_unreadable_image_is_named(
    refused: Refused, domains: Path, model: Path, damage: str, command: str
) -> None:
    victim = domains / "light" / "left" / "3.png"
    content = {"text": b"not an image", "truncated": victim.read_bytes()[:200], "empty": b""}
    victim.write_bytes(content[damage])
    words = {
        "train": ("train", domains, "--target", "light", *SMALL),
        "evaluate": ("evaluate", model, "--data", domains, "--device", "cpu"),
        "adapt": ("adapt", model, domains / "light", "--device", "cpu"),
    }
    line = refused(*words[command])
    assert str(victim) in line
    assert "--skip-bad" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("train", "digits", "--algorithm", "magic"), ("'magic'", "erm", "meta", "neighbor")),
        (("train", "digits", "--backbone", "resnet1"), ("'resnet1'", "small", "resnet50_v1", "timm")),
        (("train", "digits", "--device", "tpu"), ("'tpu'", "auto", "cpu", "cuda")),
        (("train", "digits", "--target", "91"), ("'91'", "0", "15", "30", "45", "60", "75", "90")),
        (("train", "digits", "--harden", "fog"), ("'fog'", "edges", "inversion", "blurred")),
        (("train", "digits", "--batch-size", 0), ("batch_size", "0")),
        (("train", "digits", "--iterations", 0), ("iterations", "0")),
        (("train", "digits", "--backbone-lr", -1), ("backbone_lr", "-1")),
        (("demo", "--seeds", 0), ("--seeds", "0")),
        (("demo", "--device", "tpu"), ("'tpu'", "auto", "cpu", "cuda")),
    ],
)
def test_bad_options_of_train_and_demo(refused: Refused, words: tuple[Any, ...], named: Any) -> None:
    line = refused(*words)
    assert all(name in line for name in named), line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--methods", "erm,tents"), ("'tents'", *METHODS)),
        (("--methods", " , "), ("--methods", "all")),
        (("--statistics", "mean"), ("'mean'", *KINDS)),
        (("--stream", "bursts"), ("'bursts'", *STREAMS)),
        (("--stream", "continual"), ("continual", "two target domains", "--target")),
        (("--stream", "mixed", "--target", "light"), ("mixed", "two target domains", "--target")),
        (("--stream", "label_shift", "--alpha", 0), ("alpha", "0")),
        (("--target", "paintings"), ("'paintings'", "dark", "light", "mid")),
        (("--device", "tpu"), ("'tpu'", "auto", "cpu", "cuda")),
        (("--batch-size", 0), ("batch size", "0")),
        (("--draws", 0), ("--draws", "0")),
        (("--lr", 0), ("lr", "0")),
    ],
)
def test_bad_options_of_evaluate(refused: Refused, model: Path, options: Any, named: Any) -> None:
    line = refused("evaluate", model, "--device", "cpu", *options)
    assert all(name in line for name in named), line


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--method", "tents"), ("'tents'", *METHODS)),
        (("--statistics", "mean"), ("'mean'", *KINDS)),
        (("--device", "tpu"), ("'tpu'", "auto", "cpu", "cuda")),
        (("--batch-size", 0), ("--batch-size", "0")),
        (("--lr", -1), ("lr",)),
    ],
)
def test_bad_options_of_adapt(
    refused: Refused, model: Path, shared_domains: Path, options: Any, named: Any
) -> None:
    line = refused("adapt", model, shared_domains / "light", "--device", "cpu", *options)
    assert all(name in line for name in named), line


@pytest.mark.parametrize("command", [("evaluate",), ("adapt", "--method", "erm")])
def test_a_missing_checkpoint(refused: Refused, shared_domains: Path, command: tuple[str, ...]) -> None:
    folder = (shared_domains / "light",) if command[0] == "adapt" else ()
    line = refused(command[0], "nowhere/run", *folder, *command[1:])
    assert "nowhere/run" in line
    assert "no such checkpoint" in line


@pytest.mark.parametrize("damage", ["cut", "text", "foreign", "state", "shape"])
def test_a_corrupted_checkpoint(refused: Refused, model: Path, shared_domains: Path, damage: str) -> None:
    path = model / "model.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "text":
        path.write_bytes(b"not tensors")
    elif damage == "foreign":
        save_file(load_file(path), path)
    elif damage == "state":
        shutil.copy(model / "state-meta.safetensors", path)
    else:
        _resave_without_a_tensor(path)
    assert str(path) in refused("adapt", model, shared_domains / "light", "--device", "cpu")


def _resave_without_a_tensor(path: Path) -> None:
    tensors, header = read_tensors(path)
    del tensors["model.head.weight"]
    write_tensors(path, tensors, header)


def test_data_with_another_number_of_classes(refused: Refused, model: Path) -> None:
    line = refused("evaluate", model, "--data", "digits", "--target", "0", "--device", "cpu")
    assert "10 classes" in line
    assert "trained on 2 (left, right)" in line


def test_a_folder_that_holds_a_model_is_not_trained_over(refused: Refused, model: Path) -> None:
    line = refused("train", "digits", "--out", model, *SMALL)
    assert str(model) in line
    assert "--resume" in line


def test_a_folder_that_holds_half_a_training_is_not_trained_over(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "state-meta.safetensors").write_bytes(b"half")
    line = refused("train", "digits", "--out", "half", *SMALL)
    assert "half holds a training that was stopped: go on with --resume" in line


def test_data_of_one_class(refused: Refused, domains_of: Any) -> None:
    root = domains_of(dark=4, dim=4, light=4)
    for domain in root.iterdir():
        shutil.rmtree(domain / "right")
    assert "has one class, 'left'" in refused("train", root, "--target", "dark", *SMALL)


def test_the_source_model_is_not_saved_over(refused: Refused, model: Path, domains: Path) -> None:
    words = ("--device", "cpu", "--out", model, "--save-model", "--overwrite")
    line = refused("adapt", model, domains / "light", *words)
    assert f"--save-model would replace {model / 'model.safetensors'}: choose another --out" in line
    assert "--save-model" in refused("adapt", "nowhere", domains / "light", *words)  # before it is loaded


def test_predictions_of_an_earlier_run_are_not_replaced(
    refused: Refused, domains: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "predictions.csv").write_text("mine")
    line = refused("adapt", "nowhere", domains / "light", "--out", "out")  # before the model is loaded
    assert "out/predictions.csv is there from an earlier run: choose another --out" in line
    assert "--overwrite" in line


@pytest.mark.parametrize("command", ["adapt", "demo", "evaluate", "train", "compare"])
def test_an_out_that_is_a_file_is_told_before_the_work(
    refused: Refused, model: Path, domains: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").write_text("")
    words: dict[str, tuple[object, ...]] = {
        "adapt": (model, domains / "light"),
        "demo": ("--quick",),
        "evaluate": (model,),
        "train": (domains, "--target", "light", *SMALL),
        "compare": (domains, "--target", "light"),
    }
    (domains / "light" / "left" / "0.png").write_bytes(b"not an image: who decodes says so")
    line = refused(command, *words[command], "--device", "cpu", "--out", "file/deeper")
    assert "file is a file: choose another --out" in line


def test_weights_that_are_not_finite(refused: Refused, model: Path, domains: Path) -> None:
    path = model / "model.safetensors"
    tensors, header = read_tensors(path)
    tensors["model.head.weight"][0, 0] = float("nan")
    write_tensors(path, tensors, header)
    line = refused("adapt", model, domains / "light", "--device", "cpu")
    assert "its weights 'model.head.weight' are not finite" in line


def test_a_method_that_the_model_cannot_serve(
    refused: Refused, models: dict[str, Path], tmp_path: Path, shared_domains: Path
) -> None:
    line = refused(
        "adapt", models["erm"], shared_domains / "light", "--method", "vnl_paper", "--device", "cpu"
    )
    assert "meta" in line


def test_nothing_is_recorded_when_a_later_method_cannot_be_served(
    refused: Refused, models: dict[str, Path]
) -> None:
    refused("evaluate", models["erm"], "--methods", "erm,vnl_paper", "--out", "records", "--device", "cpu")


def test_too_many_left_out_domains_are_refused_before_training(refused: Refused, domains: Path) -> None:
    assert "leave out 3" in refused("train", domains, "--target", "light", "--leave-out", 3, *SMALL)


@pytest.mark.parametrize(
    "asked",
    [("--calibrate", "temperature"), ("--predictor", "own"), ("--leave-out", 1), ("--harden", "edges")],
)
def test_nothing_is_asked_of_left_out_models_that_are_not_there(
    refused: Refused, domains: Path, asked: tuple[object, ...]
) -> None:
    said = refused("train", domains, "--target", "light", "--no-out-of-fold", *asked, *SMALL)
    assert "--no-out-of-fold leaves out" in said


def test_a_size_of_zero(refused: Refused) -> None:
    quick = (
        "--iterations",
        1,
        "--batch-size",
        2,
        "--no-out-of-fold",
        "--algorithm",
        "erm",
        "--device",
        "cpu",
    )
    assert "0" in refused("train", "digits", "--size", 0, *quick)


def test_an_unknown_predictor_is_refused_before_training(refused: Refused, domains: Path) -> None:
    said = refused("train", domains, "--target", "light", "--predictor", "oracle", *SMALL)
    assert "oracle" in said
    assert "labels, neighbors, own" in said


def test_an_unknown_way_to_calibrate_is_refused_before_training(refused: Refused, domains: Path) -> None:
    said = refused("train", domains, "--target", "light", "--calibrate", "oracle", *SMALL)
    assert "agreement, none, temperature" in said


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("rounds=many", "vnl: rounds is a whole number, not 'many'"),
        ("rounds=0", "rounds that are whole numbers of at least 1"),
        ("method=tent", "vnl: unknown option method"),
        ("inplace=true", "vnl: unknown option inplace"),
        ("seed=null", "vnl: seed is a whole number, not None"),
        ("agreement", "--option takes NAME=VALUE, not 'agreement'"),
        ("joint=TRUE", "vnl: joint is true or false, not 'TRUE'"),
        ("augment=much", 'augment must be true, false, "augmix" or a table'),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "adapt"])
def test_options_of_a_method_that_it_cannot_have(
    refused: Refused, domains: Path, models: dict[str, Path], command: str, option: str, said: str
) -> None:
    words = ("--methods", "vnl") if command == "evaluate" else (domains / "light",)
    assert said in refused(command, models["meta"], *words, "--option", option, "--device", "cpu")


@pytest.mark.parametrize("command", ["evaluate", "adapt"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--lr", 1e-3, "--option", "lr=1e-2"), "lr was given twice: leave out --lr or --option lr=..."),
        (("--statistics", "batch", "--option", "statistics=source"), "statistics was given twice"),
        (("--option", "rounds=2", "--option", " rounds = 3"), "--option rounds=... was given twice"),
    ],
)
def test_an_option_given_twice(
    refused: Refused, model: Path, domains: Path, command: str, given: tuple[object, ...], said: str
) -> None:
    words = ("--methods", "vnl") if command == "evaluate" else (domains / "light",)
    assert said in refused(command, model, *words, *given, "--device", "cpu")


def test_an_option_of_data_given_twice(refused: Refused) -> None:
    given = ("--data-option", "angles=0,45", "--data-option", "angles=0,90")
    assert "--data-option angles=... was given twice" in refused("train", "digits", *given)


def test_a_bad_marginal_is_refused_before_training(refused: Refused, domains: Path) -> None:
    assert "alpha" in refused("train", domains, "--target", "light", "--marginal", -1, *SMALL)


@pytest.mark.parametrize("command", ["train", "evaluate", "adapt"])
def test_an_out_that_is_a_file(
    refused: Refused, domains: Path, models: dict[str, Path], tmp_path: Path, command: str
) -> None:
    (tmp_path / "taken").write_text("mine")
    words = {
        "train": ("train", domains, "--target", "light", *SMALL),
        "evaluate": ("evaluate", models["meta"], "--methods", "erm"),
        "adapt": ("adapt", models["meta"], domains / "light", "--method", "erm"),
    }
    assert "taken" in refused(*words[command], "--out", tmp_path / "taken", "--device", "cpu")
