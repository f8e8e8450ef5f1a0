"""How large the timed steps are: the goals' own shapes on a GPU, smaller ones elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vicinal.data.catalog import DATASETS


@dataclass(frozen=True)
class Shape:
    """The net and what a step is fed."""

    backbone: str
    size: int  # pixels a side
    batch: int  # images of each of the two batches of an iteration
    stream_batch: int  # images of a test-time batch
    classes: int = 7
    domains: int = 3

    def along(self, axis: str, value: int | str) -> "Shape":
        """Return the shape at a place of one axis; test-time batches grow with those of training."""
        if axis == "batch":
            share = self.stream_batch / self.batch
            return replace(self, batch=int(value), stream_batch=max(2, round(share * int(value))))
        return replace(self, **{axis: value})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Scale:
    """One size of the whole run."""

    name: str
    shape: Shape
    rounds: int  # of which medians are taken
    growth_rounds: int
    round_seconds: float  # a short step is repeated in a round until it takes about this long
    iterations: int  # of the training loop that are run
    source_images: int  # of a source domain
    val_images: int
    streams: tuple[int, ...]  # images of each target domain
    growth: Mapping[str, tuple[int | str, ...]]
    deeper: str | None = None  # a second net, for second order
    judged: bool = False  # whether these are the shapes that the goals speak of

    def measures(self, name: str) -> bool:
        """Say whether there is anything to measure of a part or of a section of the goals."""
        return name != "deeper" or self.deeper is not None


FULL = Scale(
    "full",
    Shape("resnet18", 224, 70, 20),
    rounds=8,
    growth_rounds=3,
    round_seconds=0.15,
    iterations=300,
    source_images=600,
    val_images=270,  # a tenth of PACS's training domains in all
    streams=tuple(DATASETS["pacs"].counts.values()),
    growth={
        "classes": (7, 65, 345),
        "size": (112, 160, 224),
        "batch": (35, 70, 140),
        "domains": (2, 3, 5),
        "backbone": ("resnet18", "resnet34", "resnet50"),
    },
    deeper="resnet50",
    judged=True,
)
SMALL = Scale(
    "small",
    Shape("resnet18", 64, 4, 4),
    rounds=5,
    growth_rounds=3,
    round_seconds=0.1,
    iterations=10,
    source_images=16,
    val_images=4,
    streams=(16,),
    growth={
        "classes": (7, 65, 345),
        "size": (32, 64, 96),
        "batch": (4, 8),
        "domains": (2, 3, 5),
        "backbone": ("resnet18", "resnet34", "resnet50"),
    },
)
QUICK = replace(
    SMALL,
    name="quick",
    shape=Shape("small", 16, 6, 6),
    rounds=3,
    growth_rounds=2,
    round_seconds=0.0,
    iterations=20,
    growth={
        "classes": (7, 65),
        "size": (16, 32),
        "batch": (6, 12),
        "domains": (2, 3),
        "backbone": ("small", "resnet18"),
    },
)
SCALES = {scale.name: scale for scale in (FULL, SMALL, QUICK)}


def scale_for(device: str, quick: bool) -> Scale:
    """Return the size of a run on a kind of device."""
    if quick:
        return QUICK
    return FULL if device == "cuda" else SMALL
