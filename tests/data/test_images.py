import os
import threading
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vicinal.data import images
from vicinal.data.files import IMAGE_SUFFIXES, ImageFile, list_images
from vicinal.data.images import Decoding, decode_all, decode_image
from vicinal.errors import ConfigError, DataError

ORIENTATION = 0x0112


def gradient(height: int = 16, width: int = 16) -> Image.Image:
    """A smooth RGB image whose corners all differ."""
    down, across = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = [across * 255 / (width - 1), down * 255 / (height - 1), np.full_like(down, 40)]
    return Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8))


def planes(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def close(found: torch.Tensor, expected: torch.Tensor, within: int) -> None:
    torch.testing.assert_close(found.int(), expected.int(), atol=within, rtol=0)


def test_rgb_png_of_the_right_size_is_untouched(tmp_path: Path) -> None:
    gradient().save(tmp_path / "a.png")
    found = decode_image(tmp_path / "a.png", 16, 3)
    assert found.dtype == torch.uint8
    assert torch.equal(found, planes(gradient()))


def test_eight_bit_gray(tmp_path: Path) -> None:
    gray = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(gray).save(tmp_path / "a.png")
    assert torch.equal(decode_image(tmp_path / "a.png", 16, 1)[0], torch.from_numpy(gray))
    assert torch.equal(decode_image(tmp_path / "a.png", 16, 3), torch.from_numpy(gray).expand(3, 16, 16))


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
@pytest.mark.parametrize("top", [65535, 20000])
def test_sixteen_bit_gray_is_scaled_by_its_format_not_by_its_extremes(
    tmp_path: Path, name: str, top: int
) -> None:
    values = np.linspace(0, top, 256).round().astype(np.uint16).reshape(16, 16)
    if name == "a.pgm":
        (tmp_path / name).write_bytes(b"P5 16 16 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(tmp_path / name)
    expected = torch.from_numpy(np.rint(values / 257).astype(np.uint8))
    assert torch.equal(decode_image(tmp_path / name, 16, 1)[0], expected)
    assert torch.equal(decode_image(tmp_path / name, 16, 3), expected.expand(3, 16, 16))


def test_float_gray_counts_from_zero_to_one(tmp_path: Path) -> None:
    values = np.linspace(0, 0.5, 64, dtype=np.float32).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "a.tif")
    expected = torch.from_numpy(np.rint(values.astype(np.float64) * 255).astype(np.uint8))
    assert torch.equal(decode_image(tmp_path / "a.tif", 8, 1)[0], expected)


@pytest.mark.parametrize(
    "values",
    [np.full((4, 4), 70000, np.int32), np.full((4, 4), -1, np.int32), np.full((4, 4), 1.5, np.float32)],
)
def test_values_of_no_known_range_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif: values from .* save it with 8 or 16 bits"):
        decode_image(tmp_path / "a.tif", 4, 1)


def test_nan_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match="nan"):
        decode_image(tmp_path / "a.tif", 4, 1)


def test_one_bit(tmp_path: Path) -> None:
    Image.fromarray(np.eye(8) > 0).save(tmp_path / "a.png")
    assert torch.equal(decode_image(tmp_path / "a.png", 8, 1)[0], torch.eye(8).to(torch.uint8) * 255)


@pytest.mark.parametrize(
    ("ink", "rgb"),
    [((255, 0, 0, 0), (0, 255, 255)), ((0, 0, 0, 255), (0, 0, 0)), ((0, 0, 0, 0), (255, 255, 255))],
)
def test_cmyk_jpeg(tmp_path: Path, ink: tuple[int, ...], rgb: tuple[int, ...]) -> None:
    Image.new("CMYK", (8, 8), ink).save(tmp_path / "a.jpg", quality=100)
    close(decode_image(tmp_path / "a.jpg", 8, 3)[:, 4, 4], torch.tensor(rgb), within=3)
    luminance = torch.tensor([0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]])
    close(decode_image(tmp_path / "a.jpg", 8, 1)[:, 4, 4], luminance, within=4)


def test_palette_with_transparency_lies_on_white(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([200, 10, 20, 0, 0, 0])
    image.paste(1, (0, 0, 4, 8))
    image.save(tmp_path / "a.png", transparency=1)
    found = decode_image(tmp_path / "a.png", 8, 3)
    assert found[:, 0, 0].tolist() == [255, 255, 255]
    assert found[:, 0, 7].tolist() == [200, 10, 20]


def test_palette_without_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 30, 60, 90])
    image.save(tmp_path / "a.png")
    assert decode_image(tmp_path / "a.png", 8, 3)[:, 3, 3].tolist() == [30, 60, 90]


@pytest.mark.parametrize(("alpha", "expected"), [(0, 255), (128, 155), (255, 55)])
def test_alpha_lies_on_white(tmp_path: Path, alpha: int, expected: int) -> None:
    Image.new("RGBA", (8, 8), (55, 55, 55, alpha)).save(tmp_path / "rgba.png")
    Image.new("LA", (8, 8), (55, alpha)).save(tmp_path / "la.png")
    for name in ("rgba.png", "la.png"):
        close(decode_image(tmp_path / name, 8, 3), torch.full((3, 8, 8), expected), within=1)
        close(decode_image(tmp_path / name, 8, 1), torch.full((1, 8, 8), expected), within=1)


def test_rgb_with_one_transparent_colour(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (0, 0, 0)).save(tmp_path / "a.png", transparency=(0, 0, 0))
    assert decode_image(tmp_path / "a.png", 8, 3).min() == 255


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_first_frame_of_an_animation(tmp_path: Path, name: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True, duration=50)
    with Image.open(tmp_path / name) as image:
        assert getattr(image, "n_frames", 1) == 3
    close(decode_image(tmp_path / name, 8, 3)[:, 4, 4], torch.tensor([255, 0, 0]), within=2)


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, 3), (8, 1)])
def test_exif_orientation_turns_the_pixels(tmp_path: Path, orientation: int, turns: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    gradient().save(tmp_path / "a.jpg", exif=exif, quality=95, subsampling=0)
    expected = torch.rot90(planes(gradient()), turns, (1, 2))
    close(decode_image(tmp_path / "a.jpg", 16, 3), expected, within=12)


def test_exif_orientation_is_applied_before_the_crop(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    gradient(16, 48).save(tmp_path / "a.png", exif=exif)
    expected = torch.rot90(planes(gradient(16, 48))[:, :, 16:32], 3, (1, 2))
    assert torch.equal(decode_image(tmp_path / "a.png", 16, 3), expected)


@pytest.mark.parametrize(("height", "width"), [(40, 100), (100, 40), (33, 37), (10, 13)])
def test_shorter_side_resized_then_centre_cropped(tmp_path: Path, height: int, width: int) -> None:
    gradient(height, width).save(tmp_path / "a.png")
    size = 20
    scale = size / min(height, width)
    whole = gradient(height, width).resize((round(width * scale), round(height * scale)), Image.BICUBIC)
    left, top = (whole.width - size) // 2, (whole.height - size) // 2
    expected = planes(whole.crop((left, top, left + size, top + size)))
    found = decode_image(tmp_path / "a.png", size, 3)
    assert found.shape == (3, size, size)
    close(found, expected, within=8)


def test_downscaling_is_antialiased(tmp_path: Path) -> None:
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "a.png")
    close(decode_image(tmp_path / "a.png", 8, 1), torch.full((1, 8, 8), 128), within=12)


def test_a_very_thin_image_does_not_fill_the_memory(tmp_path: Path) -> None:
    Image.new("L", (60_000, 1), 90).save(tmp_path / "a.png")
    assert decode_image(tmp_path / "a.png", 224, 3).unique().tolist() == [90]


def jpeg(path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def test_truncated_jpeg(tmp_path: Path) -> None:
    path = jpeg(tmp_path / "cut.jpg")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"cut\.jpg: cannot be decoded \(image file is truncated") as caught:
        decode_image(path, 8, 3)
    assert "\n" not in str(caught.value)


def test_truncated_png(tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    gradient(64, 64).save(path)
    path.write_bytes(path.read_bytes()[:120])
    with pytest.raises(DataError, match=r"cut\.png: "):
        decode_image(path, 8, 3)


def test_zero_bytes(tmp_path: Path) -> None:
    (tmp_path / "none.png").touch()
    with pytest.raises(DataError, match=r"none\.png: the file is empty"):
        decode_image(tmp_path / "none.png", 8, 3)


def test_text_named_jpg(tmp_path: Path) -> None:
    (tmp_path / "note.jpg").write_text("not a picture, but longer than any signature of one\n" * 9)
    with pytest.raises(DataError, match=r"note\.jpg: not an image"):
        decode_image(tmp_path / "note.jpg", 8, 3)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg: cannot be decoded \(.*No such file"):
        decode_image(tmp_path / "gone.jpg", 8, 3)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [1500, 100])
def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    gradient(50, 50).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=r"bomb\.png: cannot be decoded \(.*limit"):
        decode_image(tmp_path / "bomb.png", 8, 3)


def test_a_format_that_starts_another_program_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n")
    with pytest.raises(DataError, match="not an image"):
        decode_image(tmp_path / "a.jpg", 8, 3)


@pytest.mark.parametrize(("size", "channels"), [(8, 2), (8, 4), (0, 3), (-1, 1)])
def test_impossible_shapes_are_refused(tmp_path: Path, size: int, channels: int) -> None:
    gradient().save(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="1 or 3 channels"):
        decode_image(tmp_path / "a.png", size, channels)
    with pytest.raises(ConfigError, match="1 or 3 channels"):
        decode_all([tmp_path / "a.png"], size, channels, skip_bad=True)


def test_suffixes_are_those_of_images() -> None:
    assert {".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm"} <= IMAGE_SUFFIXES
    assert not {".pdf", ".eps", ".ps", ".mpg", ".h5", ".txt", ""} & IMAGE_SUFFIXES


def test_listing_is_recursive_natural_and_skips_hidden_and_other_files(tmp_path: Path) -> None:
    for name in ("10.png", "2.JPG", "b/1.png", "b/c/3.gif", ".hidden.png", ".git/x.png", "__MACOSX/y.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder.png").mkdir()
    found = [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)]
    assert found == ["2.JPG", "10.png", "b/1.png", "b/c/3.gif"]


def test_unicode_names(tmp_path: Path) -> None:
    names = ["žluťoučký kůň.png", "猫.png", unicodedata.normalize("NFD", "é.png"), "२.png", "a b'c\".png"]
    for name in names:
        gradient().save(tmp_path / name)
    found = list_images(tmp_path)
    assert {path.name for path in found} == set(names)
    decoded, kept, bad = decode_all(found, 8, 3, skip_bad=False)
    assert (len(decoded), kept, bad) == (5, [0, 1, 2, 3, 4], [])


@pytest.mark.skipif(os.name != "posix", reason="names are bytes on POSIX only")
def test_a_name_that_is_not_utf8_can_still_be_printed(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png"))
    try:
        path.touch()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with pytest.raises(DataError) as caught:
        decode_image(path, 8, 3)
    assert str(caught.value).encode("utf-8").decode() == str(caught.value)


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    store.mkdir()
    (data / "inner").mkdir(parents=True)
    gradient().save(store / "a.png")
    (data / "file.png").symlink_to(store / "a.png")
    (data / "linked").symlink_to(store)
    (data / "inner" / "loop").symlink_to(data)
    found = [path.relative_to(data).as_posix() for path in list_images(data)]
    assert found == ["file.png", "linked/a.png"]


def test_a_dangling_link_is_a_bad_image_not_a_silent_gap(tmp_path: Path) -> None:
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert [path.name for path in list_images(tmp_path)] == ["gone.png"]
    _, kept, bad = decode_all(list_images(tmp_path), 8, 3, skip_bad=True)
    assert kept == []
    assert "gone.png: cannot be decoded" in bad[0]


def test_listing_nothing_is_an_error_that_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no images"):
        list_images(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        list_images(tmp_path / "gone")
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match="is not a folder"):
        list_images(tmp_path / "a.png")


def levels(folder: Path, bad: tuple[int, ...] = ()) -> list[Path]:
    """Six files of one gray level each, 0 to 5; those in `bad` are empty."""
    paths = [folder / f"{level}.png" for level in range(6)]
    for level, path in enumerate(paths):
        Image.new("L", (4, 4), level).save(path)
        if level in bad:
            path.write_bytes(b"")
    return paths


def test_decode_all_keeps_the_order_and_reports_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    decoded, kept, bad = decode_all(
        levels(tmp_path), 4, 1, skip_bad=False, progress=lambda done, total: seen.append((done, total))
    )
    assert decoded.shape == (6, 1, 4, 4)
    assert decoded[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (kept, bad) == ([0, 1, 2, 3, 4, 5], [])
    assert seen == [(done, 6) for done in range(1, 7)]


def test_decode_all_skips_bad_ones_when_told(tmp_path: Path) -> None:
    paths = levels(tmp_path, bad=(1, 4))
    decoded, kept, bad = decode_all(paths, 4, 1, skip_bad=True)
    assert decoded[:, 0, 0, 0].tolist() == kept == [0, 2, 3, 5]
    assert bad == [f"{paths[1].as_posix()}: the file is empty", f"{paths[4].as_posix()}: the file is empty"]


def test_decode_all_raises_for_the_first_bad_one_and_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2\.png: the file is empty; .*--skip-bad"):
        decode_all(levels(tmp_path, bad=(2, 5)), 4, 1, skip_bad=False)


def test_decode_all_of_nothing_and_of_only_bad_ones(tmp_path: Path) -> None:
    assert decode_all([], 4, 3, skip_bad=False)[0].shape == (0, 3, 4, 4)
    decoded, kept, bad = decode_all(levels(tmp_path, bad=(0, 1, 2, 3, 4, 5)), 4, 3, skip_bad=True)
    assert decoded.shape == (0, 3, 4, 4)
    assert (kept, len(bad)) == ([], 6)


def test_a_bad_image_stops_the_decoding_of_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = levels(tmp_path, bad=(0,)) + [tmp_path / "5.png"] * 200
    gate, decoded = threading.Event(), []

    def slow_after_the_first(file: ImageFile, how: Decoding) -> torch.Tensor:
        if file.name.endswith("0.png"):
            raise DataError("0.png: bad")
        gate.wait(0.02)
        decoded.append(file)
        return torch.zeros(how.shape, dtype=torch.uint8)

    monkeypatch.setattr(images, "decode_file", slow_after_the_first)
    with pytest.raises(DataError, match=r"0\.png") as caught:
        decode_all(paths, 4, 1, skip_bad=False)
    # Checked while the traceback still holds the frames: nothing may go on decoding behind it.
    assert len(decoded) < 100
    before = len(decoded)
    gate.wait(0.1)
    assert len(decoded) == before
    assert caught.value is not None


def test_pillow_turns_as_the_exif_standard_says() -> None:
    """6 means: turn clockwise by 90 degrees to show; guards the expectation used above."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image = gradient()
    image.info["exif"] = exif.tobytes()
    assert torch.equal(planes(ImageOps.exif_transpose(image)), torch.rot90(planes(gradient()), -1, (1, 2)))
