"""The guard: what it sees, what it does, and that a healthy stream does not notice it."""

import copy
import io
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.adapters.guard import GuardConfig, Guarded
from vicinal.adapters.methods import adapt
from vicinal.adapters.reference import Reference
from vicinal.adapters.snapshots import restore, scale_step, take
from vicinal.adapters.watch import Limits, Signs, Watch, illness
from vicinal.checkpoint import Trained
from vicinal.data.domains import assign_roles
from vicinal.data.load import load_dataset
from vicinal.data.streams import StreamSpec, make_stream
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.normalization import Moments, moment_shift
from vicinal.functional.trust import Comparison, compared, information, mean_entropy, together, top_share
from vicinal.models.backbones import preprocessing_for
from vicinal.training.config import TrainConfig
from vicinal.training.train import ModelSpec, train

Batches = list[tuple[Tensor, Tensor | None]]


@cache
def digits() -> tuple[Trained, dict[str, Any]]:
    """Return a model of digits rotated by 30 to 60 degrees, and a domain of 15 degrees it never saw.

    These are the source domains that the guard's limits were chosen on.
    """
    roles = assign_roles(load_dataset("digits", seed=0), ("0", "90", "15", "75"))
    spec = ModelSpec("small", "none", preprocessing_for("small", channels=1), roles.classes)
    trained = train(spec, roles.sources, TrainConfig(algorithm="erm", iterations=120, seed=0), None)
    (domain,) = (target for target in roles.targets if target.name == "15")
    return trained, {"images": domain.images, "labels": roles.answers["15"]}


def stream(kind: str, noise: int = 0, change: Callable[[Tensor], Tensor] = lambda x: x) -> Batches:
    """Return batches of 20 with their labels, and batches of noise, without, in the middle."""
    data = digits()[1]
    made = make_stream(StreamSpec(kind, 20), [data["images"]], [data["labels"]], 0)
    labels = data["labels"][made.order].split(20)
    batches: Batches = [(change(x), y) for x, y in zip(made.batches("cpu"), labels, strict=True)]
    generator, half = torch.Generator().manual_seed(0), len(batches) // 2
    shape = batches[0][0].shape
    middle: Batches = [(torch.rand(shape, generator=generator), None) for _ in range(noise)]
    return batches[:half] + middle + batches[half:]


def accuracy(model: Callable[[Tensor], Tensor], batches: Batches) -> float:
    outputs = [(model(x), y) for x, y in batches]
    right = [float((logits.argmax(-1) == y).sum()) for logits, y in outputs if y is not None]
    return sum(right) / sum(len(y) for _, y in batches if y is not None)


COLLAPSING = [
    ("soft", {"lr": 3e-3}),
    ("hard", {"lr": 1e-3}),
    ("soft", {"lr": 3e-2, "parameters": "norm"}),
    ("soft", {"lr": 1e-3, "statistics": "source"}),
    ("bn", {}),
]


@pytest.mark.parametrize(("method", "options"), COLLAPSING)
def test_on_a_stream_built_to_collapse_it_stays_with_the_source(method: str, options: dict[str, Any]) -> None:
    source, batches = digits()[0], stream("class_sorted", noise=30)
    erm = accuracy(adapt(source, "erm"), batches)
    guarded = Guarded(adapt(source, method, **options))
    assert accuracy(adapt(source, method, **options), batches) < erm / 2
    assert accuracy(guarded, batches) > erm - 0.02
    assert any("rolled back" in event.action for event in guarded.events)
    assert any("the source predicts" in event.action for event in guarded.events)


@pytest.mark.parametrize("statistics", ["batch", "stream"])
@pytest.mark.parametrize("lr", [1e-4, 1e-3])
def test_on_a_healthy_stream_nothing_changes(statistics: str, lr: float) -> None:
    source = digits()[0]
    guarded = Guarded(adapt(source, "soft", statistics=statistics, lr=lr))
    plain = adapt(source, "soft", statistics=statistics, lr=lr)
    for x, _ in stream("online"):
        assert torch.equal(guarded(x), plain(x))
    assert guarded.events == []
    assert guarded.report() == f"guard: no alarm in {guarded.steps_taken} batches"


def test_a_shift_that_statistics_mend_is_no_alarm_although_the_source_is_sure_and_wrong() -> None:
    source, batches = digits()[0], stream("online", change=lambda x: 0.5 * x + 0.35)
    assert accuracy(adapt(source, "erm"), batches) < 0.3
    guarded = Guarded(adapt(source, "soft"))
    assert accuracy(guarded, batches) > 0.7
    assert guarded.events == []


def test_erm_under_guard_is_erm() -> None:
    source = digits()[0]
    guarded, plain = Guarded(adapt(source, "erm")), adapt(source, "erm")
    for x, _ in stream("class_sorted", noise=3):
        assert torch.equal(guarded(x), plain(x))
    assert guarded.events == []


def test_looks_are_few_while_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    ask = Reference.on_source
    monkeypatch.setattr(Reference, "on_source", lambda self, x: looked.append(len(x)) or ask(self, x))
    for method, most in (("soft", 10), ("bn", 8)):
        guarded, at = Guarded(adapt(digits()[0], method)), []
        for step, (x, _) in enumerate(stream("online")):
            looked.clear()
            guarded(x)
            at += [step] * bool(looked)
        assert at[:3] == [0, 1, 2]  # judged together at first
        assert 4 <= len(at) <= most, method
        assert at[-1] - at[-2] >= 8


# --- what it does ---


def test_steps_it_has_shortened_stay_so_from_batch_to_batch_of_an_episodic_adapter() -> None:
    guarded = Guarded(adapt(digits()[0], "soft", lr=1e-2, episodic=True))
    batches = [x for x, _ in stream("online")[:3]]
    guarded(batches[0])
    guarded._scale(0.25)
    shorter = guarded(batches[1])
    assert [group["lr"] for group in guarded.adapter.optimizer.param_groups] == [0.25e-2]  # type: ignore[union-attr]
    expected = adapt(digits()[0], "soft", lr=0.25e-2, episodic=True)(batches[1])
    assert torch.equal(shorter, expected)
    guarded.reset()
    assert torch.equal(guarded(batches[2]), adapt(digits()[0], "soft", lr=1e-2)(batches[2]))


class Script:
    """Stands in for an adapter's logits: what it says of each batch is told in advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, source: Trained, **config: Any) -> None:
        self.guarded = Guarded(adapt(source, "soft", lr=1e-2), GuardConfig(evidence=1, pool=1, **config))
        self.truth = adapt(source, "erm")
        self.sick = False
        judge = self.guarded._judge
        monkeypatch.setattr(self.guarded, "_judge", lambda x, logits: judge(x, self.said(x)))

    def said(self, x: Tensor) -> Tensor:
        logits = self.truth(x)
        return logits.roll(1, -1) * 5 if self.sick else logits * 1.5

    def run(self, images: Any, *sick: bool) -> None:
        for now in sick:
            self.sick = now
            self.guarded(images(6, seed=self.guarded.steps_taken))


@pytest.mark.parametrize("snapshots", [0, 2])
def test_going_back_never_lengthens_steps_that_shorten_along_the_stream(
    make_source: Any, images: Any, snapshots: int
) -> None:
    lr, horizon = 1e-2, 10.0
    config = GuardConfig(spacing=1, interval=2, rest=3, snapshots=2)
    guarded = Guarded(adapt(make_source(), "soft", lr=lr, horizon=horizon), config)
    for seed in range(6):
        guarded(images(6, seed=seed))
    guarded.snapshots = guarded.snapshots[:snapshots]
    adapter = guarded.adapter

    def length() -> float:
        return float(adapter.optimizer.param_groups[0]["lr"] / (1 + adapter.seen / horizon))

    before = length()
    guarded._go_back()
    assert length() == pytest.approx(before / 2)


def test_alarms_warn_then_roll_back_further_and_further_then_let_it_rest(
    monkeypatch: pytest.MonkeyPatch, make_source: Any, images: Any
) -> None:
    script = Script(monkeypatch, make_source(), spacing=1, interval=2, snapshots=2, patience=4, rest=3)
    guarded = script.guarded
    script.run(images, *[False] * 8)
    kept = [snapshot.step for snapshot in guarded.snapshots]
    assert len(kept) == 2
    before = guarded.adapter.steps_taken
    script.run(images, True)
    assert guarded.adapter.steps_taken == before + 1  # a warning changes nothing
    lr = guarded.adapter.optimizer.param_groups[0]["lr"]
    assert lr == 1e-2
    script.run(images, True)
    assert guarded.adapter.steps_taken == kept[1] + 1
    script.run(images, True)
    assert guarded.adapter.steps_taken == kept[0] + 1
    script.run(images, True)
    assert guarded.adapter.steps_taken == 0
    assert guarded.adapter.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
    assert guarded.watch.resting == 3
    assert [event.step for event in guarded.events] == [8, 9, 10, 11]
    assert {event.signal for event in guarded.events} == {"agreement"}
    assert "warning" in guarded.events[0].action
    assert f"rolled back to batch {kept[1] + 1}, step size x 0.5" in guarded.events[1].action
    assert "rolled back to the source, step size x 0.125, the source predicts the next 3" in guarded.report()
    script.run(images, True, True, True)
    assert (guarded.adapter.steps_taken, guarded.watch.resting) == (0, 0)
    assert guarded.watch.looked == guarded.watch.step - 1  # the rest does not thin out the next update
    assert "the source predicted 7 of 15 batches" in guarded.report()
    guarded.watch.stood_in = 8
    assert "8 of 15 batches; where it is the one that fails, the adapter may do better" in guarded.report()
    script.run(images, True)
    assert guarded.watch.resting == 6  # twice as long


def test_after_an_alarm_it_is_watched_and_then_trusted_again(
    monkeypatch: pytest.MonkeyPatch, make_source: Any, images: Any
) -> None:
    script = Script(monkeypatch, make_source(), recover=2, patience=9, calm=3)
    guarded = script.guarded
    script.run(images, True)
    assert guarded.by_source
    script.run(images, False)
    assert not guarded.by_source  # one alarm is a warning
    script.run(images, True, False)
    assert guarded.by_source  # after a rollback the source predicts while it is watched
    assert guarded.watch.scale == 0.5
    script.run(images, False)
    assert guarded.watch.strikes == 0
    script.run(images, *[False] * 12)
    assert not guarded.by_source
    assert guarded.watch.scale == 1.0
    assert guarded.adapter.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2)


def test_the_source_predicts_when_it_is_alarmed(
    monkeypatch: pytest.MonkeyPatch, make_source: Any, images: Any
) -> None:
    source = make_source()
    script = Script(monkeypatch, source)
    script.sick = True
    logits, reference = script.guarded(images(6)), Reference(adapt(source, "soft"), 0.05, 0.25, 0.2, 4.0)
    assert torch.equal(logits, reference.consensus(images(6)).logits)
    assert script.guarded.draws is None


def test_logits_or_weights_that_are_not_finite_are_rolled_back_at_once(make_source: Any, images: Any) -> None:
    for options in ({"lr": 1e200}, {"lr": 1e200, "statistics": "source"}):
        guarded = Guarded(adapt(make_source(), "soft", **options))
        for seed in range(8):
            assert guarded(images(20, seed=seed)).isfinite().all()
        assert "rolled back to the source" in guarded.events[0].action
        assert guarded.events[0].signal in ("finite", "update")
        assert all(value.isfinite().all() for value in guarded.adapter.model.parameters())


def test_an_update_out_of_proportion_is_an_alarm(make_source: Any, images: Any) -> None:
    source = make_source()
    guarded = Guarded(adapt(source, "soft", lr=1e-3))
    guarded(images(20))
    with torch.no_grad():
        for value in guarded.adapter.model.parameters():
            value.mul_(1.5)  # the argmax hardly changes
    guarded.watch.wait = 0
    guarded(images(20, seed=1))
    assert guarded.events[-1].signal == "update"
    assert guarded.events[-1].value > guarded.events[-1].threshold == 0.25


def test_small_batches_are_judged_together(monkeypatch: pytest.MonkeyPatch, make_source: Any) -> None:
    source = make_source()
    guarded = Guarded(adapt(source, "soft", statistics="stream"), GuardConfig(evidence=4))
    truth, judge = adapt(source, "erm"), guarded._judge
    monkeypatch.setattr(guarded, "_judge", lambda x, logits: judge(x, truth(x).roll(1, -1) * 5))
    generator = torch.Generator().manual_seed(0)
    for count in range(1, 4):
        guarded(torch.rand(1, 3, 8, 8, generator=generator, dtype=torch.float64))
        assert (guarded.events, guarded.watch.evidence[3]) == ([], count)
    guarded(torch.rand(1, 3, 8, 8, generator=generator, dtype=torch.float64))
    assert len(guarded.events) == 1


# --- the contract ---


def alarmed(source: Trained, images: Any) -> Guarded:
    guarded = Guarded(adapt(source, "soft", lr=0.3), GuardConfig(spacing=1, rest=1))
    for seed in range(5):
        guarded(images(20, seed=seed))
    assert guarded.events
    return guarded


def test_reset_restores_the_source_and_forgets(make_source: Any, images: Any) -> None:
    source = make_source()
    guarded, fresh = (
        alarmed(source, images),
        Guarded(adapt(source, "soft", lr=0.3), GuardConfig(spacing=1, rest=1)),
    )
    guarded.reset()
    assert (guarded.events, guarded.snapshots, guarded.steps_taken) == ([], [], 0)
    for seed in range(4):
        assert torch.equal(guarded(images(20, seed=seed)), fresh(images(20, seed=seed)))


def test_a_saved_guard_goes_on_bit_for_bit(make_source: Any, images: Any) -> None:
    source = make_source()
    guarded, file = alarmed(source, images), io.BytesIO()
    torch.save(guarded.state_dict(), file)
    file.seek(0)
    other = Guarded(adapt(source, "soft", lr=0.3), guarded.config)
    other.load_state_dict(torch.load(file, weights_only=True))
    twin = copy.deepcopy(guarded)
    for seed in range(5, 12):
        logits = guarded(images(20, seed=seed))
        assert torch.equal(other(images(20, seed=seed)), logits)
        assert torch.equal(twin(images(20, seed=seed)), logits)
    assert other.events == guarded.events == twin.events


def test_a_refused_batch_leaves_no_trace(make_source: Any, images: Any) -> None:
    guarded = alarmed(make_source(), images)
    for resting in (0, 2):
        guarded.watch.resting = resting
        before = copy.deepcopy(guarded.watch)
        with pytest.raises(AdapterError, match="not finite"):
            guarded(images(6) / 0)
        with torch.inference_mode(), pytest.raises(AdapterError, match="inference_mode"):
            guarded(images(6))
        assert guarded.watch == before


@pytest.mark.parametrize("inplace", [False, True])
def test_the_reference_is_the_source_and_shares_its_weights(
    make_source: Any, images: Any, inplace: bool
) -> None:
    expected = make_source().model(images(6))
    source = make_source()
    guarded = Guarded(adapt(source, "soft", lr=1e-2, inplace=inplace))
    for seed in range(3):
        guarded(images(6, seed=seed))
    torch.testing.assert_close(guarded.reference.on_source(images(6)).logits, expected)
    initial = guarded.adapter.initial_state
    for name, value in guarded.reference.model.named_parameters():
        assert value.data_ptr() == initial[f"model.{name}"].data_ptr()


@pytest.mark.parametrize("method", ["tent", "soft", "vnl"])
def test_a_snapshot_restores_every_bit_and_holds_only_what_changed(
    make_source: Any, images: Any, method: str
) -> None:
    adapter: Adapter = adapt(make_source(), method, lr=1e-2)
    adapter(images(6))
    snapshot, whole = take(adapter, 0, 1.0), copy.deepcopy(adapter.state_dict())
    held = {name for name, value in snapshot.changed.items() if isinstance(value, Tensor)}
    if method == "tent":
        assert not any("head" in name for name in held)
    still = {name for name, value in adapter.named_parameters() if not value.requires_grad}
    assert not held & still
    expected = adapter(images(6, seed=1))
    adapter(images(6, seed=2))
    restore(adapter, snapshot)
    for name, value in adapter.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, whole[name]), name
    assert torch.equal(adapter(images(6, seed=1)), expected)


def test_scaling_the_step_of_a_method_without_one_does_nothing(make_source: Any) -> None:
    scale_step(adapt(make_source(), "bn"), 0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"evidence": 0},
        {"pool": 0},
        {"share": 7.0},
        {"snapshots": -1},
        {"interval": 1},
        {"varied": Limits(0.95, 0.9, 0.2)},
        {"smallest_step": 0.0},
    ],
)
def test_a_guard_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        GuardConfig(**wrong)
    assert "\n" not in str(caught.value)


# --- its arithmetic ---


def test_comparisons_by_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    p, r = (torch.randn(7, 4, generator=generator).mul(2).softmax(-1) for _ in range(2))
    agreed = weight = excess = 0.0
    for a, b in zip(p.tolist(), r.tolist(), strict=True):
        w = max(b) ** 3
        weight += w
        agreed += w * (a.index(max(a)) == b.index(max(b)))
        excess += sum(y * math.log(y) for y in b) - sum(x * math.log(x) for x in a)
    found = compared(p, r, 3)
    assert found.agreed == pytest.approx(agreed, rel=1e-5)
    assert found.weight == pytest.approx(weight, rel=1e-5)
    assert found.excess == pytest.approx(excess / math.log(4), rel=1e-4, abs=1e-5)
    both = together([found, compared(r, r, 3)])
    assert both.agreement == pytest.approx((found.agreed + found.weight) / (2 * found.weight))
    assert (both.images, together([found])) == (14, found)
    assert both.excess_entropy == pytest.approx(found.excess / 14, abs=1e-6)


def test_entropy_information_and_share_at_their_ends() -> None:
    even, sure, alike = torch.full((8, 4), 0.25), torch.eye(4).repeat(2, 1), torch.eye(4)[:1].repeat(8, 1)
    assert [float(mean_entropy(p)) for p in (even, sure)] == pytest.approx([1.0, 0.0])
    assert [float(information(p)) for p in (even, sure, alike)] == pytest.approx([0.0, 1.0, 0.0], abs=1e-6)
    assert float(information(torch.eye(1000)[:20])) == pytest.approx(1.0)
    assert [float(top_share(p)) for p in (sure, alike)] == [0.25, 1.0]


def test_the_shift_of_moments_counts_deviations() -> None:
    source = Moments(torch.zeros(3), torch.full((3,), 4.0))
    assert float(moment_shift(source, source)) == 0
    assert float(moment_shift(source, Moments(torch.full((3,), -2.0), source.variance))) == pytest.approx(
        1.0, rel=1e-3
    )
    stretched = Moments(source.mean, source.variance * math.e**2)
    assert float(moment_shift(source, stretched)) == pytest.approx(1.0, rel=1e-3)


def test_what_calls_for_a_look() -> None:
    config = GuardConfig()
    calm = Signs(entropy=0.4, diversity=0.9, share=0.2, images=20, classes=10)

    def due(signs: Signs, **facts: Any) -> bool:
        told = {"wait": 5, "entropy": 0.4, "diversity": 0.9, **facts}
        return Watch(interval=4, rest=8, **told).due(signs, config)

    assert not due(calm)
    assert due(calm, wait=0)
    assert due(calm._replace(entropy=0.51))
    assert due(calm._replace(diversity=0.79))
    assert not due(calm._replace(entropy=0.1, diversity=1.0))
    assert due(calm._replace(share=0.57))
    assert not due(calm._replace(share=0.56))
    assert due(calm._replace(share=0.51, images=60))
    assert not due(calm._replace(share=0.49, images=60))
    assert not due(calm._replace(share=1.0, images=7))
    assert not due(calm._replace(share=0.74, classes=2))
    assert not due(calm._replace(share=1.0), one_sided=48)  # one goes unlooked at
    assert due(calm._replace(share=1.0), one_sided=48, passed_over=1)


def found_in(
    agreement: float = 1.0,
    excess: float = 0.0,
    images: int = 16,
    votes: Sequence[float] = (0.25,) * 4,
    lost: bool = False,
) -> Comparison:
    """Return a comparison of images whose votes, of both, are shared out like this."""
    counts = tuple(images * share for share in votes)
    mass = (float(images), 0.0, 0.0, 0.0) if lost else counts
    return Comparison(agreement, 1.0, images * excess, images, mass, counts, counts, counts)


def test_each_limit_is_the_one_that_alarms() -> None:
    config, one_sided = GuardConfig(), (1.0, 0.0, 0.0, 0.0)
    assert illness(found_in(0.91, votes=one_sided), config) is None
    assert illness(found_in(0.89, votes=one_sided), config)[:3] == ("agreement", 0.89, 0.9)
    assert illness(found_in(0.41), config) is None
    assert illness(found_in(0.39), config)[:3] == ("agreement", 0.39, 0.4)
    assert illness(found_in(excess=0.16, votes=one_sided), config).signal == "excess_entropy"
    assert illness(found_in(excess=0.24), config) is None
    assert illness(found_in(excess=0.26), config).signal == "excess_entropy"
    assert illness(found_in(excess=0.18, images=60), config).signal == "excess_entropy"
    assert illness(found_in(excess=0.26), config, own_scale=True) is None
    assert illness(found_in(lost=True), config).signal == "lost_diversity"
    assert illness(found_in(0.0, images=15), config) is None  # too little evidence


def test_lost_diversity_and_share_by_hand() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]])
    r = torch.tensor([[0.1, 0.8, 0.1], [0.5, 0.2, 0.3]])
    found = compared(p, r, 1)
    entropies = [
        -sum(m * math.log(m) for m in mean) / math.log(3) for mean in ([0.3, 0.5, 0.2], [0.65, 0.25, 0.1])
    ]
    assert found.lost_diversity == pytest.approx(entropies[0] - entropies[1], rel=1e-5)
    assert (found.votes, found.reference_votes, found.share) == ((2, 0, 0), (1, 1, 0), 1.0)
    assert together([found, compared(r, r, 1)]).share == 0.75
