import pytest
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.benchmarks.compare import Entry, StreamSpec, compare, make_stream, source_algorithm
from vicinal.checkpoint import Trained
from vicinal.data.domains import Roles, TargetDomain
from vicinal.errors import ConfigError, UnknownNameError
from vicinal.models.backbones import Preprocessing, build_classifier


@pytest.fixture(scope="module")
def source() -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        preprocessing = Preprocessing(8, 1, (0.5,), (0.25,))
        model = build_classifier("small", 3, preprocessing=preprocessing)
    return Trained(
        model.eval(), "small", ("a", "b", "c"), preprocessing, "erm", config={"train": {"seed": 9}}
    )


def target(name: str, count: int) -> TargetDomain:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return TargetDomain(name, images, tuple(f"{name}/{index}" for index in range(count)))


@pytest.fixture
def roles() -> Roles:
    targets = (target("north", 12), target("south", 15))
    answers = {item.name: torch.arange(len(item.images)) % 3 for item in targets}
    return Roles((), targets, ("a", "b", "c"), answers)


def test_every_entry_runs_on_the_very_same_stream(source: Trained, roles: Roles) -> None:
    wanted = [Entry("erm"), Entry("soft", {"lr": 1e-2}), Entry("erm")]
    results = list(compare(source, roles, wanted, StreamSpec(batch_size=5), 3, dataset="made"))
    assert [(r.record.target, r.record.method) for r in results] == [
        (name, method) for name in ("north", "south") for method in ("erm", "soft", "erm")
    ]
    for first, soft, again in (results[:3], results[3:]):
        assert first.stream is soft.stream is again.stream
        # An adapter that left traces in the source model would show in the second run of erm.
        assert torch.equal(first.outcome.probabilities, again.outcome.probabilities)
        assert not torch.equal(first.outcome.probabilities, soft.outcome.probabilities)
    record = results[1].record
    assert (record.dataset, record.seed, record.protocol["adapter"]["lr"]) == ("made", 3, 1e-2)
    assert record.protocol["training"] == {"train": {"seed": 9}}
    assert "alpha" not in record.protocol


def test_an_online_stream_is_a_permutation_by_its_seed(roles: Roles) -> None:
    north = roles.targets[0]
    one, same, other = (make_stream(north, roles.answers["north"], StreamSpec(), s) for s in (1, 1, 2))
    assert sorted(one.order.tolist()) == list(range(12))
    assert torch.equal(one.order, same.order)
    assert not torch.equal(one.order, other.order)


def test_label_shifted_streams_differ_by_their_seed(roles: Roles) -> None:
    north, spec = roles.targets[0], StreamSpec("label_shift", 4, 0.5)
    streams = [make_stream(north, roles.answers["north"], spec, seed) for seed in range(4)]
    assert len({tuple(stream.order.tolist()) for stream in streams}) == 4
    assert all(stream.kind == "label_shift" for stream in streams)


def test_unknown_streams_and_batches_of_none(roles: Roles) -> None:
    with pytest.raises(UnknownNameError, match="'bursts': choose from label_shift, online"):
        StreamSpec("bursts")
    with pytest.raises(ConfigError, match="batch size must be at least 1, not 0"):
        make_stream(roles.targets[0], roles.answers["north"], StreamSpec(batch_size=0), 0)


def test_neighbor_is_filed_under_the_training_of_its_theta(source: Trained) -> None:
    assert source_algorithm(source) == "erm"
    for algorithm, shown in (("neighbor", "erm"), ("meta", "meta")):
        other = Trained(source.model, "small", source.classes, source.preprocessing, algorithm)
        assert source_algorithm(other) == shown
