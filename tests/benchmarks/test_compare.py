from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.benchmarks.compare import Entry, compare, source_algorithm
from vicinal.checkpoint import Trained
from vicinal.data.domains import Roles, TargetDomain
from vicinal.data.pixels import Pixels
from vicinal.data.streams import STREAMS, StreamSpec, make_stream
from vicinal.errors import ConfigError
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


def test_the_streams_of_a_target_are_those_of_its_own_seed(source: Trained, roles: Roles) -> None:
    for kind in ("online", "label_shift", "class_sorted"):
        spec = StreamSpec(kind, 4)
        one, same, other = (
            [r.stream.order.tolist() for r in compare(source, roles, [Entry("erm")], spec, s, dataset="made")]
            for s in (1, 1, 2)
        )
        assert one == same != other
        for target, order in zip(roles.targets, one, strict=True):
            expected = make_stream(spec, [target.images], [roles.answers[target.name]], 1)
            assert order == expected.order.tolist()


@pytest.mark.parametrize("kind", STREAMS)
def test_a_record_says_what_arrived(source: Trained, roles: Roles, kind: str) -> None:
    spec = StreamSpec(kind, 4, alpha=2.0)
    results = list(compare(source, roles, [Entry("erm")], spec, 0, dataset="made"))
    assert [r.record.target for r in results] == (["north+south"] if spec.joint else ["north", "south"])
    for result in results:
        assert (result.record.stream, result.record.batch_size) == (kind, 4)
        assert (
            result.record.protocol["images"] == len(result.stream.order) == len(result.outcome.probabilities)
        )
        assert result.record.protocol.get("alpha") == (2.0 if kind == "label_shift" else None)
        assert ("accuracy_by_domain" in result.record.protocol) == spec.joint


@pytest.mark.parametrize("kind", ["continual", "mixed"])
def test_a_joint_record_has_the_accuracy_of_every_domain(source: Trained, roles: Roles, kind: str) -> None:
    entries = [Entry("erm"), Entry("soft", {"lr": 1e-2})]
    results = list(compare(source, roles, entries, StreamSpec(kind, 5), 3, dataset="made"))
    assert [r.record.method for r in results] == ["erm", "soft"]
    for result in results:
        shares = result.record.protocol["accuracy_by_domain"]
        assert list(shares) == ["north", "south"]
        right: dict[str, list[bool]] = {"north": [], "south": []}
        guesses = result.outcome.probabilities.argmax(-1).tolist()
        for position, guess in zip(result.stream.order.tolist(), guesses, strict=True):
            name, own = ("north", position) if position < 12 else ("south", position - 12)
            right[name].append(guess == int(roles.answers[name][own]))
        assert shares == pytest.approx({name: sum(hits) / len(hits) for name, hits in right.items()})
        assert result.record.accuracy == pytest.approx((12 * shares["north"] + 15 * shares["south"]) / 27)


def test_a_continual_stream_reaches_the_adapter_domain_after_domain(source: Trained, roles: Roles) -> None:
    (result,) = compare(source, roles, [Entry("erm")], StreamSpec("continual", 5), 3, dataset="made")
    arrived = torch.cat(list(result.stream.batches("cpu")))
    start = 0
    for target in roles.targets:
        own = arrived[start : start + len(target.images)]
        expected = target.images[:].float() / 255
        assert sorted(own.flatten(1).tolist()) == sorted(expected.flatten(1).tolist())
        start += len(target.images)


@pytest.mark.parametrize("kind", ["continual", "mixed"])
def test_a_joint_stream_of_one_target_is_refused_before_anything_runs(
    source: Trained, roles: Roles, kind: str
) -> None:
    one = replace(roles, targets=roles.targets[:1])
    with pytest.raises(ConfigError, match=f"a {kind} stream needs two target domains or more") as caught:
        next(compare(source, one, [Entry("erm")], StreamSpec(kind), 0, dataset="made"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["online", "continual", "mixed"])
def test_answers_change_no_prediction(source: Trained, roles: Roles, kind: str) -> None:
    garbage = {name: (2 * answers + 1) % 3 for name, answers in roles.answers.items()}
    entries = [Entry("soft", {"lr": 1e-2})]
    runs = [
        list(compare(source, given, entries, StreamSpec(kind, 5), 3, dataset="made"))
        for given in (roles, replace(roles, answers=garbage))
    ]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one.outcome.probabilities, other.outcome.probabilities)
        assert one.record.nll != other.record.nll  # they do reach the metrics


@pytest.mark.parametrize("kind", STREAMS)
def test_adapters_are_given_images_and_nothing_else(
    source: Trained, roles: Roles, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, ...]] = []
    original = Adapter.__call__

    def watched(self: Adapter, *args: object, **options: object) -> Tensor:
        given.append((*args, *options.values()))
        return original(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Adapter, "__call__", watched)
    list(compare(source, roles, [Entry("soft")], StreamSpec(kind, 4), 0, dataset="made"))
    assert given
    for (x,) in given:
        assert isinstance(x, Tensor)
        assert x.shape[1:] == (1, 8, 8)
        assert x.dtype == torch.float32


def test_targets_of_one_store_are_streamed_as_copies_would_be(source: Trained, roles: Roles) -> None:
    store = torch.cat([target.images[:] for target in roles.targets])
    parts = torch.arange(27).split([12, 15])
    views = tuple(
        replace(target, images=Pixels(store, part)) for target, part in zip(roles.targets, parts, strict=True)
    )
    for kind in ("online", "mixed"):
        copied, shared = (
            [
                r.outcome.probabilities
                for r in compare(source, given, [Entry("soft")], StreamSpec(kind, 5), 3, dataset="made")
            ]
            for given in (roles, replace(roles, targets=views))
        )
        assert all(map(torch.equal, copied, shared))


def test_neighbor_is_filed_under_the_training_of_its_theta(source: Trained) -> None:
    assert source_algorithm(source) == "erm"
    for algorithm, shown in (("neighbor", "erm"), ("meta", "meta")):
        other = Trained(source.model, "small", source.classes, source.preprocessing, algorithm)
        assert source_algorithm(other) == shown


def test_records_say_what_was_chosen_and_what_was_given(source: Trained, roles: Roles) -> None:
    choice = {"methods": {"soft": {"batch": {"lr": 1e-3, "output_temperature": 2.0}}}}
    entries = [
        Entry("soft"),
        Entry("soft", {"lr": 1e-2}),
        Entry("soft", {"num_samples": 3}),
        Entry("soft", {"statistics": "stream"}),
        Entry("tent"),
        Entry("erm"),
    ]
    chosen = replace(source, choice=choice)
    results = list(compare(chosen, roles, entries, StreamSpec(), 0, dataset="made"))[: len(entries)]
    assert [r.record.protocol["selection"].split("; ", 1)[1] for r in results] == [
        "lr, output_temperature on left-out source domains",
        "nothing else; given: lr",
        "lr, output_temperature on left-out source domains; given: num_samples",
        "nothing else; given: statistics",
        "nothing else",
        "nothing else",
    ]
