"""Training batches: balanced over domains, seeded, on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vicinal.data.domains import LabelledImages
from vicinal.data.transforms import Augment, to_float


def draw_batch(
    parts: Sequence[LabelledImages],
    count: int,
    generator: torch.Generator,
    device: torch.device | str,
    augment: Augment | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `count` images in [0, 1] and their labels, spread evenly over the domains, with replacement."""
    images, labels = [], []
    for index, part in enumerate(parts):
        share = count // len(parts) + (index < count % len(parts))
        chosen = torch.randint(len(part), (share,), generator=generator).to(part.labels.device)
        images.append(part.images[chosen])
        labels.append(part.labels[chosen])
    x = to_float(torch.cat(images), device)
    return (x if augment is None else augment(x, generator)), torch.cat(labels).to(device)


def split_meta_target(count: int, generator: torch.Generator) -> tuple[int, list[int]]:
    """Return the position of a random meta-target domain and those of the meta-source domains."""
    target = int(torch.randint(count, (1,), generator=generator))
    # A lone domain, as a left-out model of two sources has, plays both parts: no shift is left to simulate.
    return target, [position for position in range(count) if position != target or count == 1]
