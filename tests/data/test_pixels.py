"""Lazy views of images are what plain indexing gives, and move to a device together or not at all."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vicinal.data import pixels as module
from vicinal.data.domains import Domain
from vicinal.data.pixels import Chain, Images, Pixels, gather, joined, pixels, require_pixels, resident
from vicinal.errors import DataError

SHAPE = (3, 2, 2)


def store(count: int, first: int = 0) -> Tensor:
    """Return images whose every pixel is the number of the image."""
    values = (torch.arange(count) + first).to(torch.uint8)
    return values.view(-1, 1, 1, 1).expand(-1, *SHAPE).contiguous()


def numbers(images: Tensor) -> list[int]:
    assert images.dtype == torch.uint8
    assert images.shape[1:] == SHAPE
    return images[:, 0, 0, 0].tolist()


POSITIONS = torch.tensor([4, 0, 7, 7, 2, 9])


def three_stores() -> tuple[Chain, Tensor]:
    """Return a chain over three stores, one of them a part of its own, and the tensor it stands for."""
    parts = (Pixels(store(10), POSITIONS), pixels(store(4, 100)), Pixels(store(9, 200), torch.tensor([8, 1])))
    return Chain(parts), torch.cat([part[:] for part in parts])


INDICES: list[Any] = [
    slice(None),
    slice(1, 4),
    slice(0, 0),
    slice(4, 99),
    torch.tensor([2, 0, 0, 5]),
    torch.tensor([-1, 1, -6]),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([True, False, False, True, True, False]),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_view_is_indexed_as_its_tensor_is(index: Any) -> None:
    images = store(10)
    assert torch.equal(Pixels(images, POSITIONS)[index], images[POSITIONS][index])


def test_a_view_knows_its_length_shape_and_place() -> None:
    view = Pixels(store(10), POSITIONS)
    assert len(view) == 6
    assert view.shape == store(10)[POSITIONS].shape
    assert isinstance(view.shape, torch.Size)
    assert view.device == torch.device("cpu")


def test_a_part_of_a_part_reads_nothing_and_keeps_the_store() -> None:
    # Nothing can be read from a meta tensor: what is not taken is not read.
    unread = Pixels(torch.empty(10, *SHAPE, dtype=torch.uint8, device="meta"), POSITIONS)
    part = unread.part(torch.tensor([5, 1])).part(torch.tensor([1, 0, 1]))
    assert part.store is unread.store
    assert part.positions.tolist() == [0, 9, 0]
    assert numbers(Pixels(store(10), part.positions)[:]) == [0, 9, 0]


def test_what_is_taken_is_a_copy() -> None:
    images = store(10)
    taken = Pixels(images, POSITIONS)[:3]
    taken.fill_(255)
    assert numbers(images) == list(range(10))


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(3, 8),
        slice(6, 6),
        slice(-2, None),
        torch.tensor([11, 0, 6, 5, 0]),
        torch.tensor([-1, -12]),
        torch.tensor([], dtype=torch.int64),
        torch.arange(12) % 3 == 0,
    ],
    ids=str,
)
def test_a_chain_is_indexed_as_its_tensor_is(index: Any) -> None:
    chain, plain = three_stores()
    assert torch.equal(chain[index], plain[index])


def test_a_chain_knows_its_length_shape_and_place() -> None:
    chain, plain = three_stores()
    assert len(chain) == 12
    assert chain.shape == plain.shape
    assert chain.device == torch.device("cpu")


@pytest.mark.parametrize("index", [12, -13])
def test_a_position_past_the_end_of_a_chain_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        three_stores()[0][torch.tensor([index])]


def test_parts_of_one_store_are_joined_to_one_view() -> None:
    images = store(10)
    whole = joined([Pixels(images, torch.tensor([3, 1])), images, Pixels(images, torch.tensor([8]))])
    assert isinstance(whole, Pixels)
    assert whole.store is images
    assert numbers(whole[:]) == [3, 1, *range(10), 8]


def test_parts_of_several_stores_are_joined_to_a_chain_without_being_read() -> None:
    stores = [torch.empty(count, *SHAPE, dtype=torch.uint8, device="meta") for count in (5, 4)]
    whole = joined([joined([stores[0], stores[1]]), Pixels(stores[0], torch.tensor([2]))])
    assert isinstance(whole, Chain)
    assert all(isinstance(part, Pixels) for part in whole.parts)  # a chain of chains is one chain
    assert [part.store is stores[k] for part, k in zip(whole.parts, (0, 1, 0), strict=True)] == [True] * 3
    assert whole.shape == (10, *SHAPE)


def test_one_tensor_is_joined_to_itself() -> None:
    assert numbers(joined([store(4)])[:]) == [0, 1, 2, 3]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=5),
    st.data(),
)
def test_joining_is_concatenation(parts: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    stores = [store(6, 50 * k) for k in range(3)]
    views = [Pixels(stores[k], torch.tensor(chosen, dtype=torch.int64)) for k, chosen in parts]
    expected = [50 * k + position for k, chosen in parts for position in chosen]
    whole = joined(views)
    assert len(whole) == len(expected)
    assert numbers(whole[:]) == expected
    if expected:
        picked = data.draw(st.lists(st.integers(-len(expected), len(expected) - 1), max_size=6))
        taken = whole[torch.tensor(picked, dtype=torch.int64)]
        assert numbers(taken) == [expected[position] for position in picked]


def strided(images: Tensor) -> Tensor:
    """Return the images in the order of dimensions that published arrays have."""
    return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def test_a_view_of_published_arrays_is_indexed_as_its_tensor_is() -> None:
    images = strided(torch.randint(256, (10, 3, 5, 4), dtype=torch.uint8))
    assert not images.is_contiguous()
    for index in INDICES:
        assert torch.equal(Pixels(images, POSITIONS)[index], images[POSITIONS][index])


def test_gathering_is_taking_from_each_part_and_joining() -> None:
    chain, plain = three_stores()
    empty = torch.tensor([], dtype=torch.int64)
    parts: list[tuple[Images, Tensor]] = [
        (store(10), torch.tensor([3, 3, 0])),
        (Pixels(store(10), POSITIONS), torch.tensor([5, 0, -1])),
        (chain, torch.tensor([11, 0, 7])),
        (store(4), empty),
        (strided(store(6, 50)), torch.tensor([2])),
        (Pixels(strided(store(6, 60)), torch.tensor([4, 5])), torch.tensor([1, 0])),
    ]
    expected = [3, 3, 0, 9, 4, 9, *plain[[11, 0, 7], 0, 0, 0].tolist(), 52, 65, 64]
    found = gather(parts)
    assert numbers(found) == expected
    assert found.is_contiguous()
    assert numbers(gather(parts[::-1])[:3]) == [65, 64, 52]
    assert gather([(store(4), empty)]).shape == (0, *SHAPE)


def test_what_is_gathered_is_a_copy() -> None:
    images = store(10)
    gather([(images, torch.arange(10))]).fill_(255)
    assert numbers(images) == list(range(10))


def test_on_the_cpu_nothing_moves() -> None:
    images = store(5)
    view, plain = resident([Pixels(images, torch.tensor([1])), images], "cpu")
    assert isinstance(view, Pixels)
    assert view.store is images
    assert plain is images


def _stores_of(images: Sequence[Images]) -> list[Tensor]:
    links = [image.parts if isinstance(image, Chain) else (pixels(image),) for image in images]
    return [link.store for parts in links for link in parts]


def test_a_store_that_several_share_is_moved_once() -> None:
    one, two = store(6), store(3, 100)
    asked = [Pixels(one, torch.tensor([5, 0])), one, joined([one, two]), Pixels(two, torch.tensor([1]))]
    moved = resident(asked, "meta")
    assert [type(image) for image in moved] == [Pixels, Tensor, Chain, Pixels]
    assert all(image.device.type == "meta" for image in moved)
    assert [image.shape for image in moved] == [image.shape for image in asked]
    stores = _stores_of(moved)
    assert len({id(found) for found in stores}) == 2
    assert stores[0] is stores[1] is stores[2]
    assert stores[3] is stores[4]
    assert isinstance(moved[0], Pixels)
    assert moved[0].positions.tolist() == [5, 0]


Moves = Callable[[], list[int]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """Pretend that images can be moved to a GPU; return the bytes of every move so far."""
    moves: list[int] = []
    real = Tensor.to

    def to(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if args and isinstance(args[0], torch.device) and args[0].type == "cuda":
            moves.append(self.nbytes)
            return self.clone()
        return real(self, *args, **options)

    monkeypatch.setattr(Tensor, "to", to)
    return lambda: moves


def test_a_gpu_gets_all_images_or_none(gpu: Moves, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = store(6), store(4, 100)
    asked = [Pixels(one, torch.tensor([0])), one, joined([one, two])]
    needed = one.nbytes + two.nbytes  # `one` counts once
    free = round(needed / module.DEVICE_SHARE)
    monkeypatch.setattr(module, "free_memory", lambda device: free - 1)
    kept = resident(asked, "cuda")
    assert gpu() == []
    assert all(same is image for same, image in zip(kept, asked, strict=True))
    monkeypatch.setattr(module, "free_memory", lambda device: free)
    moved = resident(asked, "cuda")
    assert sorted(gpu()) == sorted([one.nbytes, two.nbytes])
    assert [torch.equal(new[:], old[:]) for new, old in zip(moved, asked, strict=True)] == [True] * 3


def test_weights_and_activations_keep_a_share_of_the_gpu() -> None:
    assert 0 < module.DEVICE_SHARE <= 0.7


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.uint8), pixels(torch.zeros(2, 3, 4, 4))],
)
def test_images_that_are_not_bytes_of_four_dimensions_are_refused(images: Any) -> None:
    with pytest.raises(DataError, match=r"here: images must be uint8 of shape \(N, C, H, W\)"):
        require_pixels(images, "here")
    part = torch.arange(2)
    with pytest.raises(DataError, match="domain 'a'"):
        Domain("a", images, torch.zeros(2, dtype=torch.int64), ("x", "y"), part, part, part)


def test_bytes_of_four_dimensions_pass() -> None:
    require_pixels(store(2), "here")
    require_pixels(three_stores()[0], "here")
