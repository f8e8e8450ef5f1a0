"""A CSV of own images (path, label, domain) as a listing."""

import csv
import os
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from vicinal.data.files import ImageFile, natural_key, printable
from vicinal.data.folder import MIN_DOMAINS, require_same_classes
from vicinal.data.layouts import Item
from vicinal.data.listing import Listing
from vicinal.data.splits import seeded, stored
from vicinal.errors import DataError

COLUMNS = ("path", "label", "domain")
PARTS = ("train", "val", "test")
MAX_NAMED = 10
MAX_SHOWN = 80  # letters of a first line that is none


def list_table(path: Path, *, val_fraction: float = 0.2, seed: int = 0) -> Listing:
    """Return the images that a CSV names; paths are relative to its folder.

    A further column `split` (train, val or test) takes the place of the seeded split; a target is then
    adapted to its test part.
    """
    rows = list(_rows(path))
    classes = tuple(sorted({row["label"] for row in rows}, key=natural_key))
    domains = tuple(sorted({row["domain"] for row in rows}, key=natural_key))
    if len(domains) < MIN_DOMAINS:
        raise DataError(f"'{printable(path)}' names {len(domains)} domain: vicinal needs two or more")
    require_same_classes({d: {row["label"] for row in rows if row["domain"] == d} for d in domains})
    label_of = {name: number for number, name in enumerate(classes)}
    items = [
        Item(row["domain"], label_of[row["label"]], _file(row["path"], path), row["split"]) for row in rows
    ]
    given = any(item.part for item in items)
    if given:
        divided = tuple(
            item for d in domains for item in seeded([i for i in items if i.domain == d], 0, seed)
        )
    else:
        divided = stored(path.parent, items, val_fraction, seed)
    split = "column of the table" if given else f"stored, {val_fraction:g} of every class for validation"
    facts: dict[str, Any] = {"layout": "table", "split": split}
    target: Literal["all", "test"] = "test" if any(item.part == "test" for item in items) else "all"
    return Listing(printable(path.stem), classes, domains, divided, target, facts)


def _file(name: str, table: Path) -> ImageFile:
    return ImageFile(name, (table.parent / name).as_posix())


def _rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows as columns by name, each complete and each image once."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(
                    f"'{printable(path)}' has no column {', '.join(missing)}: its first line must name path, "
                    f"label and domain{_instead(reader.fieldnames or ())}"
                )
            seen: dict[str, int] = {}
            for row in reader:
                yield _checked(row, path, reader.line_num, seen)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{printable(path)}' is not a CSV file in UTF-8 ({error})") from error
    if not seen:
        raise DataError(f"'{printable(path)}' names no images")


def _instead(found: Sequence[str]) -> str:
    """Return what the first line names instead, and what may be wrong with it."""
    if not found:
        return ", and the file is empty"
    shown = printable(" ".join(", ".join(found).split()))
    why = "; columns are separated by commas" if len(found) == 1 and set(found[0]) & set(";\t|") else ""
    why += "; names are in small letters" if {*map(str.lower, found)} & {*COLUMNS} - {*found} else ""
    return f", and it names {shown[:MAX_SHOWN]}{'...' if len(shown) > MAX_SHOWN else ''}{why}"


def require_files(listing: Listing, table: Path) -> None:
    """Raise, naming them, if images of a table are not there: told at once, before any is decoded."""
    missing = [item.file for item in listing.items if not os.path.exists(item.file.path)]  # noqa: PTH110
    if missing:
        shown = ", ".join(printable(file.name) for file in missing[:MAX_NAMED])
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise DataError(
            f"{len(missing)} of {len(listing.items)} images of '{printable(table)}' are not there: "
            f"{shown}{more}; paths are relative to its folder; mend the table, or pass --skip-bad"
        )


def _checked(row: dict[str, Any], path: Path, line: int, seen: dict[str, int]) -> dict[str, str]:
    where = f"'{printable(path)}', line {line}"
    found = {name: (row.get(name) or "").strip() for name in (*COLUMNS, "split")}
    empty = [name for name in COLUMNS if not found[name]]
    if empty:
        raise DataError(f"{where}: no {', '.join(empty)}")
    if found["split"] not in ("", *PARTS):
        raise DataError(f"{where}: split '{found['split']}' is none of {', '.join(PARTS)}")
    # Composed, because different systems spell one accented name with different bytes.
    found |= {name: unicodedata.normalize("NFC", found[name]) for name in ("label", "domain")}
    found["path"] = PurePosixPath(found["path"]).as_posix()  # "./a.png" is "a.png"
    if found["path"] in seen:
        raise DataError(f"{where}: '{found['path']}' was already named in line {seen[found['path']]}")
    seen[found["path"]] = line
    return found
