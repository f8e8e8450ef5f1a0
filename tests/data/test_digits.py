import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.datasets import load_digits

from vicinal.data.digits import load_digits_domains
from vicinal.data.domains import DomainSet


@pytest.fixture(scope="module")
def digits() -> DomainSet:
    return load_digits_domains()


def test_domains_classes_and_shapes(digits: DomainSet) -> None:
    assert tuple(digits.domains) == ("0", "15", "30", "45", "60", "75", "90")
    assert digits.classes == tuple("0123456789")
    assert digits.bad == ()
    for name, domain in digits.domains.items():
        assert domain.name == name
        assert domain.images.shape == (1797, 1, 16, 16)
        assert domain.images.dtype == torch.uint8
        assert domain.paths[17] == "digits/17"
        assert domain.labels.tolist() == load_digits().target.tolist()


def test_no_digit_is_in_two_parts_and_the_parts_are_the_same_in_every_domain(digits: DomainSet) -> None:
    first = digits.domains["0"]
    parts = [set(part.tolist()) for part in (first.train, first.val, first.test)]
    assert sum(len(part) for part in parts) == 1797
    assert set().union(*parts) == set(range(1797))
    assert len(parts[2]) == 697
    assert len(parts[1]) == pytest.approx(220, abs=5)
    for domain in digits.domains.values():
        assert torch.equal(domain.train, first.train)
        assert torch.equal(domain.val, first.val)
        assert torch.equal(domain.test, first.test)


def test_every_class_is_in_every_part(digits: DomainSet) -> None:
    domain = digits.domains["45"]
    for part in (domain.train, domain.val, domain.test):
        assert set(domain.labels[part].tolist()) == set(range(10))


def test_seed_decides_the_split_alone() -> None:
    one, same, other = (load_digits_domains(seed=seed, angles=(30,)).domains["30"] for seed in (1, 1, 2))
    assert torch.equal(one.test, same.test)
    assert not torch.equal(one.test, other.test)
    assert torch.equal(one.images, other.images)


def test_ninety_degrees_is_a_quarter_turn_counter_clockwise(digits: DomainSet) -> None:
    upright, turned = digits.domains["0"].images, digits.domains["90"].images
    torch.testing.assert_close(turned, torch.rot90(upright, 1, (-2, -1)), atol=1, rtol=0)
    assert not torch.equal(turned, torch.rot90(upright, -1, (-2, -1)))


def test_thirty_degrees_agrees_with_scipy(digits: DomainSet) -> None:
    upright = digits.domains["0"].images[:20, 0].numpy().astype(np.float64)
    # scipy turns counter-clockwise as displayed (rows down) for a positive angle over these axes.
    expected = ndimage.rotate(upright, 30, axes=(2, 1), reshape=False, order=1, mode="grid-constant")
    wrong = ndimage.rotate(upright, -30, axes=(2, 1), reshape=False, order=1, mode="grid-constant")
    found = digits.domains["30"].images[:20, 0].numpy().astype(np.float64)
    assert np.abs(found - expected).max() <= 2
    assert np.abs(found - wrong).mean() > 20


def test_upright_domain_at_the_original_size_is_the_original() -> None:
    images = load_digits_domains(size=8, angles=(0,)).domains["0"].images
    expected = np.rint(load_digits().images * 255 / 16).astype(np.uint8)
    assert torch.equal(images[:, 0], torch.from_numpy(expected))


def test_moments_are_sane_and_alike_across_angles(digits: DomainSet) -> None:
    for domain in digits.domains.values():
        pixels = domain.images.float() / 255
        assert pixels.mean() == pytest.approx(0.305, abs=0.02)
        assert 0.25 < pixels.std() < 0.45
        assert pixels.max() > 0.9
        assert pixels.min() == 0
