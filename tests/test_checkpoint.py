"""Checkpoints: an exact round trip, no code in a file, one line about a bad one, all or nothing on disk."""

import errno
import json
import os
import pickle
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vicinal import checkpoint
from vicinal.checkpoint import (
    FORMAT,
    Taught,
    Trained,
    load,
    load_taught,
    read_tensors,
    save,
    save_taught,
    taught_of,
    with_taught,
    write_tensors,
)
from vicinal.errors import CheckpointError
from vicinal.functional.memory import empty_memory
from vicinal.models.backbones import build_classifier, preprocessing_for
from vicinal.models.inference import InferenceNet, StreamInferenceNet

PARTS = ("model", "phi", "anchor_phi", "predict_phi")
CHOICE = {
    "methods": {"vnl": {"stream": {"update": "anchored", "lr": 3e-4, "predict": "labels"}}},
    "table": [{"method": "vnl", "accuracy": 0.1 + 0.2, "chosen": True}, {"method": "soft", "nll": 1e-300}],
}


def randomize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in module.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator))
        else:
            value.fill_(7)


@pytest.fixture
def trained() -> Trained:
    preprocessing = preprocessing_for("small", 3, 12, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 1 / 3))
    model = build_classifier("small", 5, preprocessing=preprocessing)
    phi = InferenceNet(96, hidden=11, initial_std=0.037)
    nets = (phi, StreamInferenceNet(hidden=3, rounds=1, decay=0.7, reference_batch=9), StreamInferenceNet(4))
    for seed, module in enumerate((model, *nets)):
        randomize(module, seed)
    model.std.fill_(0.5)
    names = ("cat", "dög", "狗", 'a "quoted" name', "")
    config = {"iterations": 10, "lr": 0.1, "nested": {"none": None, "list": [1, 2.5, "x"]}}
    provenance = {"dataset": "pets", "sources": ["a", "b"], "seed": 3, "accuracy": 1 / 3}
    described = {"choice": CHOICE, "config": config, "provenance": provenance, "versions": {"torch": "x"}}
    return Trained(model.eval(), "small", names, preprocessing, "meta", *nets, **described)


@pytest.fixture
def path(tmp_path: Path, trained: Trained) -> Path:
    file = tmp_path / "run" / "model.safetensors"
    save(file, trained)
    return file


def one_line(caught: Any, file: Path | None = None) -> str:
    text = str(caught.value)
    assert "\n" not in text
    assert file is None or str(file) in text
    return text


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Write the file again after a change of its tensors and header."""
    tensors, header = read_tensors(path)
    change(tensors, header)
    save_file(tensors, path, metadata={"vicinal": json.dumps(header)})


def test_everything_comes_back(trained: Trained, path: Path) -> None:
    found = load(path)
    for part in PARTS:
        before, after = getattr(trained, part).state_dict(), getattr(found, part).state_dict()
        assert list(before) == list(after)
        for name in before:
            assert before[name].dtype == after[name].dtype
            assert torch.equal(before[name], after[name])
        assert not any(module.training for module in getattr(found, part).modules())
    for name in ("backbone", "classes", "preprocessing", "algorithm", "choice", "config", "provenance"):
        assert getattr(found, name) == getattr(trained, name)
    assert found.versions == trained.versions
    for part in PARTS[1:]:
        assert getattr(found, part).shape == getattr(trained, part).shape


def test_what_is_loaded_computes_the_same(trained: Trained, path: Path) -> None:
    found, x = load(path), torch.rand(3, 3, 12, 12)
    z, logits = trained.model.features_and_logits(x)
    assert torch.equal(found.model(x), logits)
    head = trained.model.linear
    memory = empty_memory(head)
    for part in ("anchor_phi", "predict_phi"):
        one, other = (getattr(source, part)(z, logits, head, memory) for source in (trained, found))
        assert all(torch.equal(a, b) for a, b in zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True))


def test_parts_that_are_not_there_stay_away(trained: Trained, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save(file, replace(trained, phi=None, predict_phi=None))
    found = load(file)
    assert found.phi is None
    assert found.predict_phi is None
    assert found.anchor_phi is not None


def test_a_second_round_trip_is_byte_for_byte_the_first(path: Path, tmp_path: Path) -> None:
    save(tmp_path / "again.safetensors", load(path))
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_folder_stands_for_the_checkpoint_in_it(trained: Trained, path: Path) -> None:
    assert load(path.parent).classes == trained.classes
    assert load(str(path)).classes == trained.classes


def test_saving_takes_the_sources_mode_and_tensors_as_they_are(trained: Trained, tmp_path: Path) -> None:
    trained.model.train()
    before = [value.clone() for value in trained.model.state_dict().values()]
    save(tmp_path / "model.safetensors", trained)
    assert trained.model.training
    assert all(map(torch.equal, before, trained.model.state_dict().values()))


def test_tensors_that_share_memory_or_are_strided_are_written(tmp_path: Path) -> None:
    base = torch.rand(4, 6)
    tensors = {"base": base, "view": base[1:], "turned": base.T, "count": torch.tensor(3)}
    write_tensors(tmp_path / "x", tensors, {"kind": "other"})
    found, header = read_tensors(tmp_path / "x")
    assert header["kind"] == "other"
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


class Armed:
    """A pickle that leaves a trace when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_no_code_in_a_file_is_executed(tmp_path: Path, write: Any) -> None:
    file, trace = tmp_path / "model.safetensors", tmp_path / "trace"
    with file.open("wb") as handle:
        write(Armed(trace), handle)
    with pytest.raises(CheckpointError) as caught:
        load(file)
    one_line(caught, file)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Armed(trace)))
    assert trace.exists()  # the trap works where a loader does execute code


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 200, 0.5, -1])
def test_a_truncated_file_is_refused(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep == 0.5 else int(keep)])
    with pytest.raises(CheckpointError, match="damaged, or not a safetensors file") as caught:
        load(path)
    one_line(caught, path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"\xff" * 64, b"PK\x03\x04" * 8, b"not a model"])
def test_any_other_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(file)
    one_line(caught, file)


def test_a_folder_without_a_checkpoint_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for wrong in (tmp_path, tmp_path / "nothing.safetensors", tmp_path / "no" / "folder"):
        with pytest.raises(CheckpointError, match="no such checkpoint") as caught:
            load(wrong)
        one_line(caught, wrong)


def test_a_folder_in_the_place_of_the_file_is_refused(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    one_line(caught, tmp_path)
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        save(tmp_path / "model.safetensors", trained)
    one_line(caught, tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_a_safetensors_file_of_someone_else_is_refused(tmp_path: Path, metadata: Any) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"model.head.weight": torch.rand(2, 3)}, file, metadata=metadata)
    with pytest.raises(CheckpointError, match="not one of vicinal's") as caught:
        load(file)
    one_line(caught, file)


def test_another_format_is_named(path: Path) -> None:
    rewrite(path, lambda tensors, header: header.update(format=99))
    with pytest.raises(CheckpointError, match=f"format 99; this version reads format {FORMAT}"):
        load(path)


def test_the_state_of_a_training_is_no_model(tmp_path: Path) -> None:
    write_tensors(tmp_path / "state", {"x": torch.zeros(1)}, {"kind": "state"})
    with pytest.raises(CheckpointError, match="unfinished training") as caught:
        load(tmp_path / "state")
    one_line(caught, tmp_path)


DISAGREE: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "too many classes": lambda tensors, header: header["classes"].append("more"),
    "too few classes": lambda tensors, header: header["classes"].pop(),
    "classes missing": lambda tensors, header: header.pop("classes"),
    "another backbone": lambda tensors, header: header.update(backbone="small_gn"),
    "a tensor missing": lambda tensors, header: tensors.pop("model.head.bias"),
    "a tensor too many": lambda tensors, header: tensors.update({"model.extra": torch.zeros(1)}),
    "a net missing": lambda tensors, header: tensors.pop("phi.mean.bias"),
    "a net of another width": lambda tensors, header: header["nets"]["phi"].update(hidden=12),
    "a net nobody knows": lambda tensors, header: header["nets"].update(psi={}),
    "channels": lambda tensors, header: header["preprocessing"].update(channels=1),
    "preprocessing missing": lambda tensors, header: header.pop("preprocessing"),
    "an option nobody knows": lambda tensors, header: header["nets"]["phi"].update(depth=3),
}


@pytest.mark.parametrize("what", DISAGREE)
def test_weights_that_do_not_fit_their_header_are_refused(path: Path, what: str) -> None:
    rewrite(path, DISAGREE[what])
    with pytest.raises(CheckpointError, match="disagree") as caught:
        load(path)
    one_line(caught, path)


ESCAPES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "a backbone nobody knows": lambda tensors, header: header.update(backbone="smbll"),
    "a size the backbone cannot take": lambda tensors, header: header["preprocessing"].update(size=1),
    "nets that are a list": lambda tensors, header: header.update(nets=["phi"]),
}


@pytest.mark.parametrize("what", ESCAPES)
def test_a_header_of_nonsense_is_a_bad_checkpoint_and_no_other_error(path: Path, what: str) -> None:
    rewrite(path, ESCAPES[what])
    with pytest.raises(CheckpointError) as caught:
        load(path)
    one_line(caught, path)


@pytest.mark.parametrize("header", ["[]", "3", "null", '"x"'])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: str) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "x", metadata={"vicinal": header})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "x")
    one_line(caught, tmp_path)


def test_the_message_names_the_tensor_that_does_not_fit(path: Path) -> None:
    rewrite(path, DISAGREE["too many classes"])
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        load(path)


def complaint(path: Path) -> str | None:
    """Return what loading a file complains of, as a bad checkpoint; any other error is not caught."""
    try:
        load(path)
    except CheckpointError as error:
        return str(error)
    return None


def test_one_flipped_bit_in_the_header_never_escapes_as_another_error(path: Path) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    heard = []
    for position in [*range(16), *range(16, end, 23)]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 7)
        path.write_bytes(damaged)
        heard.append(complaint(path))
    assert not any("\n" in text for text in heard if text is not None)
    assert sum(text is not None for text in heard) > len(heard) / 2


def write_half(tensors: Any, name: Any, metadata: Any = None) -> None:
    save_file(tensors, name, metadata=metadata)
    whole = Path(name).read_bytes()
    Path(name).write_bytes(whole[: len(whole) // 2])
    refuse()


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def failing(how: str) -> Iterator[None]:
    """Let a write fail in one of the ways in which disks fail it."""
    if how == "limit":  # a real one: the kernel lets no file grow past 4 KiB
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return
    with pytest.MonkeyPatch.context() as patch:
        if how == "half":
            patch.setattr(checkpoint, "save_file", write_half)
        else:
            patch.setattr(checkpoint.tempfile if how == "mkstemp" else os, how, refuse)
        yield


FAILURES = ("half", "limit", "fsync", "replace", "mkstemp")


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, trained: Trained, how: str) -> None:
    file = tmp_path / "model.safetensors"
    with failing(how), pytest.raises(CheckpointError, match="could not be written") as caught:
        save(file, trained)
    assert "intact" not in one_line(caught, file)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_write_leaves_the_old_file_as_it_was(path: Path, trained: Trained, how: str) -> None:
    before = path.read_bytes()
    randomize(trained.model, seed=50)
    with failing(how), pytest.raises(CheckpointError, match="could not be written") as caught:
        save(path, trained)
    assert "intact" in one_line(caught, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    save(path, trained)  # and once there is room again it works
    assert path.read_bytes() != before
    assert torch.equal(load(path).model.head.weight, trained.model.head.weight)


def test_an_interrupted_write_leaves_the_old_file_as_it_was(path: Path, trained: Trained) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(path, trained)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def taught(trained: Trained) -> Taught:
    found = taught_of(
        replace(trained, config={**trained.config, "out_of_fold": {"epochs": 3, "baselines": []}})
    )
    assert found is not None
    return found


@pytest.fixture
def taught_path(tmp_path: Path, taught: Taught) -> Path:
    save_taught(tmp_path / "run" / "taught.safetensors", taught, "mine")
    return tmp_path / "run" / "taught.safetensors"


def test_what_was_taught_comes_back_and_is_small(taught: Taught, taught_path: Path, path: Path) -> None:
    found = load_taught(taught_path, "mine")
    for part in ("anchor_phi", "predict_phi"):
        before, after = getattr(taught, part), getattr(found, part)
        assert after.shape == before.shape
        assert not any(module.training for module in after.modules())
        for name, value in before.state_dict().items():
            assert torch.equal(after.state_dict()[name], value)
    assert (found.choice, found.out_of_fold) == (taught.choice, taught.out_of_fold)
    assert taught_path.stat().st_size < path.stat().st_size / 10
    # Packed as in a checkpoint.
    whole = read_tensors(path)[0]
    assert all(torch.equal(whole[name], value) for name, value in read_tensors(taught_path)[0].items())


def test_a_model_given_what_was_taught_is_as_if_it_had_been_taught_itself(
    trained: Trained, taught: Taught, taught_path: Path, tmp_path: Path
) -> None:
    save(tmp_path / "one.safetensors", with_taught(trained, taught))
    bare = replace(trained, anchor_phi=None, predict_phi=None, choice={})
    assert taught_of(bare) is None
    save(tmp_path / "other.safetensors", with_taught(bare, load_taught(taught_path, "mine")))
    assert (tmp_path / "other.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    found = load(tmp_path / "other.safetensors")
    assert (found.choice, found.config) == (CHOICE, {**trained.config, "out_of_fold": taught.out_of_fold})
    assert bare.config == trained.config  # the one that was given is as it was


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_cut_off_file_of_what_was_taught_is_refused(taught_path: Path, keep: int) -> None:
    taught_path.write_bytes(taught_path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged, or not a safetensors file") as caught:
        load_taught(taught_path, "mine")
    one_line(caught, taught_path)


def test_neither_kind_of_file_is_taken_for_the_other(path: Path, taught_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not hold what left-out domains taught") as caught:
        load_taught(path, "mine")
    one_line(caught, path)
    with pytest.raises(CheckpointError, match="holds what left-out domains taught, not the model") as caught:
        load(taught_path)
    one_line(caught, taught_path)


def test_what_was_taught_for_another_model_is_refused(taught_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"for another model \(mine, not another\): remove it"
    ) as caught:
        load_taught(taught_path, "another")
    one_line(caught, taught_path)
    rewrite(taught_path, lambda tensors, header: header.pop("of"))
    with pytest.raises(CheckpointError, match="nobody knows which"):
        load_taught(taught_path, "mine")


FOREIGN: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "another format": lambda tensors, header: header.update(format=99),
    "no choice": lambda tensors, header: header.pop("choice"),
    "a net missing": lambda tensors, header: header["nets"].pop("predict_phi"),
    "a net too many": lambda tensors, header: header["nets"].update(phi=header["nets"]["anchor_phi"]),
    "a tensor missing": lambda tensors, header: tensors.pop(min(tensors)),
    "nets that are a list": lambda tensors, header: header.update(nets=["anchor_phi"]),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_of_what_was_taught_is_refused(taught_path: Path, what: str) -> None:
    rewrite(taught_path, FOREIGN[what])
    with pytest.raises(CheckpointError, match="format 99" if "format" in what else "disagree") as caught:
        load_taught(taught_path, "mine")
    one_line(caught, taught_path)


@pytest.mark.parametrize("how", [how for how in FAILURES if how != "limit"])  # it is smaller than that
def test_what_was_taught_is_written_whole_or_not_at_all(tmp_path: Path, taught: Taught, how: str) -> None:
    file = tmp_path / "taught.safetensors"
    with failing(how), pytest.raises(CheckpointError, match="could not be written"):
        save_taught(file, taught, "mine")
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path, trained: Trained) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        save(tmp_path / "file" / "model.safetensors", trained)
    one_line(caught, tmp_path)


def test_a_checkpoint_can_be_read_by_whom_the_umask_lets(path: Path) -> None:
    beside = path.parent / "beside"
    beside.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(beside.stat().st_mode)
