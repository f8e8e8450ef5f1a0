"""What is timed is the real thing: it learns, it adapts, and its arithmetic is that of its passes."""

from dataclasses import replace

import pytest
import torch

from vicinal.adapters.contract import Adapter
from vicinal.benchmarks.bench.cases import (
    adapter_step,
    episode_batches,
    extrapolated,
    learner_of,
    loop_marks,
    random_sources,
    stream_seconds,
    stream_time,
    training_step,
)
from vicinal.benchmarks.bench.floor import counting
from vicinal.benchmarks.bench.lineup import growing_shapes
from vicinal.benchmarks.bench.records import PARTS, SECTIONS
from vicinal.benchmarks.bench.scale import FULL, QUICK, SMALL, Shape, scale_for
from vicinal.data.streams import Stream
from vicinal.evaluation.online import OnBatch, Outcome, run_online
from vicinal.training.learner import ALGORITHMS

CPU = torch.device("cpu")
SHAPE = Shape("small", 8, 6, 4, classes=3)


def flops(algorithm: str, **options: bool) -> int:
    large = replace(SHAPE, size=32, batch=20)  # so that the net outweighs phi
    work = training_step(algorithm, large, CPU, **options)
    with counting() as count:
        work()
    return count.flops


def test_arithmetic_is_that_of_the_passes() -> None:
    # A backward pass is two forward ones. ERM: both batches there and back. First order: one batch there and
    # back, the other twice. Second order: twice more.
    erm = flops("erm")
    assert flops("meta") / erm == pytest.approx(1.5, rel=0.05)
    assert flops("meta", second_order=True) / erm == pytest.approx(2.5, rel=0.05)


def test_a_step_trains_the_model_it_was_made_with() -> None:
    work = training_step("meta", SHAPE, CPU)
    (learner, _) = work.args  # type: ignore[attr-defined]
    before = [value.clone() for value in learner.model.parameters()]
    work()
    changed = [not torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True)]
    assert all(changed)


def test_batches_are_those_of_training() -> None:
    source, target = episode_batches(ALGORITHMS["meta"][0], SHAPE, CPU)
    assert source.x.shape == target.x.shape == (6, 3, 8, 8)
    assert source.x.dtype == torch.float32
    assert 0 <= source.x.min() < source.x.max() <= 1
    (both,) = episode_batches(ALGORITHMS["erm"][0], SHAPE, CPU)
    assert both.x.shape == (12, 3, 8, 8)


def test_the_paper_s_training_is_what_is_timed() -> None:
    (stage,) = ALGORITHMS["meta"]
    config = learner_of(stage, SHAPE, CPU).config
    assert (config.backbone_lr, config.batch_size, config.second_order) == (5e-5, 6, False)
    assert config.augment is not None


def test_an_adapter_adapts_at_every_call() -> None:
    work = adapter_step("vnl", SHAPE, CPU, update="anchored")
    adapter: Adapter = work.func  # type: ignore[attr-defined]
    before = [value.clone() for value in adapter.model.parameters()]
    logits = work()
    assert logits.shape == (4, 3)  # type: ignore[attr-defined]
    assert adapter.steps_taken == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, adapter.model.parameters(), strict=True))


def test_the_loop_speaks_every_ten_iterations() -> None:
    marks = loop_marks(QUICK, SHAPE, CPU, 20)
    assert [done for done, _ in marks] == [10, 20]
    assert 0 < marks[0][1] < marks[1][1]


def test_a_long_run_is_its_start_and_then_a_steady_rate() -> None:
    assert extrapolated([(10, 5.0), (20, 6.0), (110, 15.0)], 1010) == pytest.approx(5.0 + 1000 * 0.1)
    assert extrapolated([(10, 5.0)], 100) == pytest.approx(50.0)


def test_a_stream_is_run_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(adapter: Adapter, stream: Stream, on_batch: OnBatch) -> Outcome:
        seen.append([len(x) for x in stream.batches(CPU)])
        return run_online(adapter, stream, on_batch)

    monkeypatch.setattr("vicinal.benchmarks.bench.cases.run_online", watched)
    taken = stream_seconds("vnl", replace(QUICK, shape=SHAPE, streams=(9, 4)), CPU)
    assert taken.total > taken.set_up > 0
    assert seen == [[4, 4, 1], [4]]


def test_set_up_is_the_adapter_and_what_first_batches_take_longer() -> None:
    # Made in 2 s; batches of 5, 4, 1, 1 and 1.5 s, the first two no replays; a second until the end.
    assert stream_time([10.0, 12.0, 17.0, 21.0, 22.0, 23.0, 24.5, 25.5]) == pytest.approx(
        (15.5, 2 + 5 + 4 - 2)
    )
    assert stream_time([0.0, 2.0, 7.0, 8.0]) == pytest.approx((8.0, 2.0))  # no later batch to compare with
    assert stream_time([0.0, 2.0, 3.0, 4.0, 6.0, 6.0]) == pytest.approx(
        (6.0, 2.0)
    )  # first ones are not slower


def test_domains_are_as_many_and_as_large_as_asked() -> None:
    sources = random_sources(replace(SHAPE, domains=5), 12, 4, CPU)
    assert [(len(source.train), len(source.val)) for source in sources] == [(12, 4)] * 5
    assert all(int(source.train.labels.max()) == SHAPE.classes - 1 for source in sources)


def test_sizes_of_the_goals_are_for_a_gpu() -> None:
    assert scale_for("cuda", False) is FULL
    assert scale_for("cpu", False) is SMALL
    assert scale_for("cuda", True) is scale_for("cpu", True) is QUICK
    assert (FULL.judged, SMALL.judged, QUICK.judged) == (True, False, False)
    assert FULL.shape == Shape("resnet18", 224, 70, 20, classes=7, domains=3)
    assert sum(FULL.streams) == 9991  # PACS


def test_a_small_run_takes_rounds_that_a_clock_can_measure() -> None:
    assert SMALL.rounds >= 5
    assert SMALL.round_seconds >= 0.1
    assert QUICK.round_seconds == 0.0  # that one is to see that it runs


def test_a_scale_says_what_it_does_not_measure() -> None:
    assert FULL.measures("deeper")
    assert not SMALL.measures("deeper")
    assert all(SMALL.measures(name) for name in (*PARTS, *SECTIONS) if name != "deeper")


@pytest.mark.parametrize("scale", [FULL, SMALL, QUICK], ids=lambda scale: scale.name)
def test_every_axis_changes_what_it_names_alone(scale: object) -> None:
    assert scale.growth.keys() == {"classes", "size", "batch", "domains", "backbone"}  # type: ignore[attr-defined]
    for axis, values in scale.growth.items():  # type: ignore[attr-defined]
        shapes = growing_shapes(scale, axis)  # type: ignore[arg-type]
        assert [getattr(shape, axis) for shape in shapes.values()] == list(values)
        same = {"batch": "stream_batch"}.get(axis, axis)
        for shape in shapes.values():
            undone = replace(
                shape,
                **{name: getattr(scale.shape, name) for name in (axis, same)},  # type: ignore[attr-defined]
            )
            assert undone == scale.shape  # type: ignore[attr-defined]


def test_test_time_batches_grow_with_those_of_training() -> None:
    assert [FULL.shape.along("batch", value).stream_batch for value in (35, 70, 140)] == [10, 20, 40]
