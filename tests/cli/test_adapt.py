import csv
import errno
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.adapters.methods import adapt
from vicinal.checkpoint import load
from vicinal.data.files import list_images
from vicinal.data.images import decode_all
from vicinal.report.bars import Bars

HEADER = ["path", "label", "probability", "entropy"]
DRAWN = [*HEADER, "spread"]


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_predictions_are_those_of_an_adapter_run_by_hand(
    vicinal: Any, model: Path, shared_domains: Path, tmp_path: Path
) -> None:
    folder = shared_domains / "light"
    ran = vicinal(
        "adapt",
        model,
        folder,
        "--batch-size",
        7,
        "--in-order",
        "--no-guard",
        "--out",
        "out",
        "--device",
        "cpu",
    )
    assert ran.code == 0, ran.err
    assert "20 predictions" in ran.out
    assert "guard" not in ran.out
    header, *lines = rows(tmp_path / "out" / "predictions.csv")
    assert header in (HEADER, DRAWN)
    paths = list_images(folder)
    assert [line[0] for line in lines] == [str(path.relative_to(folder)) for path in paths]
    trained = load(model)
    adapter = adapt(trained, "vnl", seed=0)
    images = decode_all(paths, 16, 3, False)[0].float() / 255
    p = torch.cat([adapter(part).softmax(-1) for part in images.split(7)])
    for line, own in zip(lines, p.tolist(), strict=True):
        assert line[1] == trained.classes[own.index(max(own))]
        assert float(line[2]) == pytest.approx(max(own), abs=2e-6)
        assert float(line[3]) == pytest.approx(-sum(v * math.log(v) for v in own if v > 0), abs=2e-6)
        assert 0 < float(line[2]) <= 1
        assert float(line[3]) >= 0


def test_options_of_a_method_are_those_of_an_adapter_run_by_hand(
    vicinal: Any, model: Path, shared_domains: Path, tmp_path: Path
) -> None:
    folder = shared_domains / "light"
    told = ("--option", "predict=neighbors", "--option", "rounds=3", "--option", "statistics=batch")
    plain = ("--batch-size", 10, "--in-order", "--no-guard", "--out", "out", "--device", "cpu")
    ran = vicinal("adapt", model, folder, *told, *plain)
    assert ran.code == 0, ran.err
    adapter = adapt(load(model), "vnl", seed=0, predict="neighbors", rounds=3, statistics="batch")
    images = decode_all(list_images(folder), 16, 3, False)[0].float() / 255
    p = torch.cat([adapter(part).softmax(-1) for part in images.split(10)])
    _, *lines = rows(tmp_path / "out" / "predictions.csv")
    assert [float(line[2]) for line in lines] == pytest.approx(p.amax(-1).tolist(), abs=2e-6)


def test_every_kind_of_image_is_read_as_its_plain_version(vicinal: Any, model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    gray = Image.fromarray(rng.integers(0, 256, (16, 16), dtype=np.uint8))
    color = Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    folder = tmp_path / "mixed"
    folder.mkdir()
    gray.convert("RGB").save(folder / "gray-plain.png")
    gray.save(folder / "gray-one-channel.png")
    Image.fromarray(np.asarray(gray).astype(np.uint16) * 257).save(folder / "gray-16-bit.png")
    gray.save(folder / "gray-animated.gif", save_all=True, append_images=[gray.rotate(90), gray.rotate(180)])
    color.save(folder / "color-plain.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned clockwise by 90 degrees when shown
    color.rotate(90).save(folder / "color-exif.png", exif=turned)
    color.convert("CMYK").save(folder / "color-cmyk.tif")
    ran = vicinal("adapt", model, folder, "--method", "erm", "--out", "out", "--device", "cpu")
    assert ran.code == 0, ran.err
    found = {line[0]: line[1:] for line in rows(tmp_path / "out" / "predictions.csv")[1:]}
    assert len(found) == 7
    for name in ("gray-one-channel.png", "gray-16-bit.png", "gray-animated.gif"):
        assert found[name] == found["gray-plain.png"], name
    for name in ("color-exif.png", "color-cmyk.tif"):
        assert found[name] == found["color-plain.png"], name
    assert found["gray-plain.png"] != found["color-plain.png"]


@pytest.mark.parametrize("method", ["bn", "soft", "vnl", "vnl_paper"])
def test_batches_of_one(vicinal: Any, model: Path, domains: Path, tmp_path: Path, method: str) -> None:
    folder = domains / "light" / "left"
    words = ("--batch-size", 1, "--method", method, "--out", "out", "--device", "cpu")
    assert vicinal("adapt", model, folder, *words).code == 0
    lines = rows(tmp_path / "out" / "predictions.csv")[1:]
    assert len(lines) == 10
    assert all(math.isfinite(float(value)) for line in lines for value in line[2:4])


def test_bad_images_are_counted_listed_and_left_out(
    vicinal: Any, model: Path, domains: Path, tmp_path: Path
) -> None:
    (domains / "light" / "left" / "2.png").write_bytes(b"text")
    (domains / "light" / "right" / "5.png").write_bytes(b"")
    ran = vicinal("adapt", model, domains / "light", "--skip-bad", "--out", "out", "--device", "cpu")
    assert ran.code == 0
    assert "2 unreadable images" in ran.out
    joined = ran.out.replace("\n", "")
    assert "left/2.png" in joined
    assert "right/5.png" in joined
    names = [line[0] for line in rows(tmp_path / "out" / "predictions.csv")[1:]]
    assert len(names) == 18
    assert not {"left/2.png", "right/5.png"} & set(names)


def test_only_bad_images(vicinal: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"text")
    assert "none of its 1 images" in vicinal("adapt", model, tmp_path / "bad", "--skip-bad").line
    assert not (tmp_path / "adapted").exists()


def test_an_empty_folder(vicinal: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no images" in vicinal("adapt", model, tmp_path / "empty").line
    assert not (tmp_path / "adapted").exists()


def test_the_saved_model_has_moved_and_can_adapt_again(
    vicinal: Any, model: Path, shared_domains: Path, tmp_path: Path, same_tensors: Any
) -> None:
    words = ("--method", "soft", "--lr", 1e-3, "--device", "cpu", "--no-guard")
    first = vicinal("adapt", model, shared_domains / "light", *words, "--out", "one", "--save-model")
    assert first.code == 0, first.err
    before, after = load(model), load(tmp_path / "one")
    assert not same_tensors(before, after)
    assert after.classes == before.classes
    assert after.provenance["adapted_steps"] == 1
    again = vicinal("adapt", "one", shared_domains / "light", *words, "--out", "two")
    assert again.code == 0, again.err
    assert rows(tmp_path / "one" / "predictions.csv") != rows(tmp_path / "two" / "predictions.csv")


def test_a_file_name_that_is_not_utf8(vicinal: Any, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    Image.new("RGB", (16, 16)).save(folder / "plain.png")
    os.rename(os.fsencode(folder / "plain.png"), os.fsencode(folder) + b"/caf\xe9.png")  # noqa: PTH104
    assert vicinal("adapt", model, folder, "--method", "erm", "--out", "out").code == 0
    assert len(rows(tmp_path / "out" / "predictions.csv")) == 2


def test_the_guard_reports_and_the_spread_is_written_where_w_was_drawn(
    vicinal: Any, model: Path, shared_domains: Path, tmp_path: Path
) -> None:
    folder, words = shared_domains / "light", ("--out", "out", "--device", "cpu")
    ran = vicinal("adapt", model, folder, "--method", "labels", "--no-guard", *words)
    assert ran.code == 0, ran.err
    header, *lines = rows(tmp_path / "out" / "predictions.csv")
    assert header == DRAWN
    # Zero where phi, fitted on a handful of images, does not trust itself.
    assert all(0 <= float(line[4]) <= 0.5 for line in lines)
    again = ("--method", "erm", "--overwrite", *words)
    assert vicinal("adapt", model, folder, *again).out.count("no alarm in 1 batches") == 1
    assert rows(tmp_path / "out" / "predictions.csv")[0] == HEADER


def test_a_runaway_step_size_is_caught_and_said(
    vicinal: Any, model: Path, shared_domains: Path, tmp_path: Path
) -> None:
    words = ("--method", "soft", "--lr", 100, "--batch-size", 10, "--out", "out", "--device", "cpu")
    ran = vicinal("adapt", model, shared_domains / "light", *words)
    assert ran.code == 0, ran.err
    assert "rolled back to the source" in ran.out
    assert all(math.isfinite(float(line[2])) for line in rows(tmp_path / "out" / "predictions.csv")[1:])


def test_what_was_predicted_before_an_interrupt_is_written(
    vicinal: Any, model: Path, domains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Bars.count

    def interrupted(self: Bars, task: str, what: str, done: int, total: int) -> None:
        count(self, task, what, done, total)
        if done >= 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bars, "count", interrupted)
    words = ("--batch-size", 5, "--save-model", "--out", "out", "--device", "cpu")
    ran = vicinal("adapt", model, domains / "light", *words)
    assert ran.code == 130
    assert "10 predictions in" in ran.out
    assert "10 images are left, and no model was saved" in ran.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["predictions.partial.csv"]
    assert len(rows(tmp_path / "out" / "predictions.partial.csv")) == 11
    monkeypatch.setattr(Bars, "count", count)
    assert vicinal("adapt", model, domains / "light", *words).code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.safetensors", "predictions.csv",
    ]  # fmt: skip


def test_an_interrupted_run_leaves_the_whole_predictions_of_an_earlier_one(
    vicinal: Any, model: Path, domains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (model, domains / "light", "--batch-size", 5, "--out", "out", "--device", "cpu", "--overwrite")
    assert vicinal("adapt", *words, "--method", "erm").code == 0
    before, count = (tmp_path / "out" / "predictions.csv").read_bytes(), Bars.count

    def terminated(self: Bars, task: str, what: str, done: int, total: int) -> None:
        count(self, task, what, done, total)
        if done == 10:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Bars, "count", terminated)
    caught = signal.getsignal(signal.SIGTERM)
    ran = vicinal("adapt", *words, "--method", "bn")
    assert ran.code == 130
    assert "10 predictions in out/predictions.partial.csv" in ran.out
    assert "10 images are left" in ran.err
    assert (tmp_path / "out" / "predictions.csv").read_bytes() == before
    assert len(rows(tmp_path / "out" / "predictions.partial.csv")) == 11
    assert signal.getsignal(signal.SIGTERM) == caught


def test_a_bad_image_on_the_way_keeps_what_was_predicted(
    vicinal: Any, model: Path, domains: Path, tmp_path: Path
) -> None:
    folder = domains / "light"
    (folder / "right" / "2.png").write_bytes(b"text")
    words = (model, folder, "--batch-size", 5, "--in-order", "--out", "out", "--device", "cpu")
    ran = vicinal("adapt", *words)
    assert "right/2.png: not an image" in ran.line
    assert "--skip-bad to go on without it: 10 of 20 images are left" in ran.line
    assert "10 predictions in out/predictions.partial.csv" in ran.out
    found = rows(tmp_path / "out" / "predictions.partial.csv")[1:]
    assert [line[0] for line in found] == [f"left/{k}.png" for k in range(10)]
    assert vicinal("adapt", *words, "--skip-bad").code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["predictions.csv"]
    assert len(rows(tmp_path / "out" / "predictions.csv")) == 20


def test_a_full_disk_on_the_way_is_one_line_that_names_the_file(
    vicinal: Any, model: Path, domains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == "predictions.csv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    ran = vicinal("adapt", model, domains / "light", "--batch-size", 5, "--out", "out", "--device", "cpu")
    assert "out/predictions.csv cannot be written (No space left on device)" in ran.line
    assert len(rows(tmp_path / "out" / "predictions.partial.csv")) == 21


def test_files_that_do_not_look_like_images_are_counted(
    vicinal: Any, model: Path, domains: Path, tmp_path: Path
) -> None:
    (domains / "light" / "left" / "9.png").rename(domains / "light" / "IMG_9")
    (domains / "light" / "left" / "notes.txt").touch()
    ran = vicinal("adapt", model, domains / "light", "--method", "erm", "--out", "out", "--device", "cpu")
    assert "2 files without the suffix of an image were left out, as IMG_9" in ran.out
    assert "19 predictions" in ran.out
    ran = vicinal("adapt", model, domains / "mid", "--method", "erm", "--out", "other", "--device", "cpu")
    assert "suffix" not in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "erm", "--lr", 3), "erm: lr plays no part here"),
        (("--option", "update=none", "--option", "rounds=3", "--lr", 3), "vnl: lr, rounds play no part here"),
        (("--option", "update=entropy", "--option", "predict=own", "--lr", 1e-4), ""),
    ],
)
def test_options_that_play_no_part_are_named(
    vicinal: Any, model: Path, domains: Path, words: tuple[object, ...], said: str
) -> None:
    ran = vicinal("adapt", model, domains / "light", *words, "--device", "cpu")
    assert ran.code == 0, ran.err
    assert said in ran.out
    assert ("no part here" in ran.out) == bool(said)
