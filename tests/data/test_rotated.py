from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage

from vicinal.data import arrays
from vicinal.data.domains import DomainSet
from vicinal.data.idx import LabelledArrays
from vicinal.data.rotated import RotatedOptions, choose_base, load_rotated
from vicinal.errors import ConfigError, DataError

CLASSES = tuple("0123456789")


def base(train: int = 40, test: int = 20, side: int = 12) -> LabelledArrays:
    """Images of smooth random blobs, which a rotation moves without aliasing."""
    rng = np.random.default_rng(0)
    rough = rng.random((train + test, side, side))
    smooth = ndimage.gaussian_filter(rough, (0, 1.5, 1.5))
    pixels = np.rint(255 * (smooth - smooth.min()) / np.ptp(smooth)).astype(np.uint8)
    images, labels = torch.from_numpy(pixels).unsqueeze(1), torch.arange(train + test) % 10
    return LabelledArrays(images[:train], labels[:train], images[train:], labels[train:], Path("made"))


def load(size: int = 12, channels: int = 1, seed: int = 0, **options: Any) -> DomainSet:
    chosen = RotatedOptions(**{"train": 20, "val": 10, "test": 15} | options)
    return load_rotated("rotated_toy", base(), CLASSES, chosen, size, channels, seed)


def test_domains_counts_and_facts() -> None:
    data = load()
    assert (data.name, data.classes) == ("rotated_toy", CLASSES)
    assert tuple(data.domains) == ("0", "15", "30", "45", "60", "75", "90")
    for name, domain in data.domains.items():
        assert domain.name == name
        assert domain.images.shape == (45, 1, 12, 12)
        assert (len(domain.train), len(domain.val), len(domain.test)) == (20, 10, 15)
        assert sorted(torch.cat([domain.train, domain.val, domain.test]).tolist()) == list(range(45))
    assert data.facts["counts"] == [20, 10, 15]
    assert data.facts["options"]["base_seed"] == 0


def test_images_and_labels_are_those_the_paths_name() -> None:
    source = base()
    domain = load(angles=(0,)).domains["0"]
    for position, path in enumerate(domain.paths):
        part, row = path.split("/")
        images, labels = {
            "train": (source.train_images, source.train_labels),
            "test": (source.test_images, source.test_labels),
        }[part]
        assert torch.equal(domain.images[position], images[int(row)])
        assert domain.labels[position] == labels[int(row)]
    assert {domain.paths[i].split("/")[0] for i in domain.test.tolist()} == {"test"}
    assert {domain.paths[i].split("/")[0] for i in [*domain.train, *domain.val]} == {"train"}


def test_the_same_base_images_in_every_domain_and_none_in_two_parts() -> None:
    domains = list(load().domains.values())
    first = domains[0]
    assert len(set(first.paths)) == 45
    for domain in domains:
        assert domain.paths == first.paths
        assert torch.equal(domain.labels, first.labels)
        for part in ("train", "val", "test"):
            assert torch.equal(getattr(domain, part), getattr(first, part))


def test_ninety_degrees_is_a_quarter_turn_counter_clockwise() -> None:
    domains = load(angles=(0, 90, 180)).domains
    upright = domains["0"].images
    assert torch.equal(domains["90"].images, torch.rot90(upright, 1, (-2, -1)))
    assert torch.equal(domains["180"].images, torch.rot90(upright, 2, (-2, -1)))
    assert not torch.equal(domains["90"].images, torch.rot90(upright, -1, (-2, -1)))


def test_thirty_degrees_agrees_with_scipy_and_has_black_corners() -> None:
    domains = load(angles=(0, 30)).domains
    upright = domains["0"].images[:, 0].numpy().astype(np.float64)
    # scipy turns counter-clockwise as displayed (rows down) for a positive angle over these axes.
    expected, wrong = (
        ndimage.rotate(upright, angle, axes=(2, 1), reshape=False, order=1, mode="grid-constant")
        for angle in (30, -30)
    )
    found = domains["30"].images[:, 0].numpy().astype(np.float64)
    assert np.abs(found - expected).max() <= 1
    assert np.abs(found - wrong).mean() > 10
    assert (found[:, [0, 0, -1, -1], [0, -1, 0, -1]] == 0).all()


def test_resized_before_it_is_turned() -> None:
    domains = load(size=20, angles=(0, 45)).domains
    upright = domains["0"].images[:, 0].numpy().astype(np.float64)
    assert upright.shape == (45, 20, 20)
    expected = ndimage.rotate(upright, 45, axes=(2, 1), reshape=False, order=1, mode="grid-constant")
    assert np.abs(domains["45"].images[:, 0].numpy() - expected).max() <= 1


def test_three_channels_are_the_one_repeated() -> None:
    one, three = load(channels=1).domains["15"].images, load(channels=3).domains["15"].images
    assert torch.equal(three[:], one[:].expand(-1, 3, -1, -1))


def test_chunks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(angles=(30,)).domains["30"].images
    monkeypatch.setattr(arrays, "CHUNK_VALUES", 7 * 12 * 12)
    assert torch.equal(load(angles=(30,)).domains["30"].images[:], whole[:])


def test_base_seed_chooses_and_seed_divides() -> None:
    one, again, divided, chosen = (
        load(seed=seed, base_seed=base_seed).domains["0"]
        for seed, base_seed in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(one.train, again.train)
    assert one.paths == again.paths == divided.paths
    assert not torch.equal(one.train, divided.train)
    assert one.paths != chosen.paths
    assert len({one.paths[i] for i in one.test.tolist()}) == 15


def test_none_takes_all_that_is_left() -> None:
    for options, counts in (
        ({"train": None, "val": 10, "test": None}, (30, 10, 20)),
        ({"train": 5, "val": None}, (5, 35, 15)),
        ({"train": None, "val": 0}, (40, 0, 15)),
        ({"train": 40, "val": None}, (40, 0, 15)),
    ):
        domain = load(**options).domains["0"]
        assert (len(domain.train), len(domain.val), len(domain.test)) == counts


def test_every_base_image_is_as_likely_as_any_other() -> None:
    hits = torch.zeros(50)
    for seed in range(400):
        train, val, _ = choose_base(50, 1, RotatedOptions(train=10, val=10, test=1, base_seed=seed))
        assert not set(train.tolist()) & set(val.tolist())
        hits[train] += 1
    # Binomial(400, 0.2): mean 80, deviation 8.
    assert (hits - 80).abs().max() < 5 * 8


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"train": 35, "val": 10}, "train=35 and val=10 ask for more than the base's 40 training images"),
        ({"train": None, "val": 40}, "ask for more"),
        ({"train": 41, "val": None}, "ask for more"),
        ({"test": 21}, "test asks for 21 images a domain, the base has 20"),
    ],
)
def test_more_than_the_base_has(options: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        load(**options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"angles": ()}, "angles must be given"),
        ({"angles": (15, 15)}, "each once"),
        ({"angles": (0, 360)}, "from 0 to 359, not 360"),
        ({"angles": (-15,)}, "not -15"),
        ({"angles": (7.5,)}, "whole degrees"),
        ({"train": None, "val": None}, "cannot both"),
        ({"train": 0}, "train must be at least 1"),
        ({"val": -1}, "val must be at least 0"),
        ({"test": 0}, "test must be at least 1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RotatedOptions(**options)
