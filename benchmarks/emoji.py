"""Emoji as a data set: one domain for each drawing style, one class for each subgroup of Unicode's list.

    npm pack emoji-datasource-apple@16.0.0 emoji-datasource-facebook@16.0.0 \\
             emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0
    python benchmarks/emoji.py . emoji

The second line reads the four packages from a folder and writes `emoji/<style>/<subgroup>/<code>.png`, 64
pixels on white: what all four styles draw, without flags and skin tones, of subgroups of at least eight. That
is 66 classes of 8 to 82 images, each of which a style draws once: few neighbors for anybody.
"""

import argparse
import json
import tarfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from PIL import Image

STYLES = ("apple", "facebook", "google", "twitter")
FEWEST = 8  # images of a class
LEFT_OUT = ("Flags", "Component")


def classes(listed: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the image files of every subgroup that is large enough, by its name."""
    found = defaultdict(list)
    for one in listed:
        if one["category"] not in LEFT_OUT and all(one[f"has_img_{style}"] for style in STYLES):
            found[one["subcategory"]].append(one["image"])
    return {name: images for name, images in found.items() if len(images) >= FEWEST}


def on_white(image: Image.Image) -> Image.Image:
    below = Image.new("RGBA", image.size, "white")
    below.alpha_composite(image.convert("RGBA"))
    return below.convert("RGB")


def unpack(package: Path, style: str, out: Path) -> int:
    """Write one style's images into folders of classes; return how many there are."""
    with tarfile.open(package) as archive:
        files = {member.name: member for member in archive.getmembers()}

        def opened(name: str) -> Any:
            return archive.extractfile(files[f"package/{name}"])

        wanted = classes(json.load(opened("emoji.json")))
        for name, images in wanted.items():
            folder = out / style / name
            folder.mkdir(parents=True, exist_ok=True)
            for image in images:
                on_white(Image.open(opened(f"img/{style}/64/{image}"))).save(folder / image)
    return sum(map(len, wanted.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", type=Path, help="the folder that holds the four .tgz files")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    for style in STYLES:
        found = sorted(args.packages.glob(f"emoji-datasource-{style}-*.tgz"))
        if not found:
            raise SystemExit(f"no emoji-datasource-{style}-*.tgz in '{args.packages}': npm pack it first")
        print(f"{style}: {unpack(found[-1], style, args.out)} images")


if __name__ == "__main__":
    main()
