import functools
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vicinal.data.catalog import DATASETS
from vicinal.data.download import Download
from vicinal.data.entries import DatasetEntry

PACS = DATASETS["pacs"]
Change = Callable[..., DatasetEntry]


@pytest.fixture(autouse=True)
def wide(vicinal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is folded, so that lines can be compared; after `vicinal`, which sets a width too."""
    monkeypatch.setattr("vicinal.cli.console.out.width", 500)


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Return a changer of catalog entries."""

    def change(name: str, **changes: Any) -> DatasetEntry:
        entry = replace(DATASETS[name], **changes)
        monkeypatch.setitem(DATASETS._things, name, entry)
        return entry

    return change


def write_pacs(root: Path, count: int = 1) -> Path:
    for domain in PACS.domains:
        for label in PACS.classes:
            folder = root / domain / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (2, 2)).save(folder / f"{number}.png")
    return root


@pytest.fixture
def small(catalog: Change) -> DatasetEntry:
    """Return PACS as if it had one image of every class."""
    each = dict.fromkeys(PACS.domains, (1,) * 7)
    return catalog("pacs", counts=dict.fromkeys(each, 7), class_counts=each)


def row(out: str, name: str) -> list[str]:
    line = next(line for line in out.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


# --- list -------------------------------------------------------------------------------------------------


def test_list_shows_every_set_with_size_domains_and_licence(vicinal: Any) -> None:
    ran = vicinal("data", "list")
    assert (ran.code, ran.err) == (0, "")
    for name in DATASETS:
        entry = DATASETS[name]
        cells = row(ran.out, name)
        assert cells[:4] == [name, f"{entry.images:,}", str(len(entry.classes)), str(entry.size)]
        assert entry.domains[0] in cells[4]
        assert entry.licence[:25] in cells[5]
        if entry.note:
            assert f"{name}: {entry.note}" in ran.out


def test_list_needs_no_data_and_writes_nothing(vicinal: Any, snapshot: Any) -> None:
    before = snapshot()
    assert vicinal("data", "list").code == 0
    assert vicinal("data", "status").code == 0
    assert snapshot() == before


# --- status -----------------------------------------------------------------------------------------------


def test_status_of_nothing_says_what_to_put_where(vicinal: Any, tmp_path: Path) -> None:
    ran = vicinal("data", "status", "--data-dir", tmp_path / "data")
    assert ran.code == 0
    assert row(ran.out, "digits")[1] == "built in"
    for name in (
        "pacs",
        "vlcs",
        "office_home",
        "terra_incognita",
        "domainnet",
        "mini_domainnet",
        "rotated_mnist",
    ):
        assert row(ran.out, name)[1] == "missing"
        folder = tmp_path / "data" / DATASETS[name].source.folders[0]
        line = next(
            line for line in ran.out.splitlines() if line.startswith(f"{name}: vicinal data get {name}")
        )
        assert f"'{folder}'" in line


def test_status_counts_each_domain_against_the_catalog(vicinal: Any, tmp_path: Path) -> None:
    root = write_pacs(tmp_path / "data" / "PACS")
    ran = vicinal("data", "status", "pacs", "--data-dir", tmp_path / "data")
    assert ran.code == 0
    cells = row(ran.out, "pacs")
    assert cells[1:4] == ["incomplete", str(root), "DomainBed"]
    assert cells[5] == "28 / 9,991"
    assert "sketch 7 / 3,929" in ran.out
    assert "pacs: the official lists (art_painting_train_kfold.txt, ...) were not found" in ran.out
    assert "vlcs" not in ran.out


@pytest.mark.usefixtures("small")
def test_status_of_what_is_complete_by_the_variable(
    vicinal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pacs(tmp_path / "two" / "PACS")
    monkeypatch.setenv("VICINAL_DATA", os.pathsep.join([str(tmp_path / "one"), str(tmp_path / "two")]))
    cells = row(vicinal("data", "status", "pacs", "digits").out, "pacs")
    assert (cells[1], cells[5]) == ("found", "28 / 28")


def test_status_of_an_unknown_name_is_one_line(vicinal: Any) -> None:
    assert "unknown dataset 'pcas': choose from cifar10_c, digits" in vicinal("data", "status", "pcas").line


def test_status_of_a_broken_archive_is_one_line(vicinal: Any, tmp_path: Path) -> None:
    (tmp_path / "PACS.zip").write_text("<html>")
    line = vicinal("data", "status", "pacs", "--data-dir", tmp_path).line
    assert "PACS.zip' cannot be read as an archive" in line


# --- check ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_check_of_what_is_sound(vicinal: Any, tmp_path: Path) -> None:
    write_pacs(tmp_path / "PACS")
    ran = vicinal("data", "check", "pacs", "--data-dir", tmp_path)
    assert ran.code == 0
    assert "pacs: 28 images decoded" in ran.out
    assert row(ran.out, "photo")[:6] == ["photo", "7", "7", "7", "0", "7"]
    assert "split: seeded, 0.1 of every class for validation" in ran.out
    assert ran.out.splitlines()[-1].strip() == "sound"


@pytest.mark.usefixtures("small")
def test_check_names_bad_images_and_ends_with_one(vicinal: Any, tmp_path: Path) -> None:
    root = write_pacs(tmp_path / "PACS")
    (root / "photo" / "dog" / "0.png").write_bytes(b"")
    (root / "sketch" / "house" / "0.png").write_text("[red]not an image[/]")
    ran = vicinal("data", "check", "pacs", "--data-dir", tmp_path)
    assert ran.code == 1
    assert "2 unreadable images:" in ran.out
    assert "photo/dog/0.png: the file is empty" in ran.out
    assert row(ran.out, "photo")[-1] == "differs: dog 0 of 1"
    assert ran.out.splitlines()[-1].strip() == "not sound: see above"


def test_check_against_the_catalogs_own_counts(vicinal: Any, tmp_path: Path) -> None:
    write_pacs(tmp_path / "PACS")
    ran = vicinal("data", "check", "pacs", "--data-dir", tmp_path)
    assert ran.code == 1
    assert row(ran.out, "photo")[:3] == ["photo", "7", "1,670"]
    assert "dog 1 of 189" in row(ran.out, "photo")[-1]


def test_check_of_own_data(vicinal: Any, domains_of: Any, tmp_path: Path) -> None:
    root = domains_of(dark=3, light=4)
    ran = vicinal("data", "check", root)
    assert ran.code == 0
    assert row(ran.out, "dark") == ["dark", "6", "", "4", "2", "6", "left 3, right 3"]
    assert "split: stored, 0.2 of every class for validation" in ran.out
    (root / "dark" / "left" / "0.png").write_bytes(b"")
    assert vicinal("data", "check", root).code == 1
    lines = [f"{path.relative_to(root)},{path.parts[-2]},{path.parts[-3]}" for path in root.rglob("*.png")]
    table = root / "t.csv"
    table.write_text("\n".join(["path,label,domain", *lines]))
    assert vicinal("data", "check", table).code == 1
    table.write_text("\n".join(["path,label,domain", *(line for line in lines if "dark/left/0" not in line)]))
    assert vicinal("data", "check", table).code == 0


def test_check_of_folders_whose_names_look_like_markup(vicinal: Any, domains_of: Any, tmp_path: Path) -> None:
    root = domains_of(dark=2, light=2)
    odd = root.rename(tmp_path / "[bold]own[ ]")
    (odd / "dark").rename(odd / "[red]dark")
    ran = vicinal("data", "check", odd)
    assert ran.code == 0
    assert "[bold]own[ ]: 8 images decoded" in ran.out
    assert row(ran.out, "[red]dark")[1] == "4"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pacs", "pacs was not found in"),
        ("nowhere", "unknown dataset 'nowhere': choose from"),
        ("rotated_mnist", "rotated_mnist was not found in"),
        ("cifar10_c", "cifar10_c was not found in"),
    ],
)
def test_check_of_what_is_not_there_is_one_line(vicinal: Any, tmp_path: Path, name: str, said: str) -> None:
    line = vicinal("data", "check", name, "--data-dir", tmp_path).line
    assert said in line
    if name != "nowhere":
        assert f"vicinal data get {name}, or put " in line


# --- get --------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a server on 127.0.0.1 with a good archive of the small PACS and a web page."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    folder, loose = tmp_path / "site", write_pacs(tmp_path / "loose")
    folder.mkdir()
    with zipfile.ZipFile(folder / "good.zip", "w") as pack:
        for path in loose.rglob("*.png"):
            pack.write(path, f"kfold/{path.relative_to(loose)}")
    (folder / "page.zip").write_text("<!doctype html><html>sign in</html>")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("small")
def test_get_from_the_second_mirror_then_nothing_is_left_to_do(
    vicinal: Any, tmp_path: Path, site: str, catalog: Change
) -> None:
    urls = (f"{site}/gone.zip", f"{site}/good.zip")
    catalog("pacs", downloads=(Download("PACS.zip", urls, unpack=True),))
    ran = vicinal("data", "get", "pacs", "--data-dir", tmp_path / "data")
    assert ran.code == 0
    assert f"pacs is in {tmp_path / 'data' / 'PACS'}" in ran.out
    assert row(ran.out, "pacs")[1] == "found"
    catalog("pacs", downloads=(Download("PACS.zip", (f"{site}/page.zip",), unpack=True),))
    again = vicinal("data", "get", "pacs", "--data-dir", tmp_path / "data")
    assert again.code == 0
    assert "pacs is already there" in again.out
    assert vicinal("data", "check", "pacs", "--data-dir", tmp_path / "data").code == 0


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("address", "why"),
    [("{site}/page.zip", "a web page instead of the file"), ("http://127.0.0.1:9/x.zip", "no connection")],
)
def test_get_that_fails_is_one_line_that_says_what_to_do(
    vicinal: Any, tmp_path: Path, site: str, catalog: Change, address: str, why: str
) -> None:
    url = address.format(site=site)
    catalog("pacs", downloads=(Download("PACS.zip", (url,), unpack=True),))
    line = vicinal("data", "get", "pacs", "--data-dir", tmp_path / "data").line
    assert why in line
    assert f"download PACS.zip by hand from {url} and put it into {tmp_path / 'data' / 'PACS'}" in line
    assert "vicinal data get pacs" in line


def test_get_of_what_comes_with_vicinal_or_is_unknown(vicinal: Any, tmp_path: Path) -> None:
    ran = vicinal("data", "get", "digits", "--data-dir", tmp_path / "data")
    assert ran.code == 0
    assert row(ran.out, "digits")[1] == "built in"
    assert "unknown dataset 'mnist': choose from" in vicinal("data", "get", "mnist").line
    assert not (tmp_path / "data").exists()


@pytest.mark.usefixtures("small")
def test_get_of_what_lies_in_the_second_data_folder(
    vicinal: Any, tmp_path: Path, catalog: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pacs(tmp_path / "two" / "PACS")
    monkeypatch.setenv("VICINAL_DATA", os.pathsep.join([str(tmp_path / "one"), str(tmp_path / "two")]))
    catalog("pacs", downloads=(Download("PACS.zip", ("http://127.0.0.1:9/x.zip",), unpack=True),))
    assert vicinal("data", "get", "pacs").code == 0
