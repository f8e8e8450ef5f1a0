import contextlib
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from vicinal.data.domains import Domain, DomainSet, TargetDomain, assign_roles, split_indices
from vicinal.errors import ConfigError, DataError, UnknownNameError


def domain(name: str, shift: int = 0) -> Domain:
    """A domain of six 1x1 images whose pixel is `shift` + position; 4 for sources, 2 for targets."""
    images = (torch.arange(6) + shift).to(torch.uint8).reshape(6, 1, 1, 1)
    paths = tuple(f"{name}/{position}.png" for position in range(6))
    train, val, test = torch.tensor([0, 3, 4]), torch.tensor([1]), torch.tensor([2, 5])
    return Domain(name, images, torch.tensor([0, 1, 0, 1, 0, 1]), paths, train, val, test)


def domain_set(*names: str) -> DomainSet:
    domains = {name: domain(name, 10 * position) for position, name in enumerate(names)}
    return DomainSet("toy", ("x", "y"), domains)


def test_sources_get_train_and_val_and_targets_get_test() -> None:
    roles = assign_roles(domain_set("a", "b", "c", "d"), ["c", "a"])
    assert [source.name for source in roles.sources] == ["b", "d"]
    assert [target.name for target in roles.targets] == ["c", "a"]
    assert roles.sources[0].train.images[:].flatten().tolist() == [10, 13, 14]
    assert roles.sources[0].train.labels.tolist() == [0, 1, 0]
    assert roles.sources[0].val.images[:].flatten().tolist() == [11]
    assert len(roles.sources[0].train) == 3
    assert roles.targets[0].images[:].flatten().tolist() == [22, 25]
    assert roles.targets[0].paths == ("c/2.png", "c/5.png")
    assert {name: labels.tolist() for name, labels in roles.answers.items()} == {"c": [0, 1], "a": [0, 1]}
    assert roles.classes == ("x", "y")


def test_a_target_has_no_labels() -> None:
    assert {field.name for field in fields(TargetDomain)} == {"name", "images", "paths"}


def test_no_target_makes_every_domain_a_source() -> None:
    roles = assign_roles(domain_set("a", "b"), [])
    assert [source.name for source in roles.sources] == ["a", "b"]
    assert roles.targets == ()


def test_a_target_named_twice_counts_once() -> None:
    roles = assign_roles(domain_set("a", "b", "c"), ["a", "a"])
    assert [target.name for target in roles.targets] == ["a"]


def test_unknown_target_lists_the_domains() -> None:
    with pytest.raises(UnknownNameError, match="unknown domain 'z': choose from a, b, c"):
        assign_roles(domain_set("a", "b", "c"), ["z"])


def test_one_source_left_is_refused() -> None:
    with pytest.raises(DataError, match="at least two source domains"):
        assign_roles(domain_set("a", "b", "c"), ["a", "b"])


def test_a_domain_without_training_images_is_no_source() -> None:
    data, nothing = domain_set("a", "b", "c", "d"), torch.tensor([], dtype=torch.int64)
    data = replace(data, domains={**data.domains, "d": replace(data.domains["d"], train=nothing)})
    with contextlib.suppress(DataError):  # refused, or left out
        assert [source.name for source in assign_roles(data, ["a"]).sources] == ["b", "c"]


@pytest.mark.parametrize(
    ("images", "paths", "message"),
    [
        (torch.zeros(6, 1, 1, 1), tuple("abcdef"), "uint8"),
        (torch.zeros(6, 1, 1, dtype=torch.uint8), tuple("abcdef"), "uint8"),
        (torch.zeros(5, 1, 1, 1, dtype=torch.uint8), tuple("abcdef"), "5 images, 6 labels, 6 paths"),
        (torch.zeros(6, 1, 1, 1, dtype=torch.uint8), tuple("abc"), "6 images, 6 labels, 3 paths"),
    ],
)
def test_a_domain_checks_its_shapes(images: Tensor, paths: tuple[str, ...], message: str) -> None:
    part = torch.arange(2)
    with pytest.raises(DataError, match=message):
        Domain("a", images, torch.zeros(6, dtype=torch.int64), paths, part, part, part)


def test_split_is_a_partition_sorted_seeded_and_per_class() -> None:
    labels = torch.arange(3).repeat_interleave(20)[torch.randperm(60)]
    train, val = split_indices(labels, 0.2, seed=1)
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(60))
    assert train.tolist() == sorted(train.tolist())
    assert val.tolist() == sorted(val.tolist())
    assert labels[val].bincount().tolist() == [4, 4, 4]
    again = split_indices(labels, 0.2, seed=1)
    assert torch.equal(val, again[1])
    assert not torch.equal(val, split_indices(labels, 0.2, seed=2)[1])


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 0.99])
def test_small_classes_keep_an_image_to_train_on(fraction: float) -> None:
    labels = torch.tensor([0, 1, 1, 2, 2, 2])
    train, val = split_indices(labels, fraction, seed=0)
    assert set(labels[train].tolist()) == {0, 1, 2}
    assert set(labels[val].tolist()) == {1, 2}


def test_split_of_nothing_and_with_nothing_to_validate() -> None:
    train, val = split_indices(torch.tensor([], dtype=torch.int64), 0.2, seed=0)
    assert len(train) == len(val) == 0
    train, val = split_indices(torch.tensor([0, 0, 1]), 0.0, seed=0)
    assert train.tolist() == [0, 1, 2]
    assert val.dtype == torch.int64
    assert len(val) == 0


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_a_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ConfigError, match="validation fraction"):
        split_indices(torch.tensor([0, 0]), fraction, seed=0)


def test_sources_can_be_named() -> None:
    data = domain_set("a", "b", "c", "d")
    roles = assign_roles(data, ["c"], sources=["d", "a"])
    assert [source.name for source in roles.sources] == ["a", "d"]  # in the order of the data
    assert [target.name for target in roles.targets] == ["c"]
    with pytest.raises(UnknownNameError, match="z"):
        assign_roles(data, ["c"], sources=["a", "z"])
    with pytest.raises(DataError, match=r"'c' of .* cannot be a source: it is a target"):
        assign_roles(data, ["c"], sources=["a", "c"])
    with pytest.raises(DataError, match="1 of them targets and 1 sources"):
        assign_roles(data, ["c"], sources=["a"])
