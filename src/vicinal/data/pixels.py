"""Some of a store's images, by position: in memory, memory-mapped or on a device, read when taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vicinal.errors import DataError

# Of the memory that is free on a GPU, what images may take: the rest is for weights and activations.
DEVICE_SHARE = 0.5


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images of a store in an order of their own: uint8 (N, C, H, W), addressed as a tensor is.

    Nothing is copied until images are taken, so that a part of a memory-mapped file larger than memory can
    be held, split and joined.
    """

    store: Tensor
    positions: Tensor  # int64 on the CPU: indices are computed where random numbers are drawn

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        chosen = self.positions[index.cpu() if isinstance(index, Tensor) else index]
        return _rows(self.store, chosen)

    @property
    def shape(self) -> torch.Size:
        """The shape all images would have as one tensor."""
        return torch.Size((len(self), *self.store.shape[1:]))

    @property
    def device(self) -> torch.device:
        """Where images are taken from."""
        return self.store.device

    def part(self, index: Tensor) -> "Pixels":
        """Return some of these images, still unread."""
        return Pixels(self.store, self.positions[index.cpu()])


@dataclass(frozen=True, eq=False)
class Chain:
    """Images of several stores one after another, addressed as one tensor and read when taken."""

    parts: tuple[Pixels, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        chosen = torch.arange(len(self))[index.cpu() if isinstance(index, Tensor) else index]
        taken = torch.empty(len(chosen), *self.shape[1:], dtype=torch.uint8, device=self.device)
        start = 0
        for part in self.parts:
            mine = ((chosen >= start) & (chosen < start + len(part))).nonzero().squeeze(1)
            if len(mine):
                taken[mine.to(self.device)] = part[chosen[mine] - start]
            start += len(part)
        return taken

    @property
    def shape(self) -> torch.Size:
        """The shape all images would have as one tensor."""
        return torch.Size((len(self), *self.parts[0].shape[1:]))

    @property
    def device(self) -> torch.device:
        """Where images are taken from."""
        return self.parts[0].device


Images = Tensor | Pixels | Chain


def _rows(store: Tensor, chosen: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the images at some positions of a store, written to `out` where that is given."""
    if store.device.type == "cuda":
        # Pinned and asynchronous, or every draw would wait for the device to finish what it is at.
        chosen = chosen.pin_memory().to(store.device, non_blocking=True)
    # Whole images are copied, ten times as fast as by indexing; a store in another order of dimensions, as
    # published arrays are, has no whole images.
    if store.is_contiguous():
        return torch.index_select(store, 0, chosen, out=out)
    return store[chosen] if out is None else out.copy_(store[chosen])


def gather(parts: Sequence[tuple[Images, Tensor]], pinned: bool = False) -> Tensor:
    """Return the images at positions of each part, one part after another, in memory of their own.

    `pinned` memory of the CPU is what a GPU can fetch by itself while something else goes on.
    """
    first, total = parts[0][0], sum(len(positions) for _, positions in parts)
    out = torch.empty(
        (total, *first.shape[1:]),
        dtype=torch.uint8,
        device=first.device,
        pin_memory=pinned and first.device.type == "cpu",
    )
    for (images, positions), rows in zip(parts, torch.split(out, [len(p) for _, p in parts]), strict=True):
        if isinstance(images, Chain):
            rows.copy_(images[positions])
        else:
            link = pixels(images)
            _rows(link.store, link.positions[positions], rows)
    return out


def pixels(images: Tensor | Pixels) -> Pixels:
    """Return images as pixels of their own store, if they are not yet."""
    return images if isinstance(images, Pixels) else Pixels(images, torch.arange(len(images)))


def _links(images: Images) -> tuple[Pixels, ...]:
    return images.parts if isinstance(images, Chain) else (pixels(images),)


def joined(parts: Sequence[Images]) -> Images:
    """Return the parts one after another, unread."""
    links = [link for part in parts for link in _links(part)]
    if all(link.store is links[0].store for link in links):
        return Pixels(links[0].store, torch.cat([link.positions for link in links]))
    return Chain(tuple(links))


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a GPU."""
    return torch.cuda.mem_get_info(device)[0]


def resident(images: Sequence[Images], device: torch.device | str) -> list[Images]:
    """Return the images with their stores on the device if all of them fit there, else as they are.

    A store that several share is moved once. On the CPU a memory-mapped file stays one: the page cache keeps
    it at hand and gives it up when memory is short.
    """
    place = torch.device(device)
    stores = {id(link.store): link.store for image in images for link in _links(image)}
    needed = sum(store.nbytes for store in stores.values() if store.device != place)
    if place.type == "cuda" and needed > DEVICE_SHARE * free_memory(place):
        return list(images)
    moved = {key: store.to(place) for key, store in stores.items()}
    return [_on(image, moved) for image in images]


def _on(images: Images, moved: Mapping[int, Tensor]) -> Images:
    """Return the images with each store replaced by the one it was moved to."""
    links = tuple(Pixels(moved[id(link.store)], link.positions) for link in _links(images))
    return links[0].store if isinstance(images, Tensor) else links[0] if len(links) == 1 else Chain(links)


def require_pixels(images: Images, owner: str) -> None:
    """Raise unless images are uint8 of shape (N, C, H, W)."""
    if any(link.store.dtype != torch.uint8 for link in _links(images)) or len(images.shape) != 4:
        raise DataError(f"{owner}: images must be uint8 of shape (N, C, H, W)")
