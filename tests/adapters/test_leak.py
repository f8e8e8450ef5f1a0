"""Target labels cannot reach an adapter: no path of references leads there, and poison changes nothing."""

import gc
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import METHODS, adapt
from vicinal.checkpoint import Trained
from vicinal.data.domains import Domain, DomainSet, assign_roles
from vicinal.data.streams import Stream, label_shift_order, online_order
from vicinal.functional.peers_consistency import feature_moments
from vicinal.models.auxiliary import as_extras, projection_head, rotation_head
from vicinal.models.single_sample import SampleInferenceNet

ALGORITHMS = {"neighbor": "neighbor", "vnl_paper": "meta"}
COUNT, CLASSES = 60, 4
WORLD = (types.ModuleType, type, types.FrameType, types.CodeType)


def source_for(make_source: Any, method: str) -> Trained:
    """Return a source that has all a method may need of its training."""
    source: Trained = make_source(ALGORITHMS.get(method, "erm"))
    width = source.model.head.in_features
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        projection, z = projection_head(width, 8), torch.randn(64, width)
        extras = as_extras("single_sample", SampleInferenceNet(width, hidden=16))
        extras |= as_extras("ttt", rotation_head(width)) | as_extras("ttt_pp.head", projection)
        for name, value in (("features", z), ("projection", projection(z).detach())):
            moments = {**feature_moments(value)._asdict(), "distances": value.new_tensor([1e-2, 1e-3])}
            extras |= {f"ttt_pp.{name}.{what}": number for what, number in moments.items()}
    source.extras = {name: value.double() for name, value in extras.items()}
    return source


def children(thing: Any) -> Iterator[Any]:
    """Yield what a thing refers to, leaving out the program itself: a function's globals are not its own."""
    if isinstance(thing, types.FunctionType):
        yield from (thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__)
    else:
        yield from gc.get_referents(thing)
    if isinstance(thing, Tensor):
        yield from (thing.grad, thing._base, thing.grad_fn)


def reachable(root: Any) -> Iterator[Any]:
    """Yield everything that a path of references leads to."""
    held, todo = {}, [root]
    while todo:
        thing = todo.pop()
        if id(thing) in held or isinstance(thing, WORLD):
            continue
        held[id(thing)] = thing  # kept alive, so that no id is used twice
        yield thing
        todo.extend(children(thing))


def tells(thing: Any, labels: Tensor) -> bool:
    """Say whether a value gives the labels away: as numbers in any type, or as one row a class."""
    if isinstance(thing, np.ndarray) and thing.dtype.kind in "iuf":
        thing = torch.from_numpy(thing.copy())
    if isinstance(thing, bytes | bytearray) and len(thing) == len(labels):
        thing = torch.tensor(list(thing))
    if isinstance(thing, list | tuple) and all(isinstance(value, int | float) for value in thing):
        thing = torch.tensor(thing)
    if not isinstance(thing, Tensor) or thing.numel() < len(labels):
        return False
    if thing.ndim == 2 and thing.shape == (len(labels), CLASSES):
        thing = thing.argmax(-1)
    flat = thing.detach().flatten().double()
    return len(flat) == len(labels) and torch.equal(flat, labels.double())


def leaks(root: Any, *answers: Tensor) -> bool:
    return any(tells(thing, labels) for thing in reachable(root) for labels in answers)


def domain(name: str, labels: Tensor) -> Domain:
    generator = torch.Generator().manual_seed(len(name))
    pictures = torch.randint(0, 256, (COUNT, 3, 8, 8), generator=generator, dtype=torch.uint8)
    everything = torch.arange(COUNT)
    paths = tuple(f"{name}/{position}" for position in range(COUNT))
    return Domain(name, pictures, labels, paths, everything[:40], everything[40:], everything)


def world(seed: int) -> DomainSet:
    """Return three domains whose images are the same for every seed and whose labels are not."""
    labels = torch.randint(0, CLASSES, (3, COUNT), generator=torch.Generator().manual_seed(seed))
    names = ("a", "bb", "ccc")
    return DomainSet("test", tuple("wxyz"), {n: domain(n, y) for n, y in zip(names, labels, strict=True)})


@dataclass(frozen=True, eq=False)
class Told:
    stream: Stream
    labels: Tensor  # in the order of the images
    arriving: Tensor  # in the order of arrival


def target_stream(seed: int, kind: str = "online") -> Told:
    roles = assign_roles(world(seed), ["ccc"])
    (target,) = roles.targets
    labels = roles.answers["ccc"]
    order = online_order(COUNT, seed=0) if kind == "online" else label_shift_order(labels, 1.0, seed=0)
    return Told(Stream(kind, target.images, order, batch_size=20), labels, labels[order])


@pytest.mark.parametrize("kind", ["online", "label_shift"])
def test_no_path_leads_from_a_stream_to_the_labels(kind: str) -> None:
    told = target_stream(0, kind)
    batches = told.stream.batches("cpu")
    next(batches)
    assert not leaks(told.stream, told.labels, told.arriving)
    assert not leaks(batches, told.labels, told.arriving)
    assert leaks(told, told.labels)


def test_no_path_leads_from_a_target_to_the_labels() -> None:
    roles = assign_roles(world(0), ["ccc"])
    assert not leaks(roles.targets, roles.answers["ccc"])
    assert leaks(roles, roles.answers["ccc"])


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_path_leads_from_an_adapter_to_the_labels(make_source: Any, method: str) -> None:
    told = target_stream(0)
    adapter = adapt(source_for(make_source, method), method)
    for batch in told.stream.batches("cpu"):
        adapter(batch.double())
    assert not leaks(adapter, told.labels, told.arriving)


HIDDEN = {
    "an attribute": lambda labels: labels,
    "another type": lambda labels: {"deep": [labels.float()]},
    "one row a class": lambda labels: torch.nn.functional.one_hot(labels, CLASSES),
    "an array": lambda labels: labels.numpy().astype("int32"),
    "a list": lambda labels: labels.tolist(),
    "a closure": lambda labels: lambda: labels,
    "a partial": lambda labels: partial(print, labels),
    "a bound method": lambda labels: labels.sum,
    "a view's base": lambda labels: labels[:1],
    "a method of an object": lambda labels: replace(target_stream(0), labels=labels).__repr__,
}


@pytest.mark.parametrize("place", HIDDEN)
def test_the_walk_finds_what_is_hidden(make_source: Any, place: str) -> None:
    labels = target_stream(0).labels
    adapter = adapt(make_source(), "vnl")
    assert not leaks(adapter, labels)
    adapter.observer = HIDDEN[place](labels)
    assert leaks(adapter, labels)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_outputs_are_the_same_whatever_the_labels_are(make_source: Any, method: str) -> None:
    outputs = []
    for seed in (0, 1):
        told = target_stream(seed)
        adapter = adapt(source_for(make_source, method), method, lr=1e-2)
        outputs.append(torch.cat([adapter(batch.double()) for batch in told.stream.batches("cpu")]))
    assert not torch.equal(target_stream(0).labels, target_stream(1).labels)
    assert torch.equal(outputs[0], outputs[1])
