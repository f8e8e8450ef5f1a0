import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from vicinal.data.streams import Stream
from vicinal.errors import DataError
from vicinal.evaluation.example import (
    FILE,
    Example,
    add_examples,
    changed_positions,
    examples_from,
    load_examples,
    save_examples,
)


def example(channels: int = 3, side: int = 8, truth: str = "b", **more: str) -> Example:
    image = torch.arange(channels * side * side).reshape(channels, side, side).remainder(251).to(torch.uint8)
    return Example(image, truth, "a", 0.25, "b", 0.75, "90", **more)


@pytest.mark.parametrize("channels", [1, 3])
def test_examples_come_back_as_they_were_saved(tmp_path: Path, channels: int) -> None:
    kept = [example(channels), example(channels, truth="a", method="vnl", setting="MNIST")]
    save_examples(tmp_path / "new", kept)
    read = load_examples(tmp_path / "new")
    assert len(read) == 2
    for one, other in zip(kept, read, strict=True):
        assert torch.equal(one.image, other.image)
        for name in ("truth", "before", "before_confidence", "after", "after_confidence", "target"):
            assert getattr(one, name) == getattr(other, name)
    assert (read[1].method, read[1].setting) == ("vnl", "MNIST")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]


def test_the_image_in_the_file_is_a_png_that_anyone_can_open(tmp_path: Path) -> None:
    save_examples(tmp_path, [example(3, 400)])
    stored = json.loads((tmp_path / FILE).read_text())[0]
    with Image.open(io.BytesIO(base64.b64decode(stored["image"]))) as picture:
        assert (picture.format, picture.size) == ("PNG", (192, 192))
    assert load_examples(tmp_path)[0].image.shape == (3, 192, 192)


def test_no_file_is_no_examples(tmp_path: Path) -> None:
    assert load_examples(tmp_path) == []


@pytest.mark.parametrize("text", ["{", "[1]", '[{"image": "AAAA"}]', '[{"truth": "a"}]', "7"])
def test_a_spoilt_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match="not a file of examples"):
        load_examples(tmp_path)


def test_fixed_and_broken() -> None:
    fixed, broken = example(truth="b"), example(truth="a")
    neither = example(truth="c")
    assert (fixed.fixed, fixed.broken) == (True, False)
    assert (broken.fixed, broken.broken) == (False, True)
    assert (neither.fixed, neither.broken) == (False, False)


def test_changed_positions_are_the_first_fixed_and_then_the_first_broken() -> None:
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.rand(60, 3, generator=generator) for _ in range(2))
    truth = torch.randint(3, (60,), generator=generator)
    fixed, broken = [], []
    for i in range(60):
        old, new = int(before[i].argmax()), int(after[i].argmax())
        if new == truth[i] != old:
            fixed.append(i)
        if old == truth[i] != new:
            broken.append(i)
    assert len(fixed) > 3
    assert len(broken) > 3
    assert changed_positions(before, after, truth, 3) == fixed[:3] + broken[:3]
    assert changed_positions(before, before, truth, 3) == []


def test_examples_are_images_of_the_stream_with_what_was_said_of_them() -> None:
    images = torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1).expand(4, 3, 2, 2)
    answers = torch.tensor([0, 1, 1, 0])
    stream = Stream("online", images, torch.tensor([3, 1, 0, 2]), 2)
    # In order of arrival the truths are 0, 1, 0, 1.
    before = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    after = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
    fixed, broken = examples_from(stream, answers, before, after, ("cat", "dog"), "90")
    assert int(fixed.image[0, 0, 0]) == 1
    assert (fixed.truth, fixed.before, fixed.after, fixed.target) == ("dog", "cat", "dog", "90")
    assert fixed.before_confidence == pytest.approx(0.8)
    assert fixed.after_confidence == pytest.approx(0.8)
    assert int(broken.image[0, 0, 0]) == 3
    assert (broken.truth, broken.before, broken.after) == ("cat", "cat", "dog")
    assert broken.broken


def test_added_examples_replace_their_own_kind_alone(tmp_path: Path) -> None:
    add_examples(tmp_path / "new", [example(truth="a", setting="one"), example(truth="b", setting="one")])
    add_examples(tmp_path / "new", [example(truth="c", setting="two")])
    add_examples(tmp_path / "new", [example(truth="d", setting="one")])
    found = [(e.setting, e.truth) for e in load_examples(tmp_path / "new")]
    assert found == [("two", "c"), ("one", "d")]


def test_examples_added_at_once_all_arrive(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: add_examples(tmp_path, [example(setting=str(n))]), range(24)))
    assert {e.setting for e in load_examples(tmp_path)} == {str(n) for n in range(24)}
