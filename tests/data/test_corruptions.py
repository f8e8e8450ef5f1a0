import json
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vicinal.data import corruptions
from vicinal.data.cifar import CORRUPTIONS
from vicinal.data.corruptions import corrupted, library_version, regenerate
from vicinal.errors import DataError

Calls = list[tuple[str, int]]


def images(count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 200, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)


def fake_corrupt(image: Any, severity: int, corruption_name: str, seed: int | None = None) -> Any:
    """Stands in for the library: noise from the global generator, or from the seed where it takes one."""
    print("the library prints")
    own = np.random if seed is None else np.random.default_rng(seed)
    return (image + severity + own.normal(size=image.shape) ** 2).astype(np.uint8)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A stand-in for the library; returns the list of what it was called for."""
    calls: Calls = []

    def corrupt(image: Any, **options: Any) -> Any:
        calls.append((options["corruption_name"], options["severity"]))
        takes_seed = options["corruption_name"] in ("impulse_noise", "glass_blur")
        assert ("seed" in options) == takes_seed
        return fake_corrupt(image, **options)

    module = types.ModuleType(corruptions.MODULE)
    module.corrupt = corrupt  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, corruptions.MODULE, module)
    monkeypatch.setattr(corruptions, "library_version", lambda: "9.9")
    return calls


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(DataError, match=r"pip install 'vicinal\[corruptions\]'"):
        library_version()
    with pytest.raises(DataError, match=r"pip install 'vicinal\[corruptions\]'"):
        regenerate(images(), [("fog", 1)])


@pytest.mark.parametrize("corruption", ["gaussian_noise", "impulse_noise"])
def test_each_image_has_a_seed_of_its_own(library: Calls, corruption: str) -> None:
    same = images(1).expand(4, -1, -1, -1)
    whole = corrupted(same, corruption, 3)
    assert whole.shape == (4, 32, 32, 3)
    assert whole.dtype == np.uint8
    assert not np.array_equal(whole[0], whole[1])
    # The first two come out the same whether or not the others are made.
    assert np.array_equal(corrupted(same[:2], corruption, 3), whole[:2])
    assert not np.array_equal(corrupted(same, corruption, 3, seed=1), whole)


def test_severities_and_corruptions_draw_differently(library: Calls) -> None:
    one, other, severe = (
        corrupted(images(), name, level).astype(int) for name, level in (("snow", 1), ("fog", 1), ("snow", 2))
    )
    assert not np.array_equal(one, other)
    assert not np.array_equal(one + 1, severe)


def test_the_global_generator_is_put_back_and_nothing_is_printed(
    library: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    np.random.seed(5)
    expected = np.random.random(3)
    np.random.seed(5)
    corrupted(images(), "fog", 2)
    assert np.array_equal(np.random.random(3), expected)
    assert capsys.readouterr().out == ""


def test_kept_in_the_folder_and_taken_from_there(library: Calls, tmp_path: Path) -> None:
    wanted = [("fog", 1), ("glass_blur", 5)]
    first = regenerate(images(), wanted, folder=tmp_path / "kept")
    assert len(library) == 8
    again = regenerate(images(), wanted, folder=tmp_path / "kept")
    assert len(library) == 8
    for made, kept in zip(first, again, strict=True):
        assert made.shape == (4, 3, 32, 32)
        assert torch.equal(made, kept)
    assert torch.equal(first[0], regenerate(images(), wanted[:1])[0])
    names = sorted(path.name.rsplit("-", 1)[0] + path.suffix for path in (tmp_path / "kept").iterdir())
    assert names == ["fog-1.json", "fog-1.npy", "glass_blur-5.json", "glass_blur-5.npy"]


def test_the_file_beside_says_how_it_was_made(library: Calls, tmp_path: Path) -> None:
    regenerate(images(), [("fog", 2)], seed=7, folder=tmp_path)
    (path,) = tmp_path.glob("fog-2-*.json")
    origin = json.loads(path.read_text())
    assert (origin["library"], origin["version"]) == ("imagecorruptions-imaug", "9.9")
    assert (origin["corruption"], origin["severity"], origin["seed"]) == ("fog", 2, 7)
    assert "ImageNet-C" in origin["constants"]
    assert origin["computed_with"]["numpy"] == np.__version__


def test_another_seed_version_or_source_is_made_anew(
    library: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regenerate(images(), [("fog", 2)], folder=tmp_path)
    regenerate(images(), [("fog", 2)], seed=1, folder=tmp_path)
    assert len(library) == 8
    regenerate(images() + 1, [("fog", 2)], folder=tmp_path)
    assert len(library) == 12
    monkeypatch.setattr(corruptions, "library_version", lambda: "10")
    regenerate(images(), [("fog", 2)], folder=tmp_path)
    assert len(library) == 16


@pytest.mark.parametrize("keep", [0, 60, 5000])
def test_a_damaged_file_is_made_anew(library: Calls, tmp_path: Path, keep: int) -> None:
    (first,) = regenerate(images(), [("fog", 2)], folder=tmp_path)
    (path,) = tmp_path.glob("*.npy")
    path.write_bytes(path.read_bytes()[:keep])
    (again,) = regenerate(images(), [("fog", 2)], folder=tmp_path)
    assert torch.equal(first, again)
    assert len(library) == 8
    assert np.load(path).shape == (4, 32, 32, 3)


def test_a_folder_that_cannot_be_written_to(library: Calls, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written to"):
        regenerate(images(), [("fog", 2)], folder=tmp_path / "file" / "kept")


def test_progress_counts_the_images_of_all(library: Calls, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    wanted = [("fog", 1), ("fog", 2)]
    for _ in range(2):
        seen.clear()
        regenerate(images(), wanted, folder=tmp_path, progress=lambda done, total: seen.append((done, total)))
        assert seen == [(4, 8), (8, 8)]


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_library_itself_at_32_px(corruption: str) -> None:
    try:
        library_version()
    except DataError:
        pytest.skip("the extra 'corruptions' is not installed")
    source = images(3)
    for severity in (1, 5):
        made = corrupted(source, corruption, severity)
        assert made.shape == (3, 32, 32, 3)
        assert not np.array_equal(made, source.permute(0, 2, 3, 1).numpy())
        assert np.array_equal(corrupted(source[:2], corruption, severity), made[:2])
