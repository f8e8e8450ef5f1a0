import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from vicinal.adapters.methods import METHODS, adapt
from vicinal.adapters.vnl import Vnl
from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.checkpoint import Trained
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.streams import label_shift_order
from vicinal.errors import ConfigError, VicinalError
from vicinal.models.backbones import build_classifier
from vicinal.training import train as training
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.fit_phi import fit_phi
from vicinal.training.left_out import Fold, LeftOutStream, folds, left_out_streams, play, play_all
from vicinal.training.train import ModelSpec, Run, all_left_out_streams, left_out_fold, train

MakeSources = Callable[..., list[SourceDomain]]
MakeRun = Callable[..., Run]
TensorsOf = Callable[[Trained], dict[str, Tensor]]
SameTensors = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]
CONFIG = OutOfFoldConfig(batch_size=5, stream_images=None, marginals=())


@pytest.fixture(scope="module")
def untrained(spec: ModelSpec) -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_classifier(spec.backbone, len(spec.classes), preprocessing=spec.preprocessing)
    return Trained(model.eval(), spec.backbone, spec.classes, spec.preprocessing, "erm")


@pytest.mark.parametrize("count", range(2, 8))
@pytest.mark.parametrize("leave_out", [0, 1, 2, 3])
def test_every_domain_is_left_out_once_and_no_model_more_than_it_takes(count: int, leave_out: int) -> None:
    size = leave_out or (2 if count >= 4 else 1)
    if size >= count:
        with pytest.raises(ConfigError, match=f"cannot leave out {size} of {count}"):
            folds(count, leave_out)
        return
    made = folds(count, leave_out)
    assert len(made) == math.ceil(count / size)
    assert all(len(set(fold)) == size for fold in made)
    often = Counter(position for fold in made for position in fold)
    assert set(often) == set(range(count))
    assert max(often.values()) <= 2
    assert often[count - 1] == 1


def test_auto_leaves_out_one_of_three_and_two_of_four() -> None:
    assert folds(3, 0) == [(0,), (1,), (2,)]
    assert folds(4, 0) == [(0, 1), (2, 3)]
    assert folds(5, 0) == [(0, 1), (2, 3), (0, 4)]


def test_the_refusal_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        folds(2, 2)
    assert "\n" not in str(caught.value)


def streams_of(
    untrained: Trained, sources: Sequence[SourceDomain], config: OutOfFoldConfig, seed: int = 0
) -> list[LeftOutStream]:
    return left_out_streams([Fold(untrained, tuple(sources))], config, seed)


def all_images(source: SourceDomain) -> Tensor:
    return torch.cat([source.train.images, source.val.images])


def in_order(stream: LeftOutStream) -> Tensor:
    return stream.stream.images[stream.stream.order]


def test_streams_come_natural_then_drawn_then_hardened(untrained: Trained, make_sources: MakeSources) -> None:
    config = replace(CONFIG, marginals=(1.0, 0.5), hardenings=("inversion", "edges"))
    names = [stream.name for stream in streams_of(untrained, make_sources(2), config)]
    one = ["", " Dirichlet 1", " Dirichlet 0.5", " inversion", " edges"]
    assert names == [f"d{index}{kind}" for index in range(2) for kind in one]


def test_a_natural_stream_is_every_image_once_with_its_own_label(
    untrained: Trained, make_sources: MakeSources
) -> None:
    (source,) = make_sources(1, train=24, val=6)
    (stream,) = streams_of(untrained, [source], CONFIG)
    images, labels = all_images(source), torch.cat([source.train.labels, source.val.labels])
    assert sorted(stream.stream.order.tolist()) == list(range(30))
    assert stream.stream.order.tolist() != list(range(30))
    for image, label in zip(in_order(stream), stream.labels, strict=True):
        (position,) = (images == image).flatten(1).all(1).nonzero().flatten().tolist()
        assert labels[position] == label


@pytest.mark.parametrize(("limit", "expected"), [(None, 30), (1000, 30), (17, 15), (5, 5), (29, 25)])
def test_streams_hold_whole_batches_only(
    limit: int | None, expected: int, untrained: Trained, make_sources: MakeSources
) -> None:
    config = replace(CONFIG, stream_images=limit, hardenings=("blurred",))
    for stream in streams_of(untrained, make_sources(2, train=24, val=8), config):
        assert len(stream.labels) == len(stream.stream.order) == expected
        assert [len(batch) for batch in stream.stream.batches("cpu")] == [5] * (expected // 5)


def test_fewer_images_than_a_batch_make_a_smaller_batch(
    untrained: Trained, make_sources: MakeSources
) -> None:
    config = replace(CONFIG, stream_images=3)
    found = streams_of(untrained, make_sources(2, train=24, val=8), config)
    assert [[len(batch) for batch in stream.stream.batches("cpu")] for stream in found] == [[3], [3]]


def test_streams_shorter_than_a_batch_bound_its_size(untrained: Trained, make_sources: MakeSources) -> None:
    config = replace(CONFIG, stream_images=7, batch_size=20)
    found = streams_of(untrained, make_sources(2, train=24, val=8), config)
    assert [[len(batch) for batch in stream.stream.batches("cpu")] for stream in found] == [[7], [7]]


def test_a_drawn_stream_shorter_than_a_batch_is_left_out(
    untrained: Trained, make_sources: MakeSources
) -> None:
    config = replace(CONFIG, batch_size=32, marginals=(0.1,))
    sources = make_sources(2, train=24, val=8)
    assert len(label_shift_order(torch.arange(32) % 2, 0.1, 0)) < 32, "nothing to leave out"
    assert [stream.name for stream in streams_of(untrained, sources, config)] == ["d0", "d1"]


def test_a_domain_smaller_than_a_batch_is_refused_or_left_aside(
    untrained: Trained, make_sources: MakeSources
) -> None:
    config = replace(CONFIG, batch_size=12, epochs=1)
    sources = [*make_sources(1, train=24), *make_sources(1, train=5, val=2)]
    still = VnlSettings(update="none", predict="own")
    with suppress(VicinalError):
        streams = streams_of(untrained, sources, config)
        lessons = [played.lesson for played in play_all(lambda trained: Vnl(trained, still), streams)]
        assert fit_phi(lessons, config, 0)


def test_a_drawn_stream_has_another_marginal_and_no_image_twice(
    untrained: Trained, make_sources: MakeSources
) -> None:
    config = replace(CONFIG, marginals=(0.3,))
    natural, drawn = streams_of(untrained, make_sources(1, train=100, val=20), config)
    assert len(set(drawn.stream.order.tolist())) == len(drawn.labels)
    assert len(drawn.labels) % 5 == 0
    assert abs(float(natural.labels.float().mean()) - 0.5) < 0.01
    assert abs(float(drawn.labels.float().mean()) - 0.5) > 0.1
    assert torch.equal(drawn.labels, torch.arange(120)[drawn.stream.order] % 2)


def test_a_hardened_stream_is_the_natural_one_transformed(
    untrained: Trained, make_sources: MakeSources
) -> None:
    config = replace(CONFIG, hardenings=("inversion",))
    natural, hardened = streams_of(untrained, make_sources(1, train=300), config)
    assert torch.equal(in_order(hardened), 255 - in_order(natural))
    assert torch.equal(hardened.labels, natural.labels)


def test_a_seed_fixes_the_streams(untrained: Trained, make_sources: MakeSources) -> None:
    config, sources = replace(CONFIG, marginals=(1.0,)), make_sources(2)

    def orders(seed: int) -> list[list[int]]:
        return [stream.stream.order.tolist() for stream in streams_of(untrained, sources, config, seed)]

    assert orders(3) == orders(3)
    assert orders(3) != orders(40)
    assert orders(3)[0] != orders(3)[2]  # the second domain arrives in an order of its own


def test_play_records_what_a_still_adapter_saw(untrained: Trained, make_sources: MakeSources) -> None:
    (stream,) = streams_of(untrained, make_sources(1), replace(CONFIG, batch_size=8))
    adapter = adapt(untrained, "erm")
    played = play(adapter, stream)
    lesson, model = played.lesson, untrained.model
    x = in_order(stream).float() / 255
    with torch.no_grad():
        z, logits = model.features_and_logits(x)
    torch.testing.assert_close(lesson.z.flatten(0, 1), z, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lesson.logits.flatten(0, 1), logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(played.probabilities, logits.softmax(-1), rtol=1e-5, atol=1e-6)
    assert lesson.z.shape[:2] == lesson.y.shape == (4, 8)
    assert torch.equal(lesson.y.flatten(), stream.labels)
    assert torch.equal(lesson.head.weight, model.head.weight.detach().expand(4, -1, -1))
    assert torch.equal(lesson.head.bias, model.head.bias.detach().expand(4, -1))


def test_play_records_the_head_as_it_was_at_every_step(untrained: Trained, make_sources: MakeSources) -> None:
    (stream,) = streams_of(untrained, make_sources(1), replace(CONFIG, batch_size=8))
    before = {name: value.clone() for name, value in untrained.model.state_dict().items()}
    played = play(adapt(untrained, "soft", lr=0.05, statistics="stream"), stream)
    again = adapt(untrained, "soft", lr=0.05, statistics="stream")
    outputs, heads = [], []
    for x in stream.stream.batches("cpu"):
        outputs.append(again(x).softmax(-1))
        heads.append(again.model.head.weight.detach().clone())
    assert torch.equal(played.probabilities, torch.cat(outputs))
    assert torch.equal(played.lesson.head.weight, torch.stack(heads))
    assert not torch.equal(heads[0], heads[-1])
    lesson = played.lesson
    said = torch.einsum("tnd,tcd->tnc", lesson.z, lesson.head.weight) + lesson.head.bias.unsqueeze(1)
    torch.testing.assert_close(said, lesson.logits, rtol=1e-4, atol=1e-5)
    assert not lesson.z.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in untrained.model.state_dict().items())


def test_every_stream_is_played_by_an_adapter_of_its_own(
    untrained: Trained, make_sources: MakeSources
) -> None:
    streams = streams_of(untrained, make_sources(2), replace(CONFIG, batch_size=8))

    def build(trained: Trained) -> Any:
        return METHODS["soft"].build(trained, replace(METHODS["soft"].defaults, lr=0.05))

    together = play_all(build, streams)
    alone = play(build(untrained), streams[1])
    assert torch.equal(together[1].probabilities, alone.probabilities)


TRAINING = TrainConfig(algorithm="erm", iterations=4, batch_size=6)
CHOOSING = OutOfFoldConfig(batch_size=8, epochs=2, step_sizes=(1e-3,), updates=("none",), baselines=())


def test_a_left_out_model_is_never_given_what_it_goes_without(
    spec: ModelSpec, make_sources: MakeSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, given, kept = make_sources(4), [], []
    original, original_streams = training.train_model, training.left_out_streams

    def spy(spec: ModelSpec, sources: Sequence[SourceDomain], *rest: Any) -> Trained:
        given.append(list(sources))
        return original(spec, sources, *rest)

    def spy_streams(every: Sequence[Fold], *rest: Any) -> list[LeftOutStream]:
        kept.extend(every)
        return original_streams(every, *rest)

    monkeypatch.setattr(training, "train_model", spy)
    monkeypatch.setattr(training, "left_out_streams", spy_streams)
    train(spec, sources, TRAINING, CHOOSING)
    assert [source.name for source in given[0]] == ["d0", "d1", "d2", "d3"]
    assert len(given) == 1 + len(kept) == 3
    for seen, fold in zip(given[1:], kept, strict=True):
        assert {source.name for source in [*seen, *fold.left_out]} == {"d0", "d1", "d2", "d3"}
        assert len(seen) == len(fold.left_out) == 2
        held = {image.numpy().tobytes() for source in seen for image in all_images(source)}
        left = {image.numpy().tobytes() for source in fold.left_out for image in all_images(source)}
        assert not held & left
        assert fold.trained.provenance["sources"] == [source.name for source in seen]


def test_a_left_out_model_does_not_depend_on_what_it_goes_without(
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
) -> None:
    sources = make_sources(3)
    garbage = LabelledImages(255 - sources[1].train.images, 1 - sources[1].train.labels)
    poisoned = [sources[0], replace(sources[1], train=garbage, val=garbage), sources[2]]
    one, other = (
        left_out_fold(spec, given, (1,), TRAINING, make_run()).trained for given in (sources, poisoned)
    )
    assert same_tensors(tensors_of(one), tensors_of(other))
    whole = left_out_fold(spec, poisoned, (0,), TRAINING, make_run()).trained
    assert not same_tensors(tensors_of(one), tensors_of(whole))


def test_a_left_out_model_of_other_settings_is_not_taken(
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
    tmp_path: Path,
) -> None:
    # An old run's folder, a new run with other settings stopped early in it, then --resume.
    sources, longer = make_sources(3), replace(TRAINING, iterations=9)
    left_out_fold(spec, sources, (1,), TRAINING, make_run(tmp_path))
    fresh = left_out_fold(spec, sources, (1,), longer, make_run()).trained
    try:
        resumed = left_out_fold(spec, sources, (1,), longer, make_run(tmp_path, resume=True)).trained
    except VicinalError:
        return
    assert same_tensors(tensors_of(resumed), tensors_of(fresh))


def test_targets_share_the_models_that_saw_neither(
    spec: ModelSpec,
    make_sources: MakeSources,
    make_run: MakeRun,
    tensors_of: TensorsOf,
    same_tensors: SameTensors,
    tmp_path: Path,
) -> None:
    """Four domains, each the target once: six models of two domains do for all twelve folds."""
    every = make_sources(4)
    shared = tmp_path / "shared"
    config = OutOfFoldConfig(leave_out=1, stream_images=8, batch_size=4, marginals=())
    for target in range(4):
        sources = [source for position, source in enumerate(every) if position != target]
        run = replace(make_run(), left_out=shared)
        streams = all_left_out_streams(spec, sources, TRAINING, config, run, {"dataset": "d"})
        assert [stream.name for stream in streams] == [source.name for source in sources]
        for stream in streams:
            assert stream.name not in stream.trained.provenance["sources"]
            assert every[target].name not in stream.trained.provenance["sources"]
    models = [path for path in shared.iterdir() if path.is_dir()]
    assert len(models) == 6
    alone = left_out_fold(spec, every[:3], (1,), TRAINING, make_run()).trained
    taken = left_out_fold(spec, [every[0], every[3], every[2]], (1,), TRAINING, run, {"dataset": "d"}).trained
    assert same_tensors(tensors_of(alone), tensors_of(taken)), "kept apart or shared, it is the same model"


def test_models_of_other_data_are_not_shared(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, tmp_path: Path
) -> None:
    run, sources = replace(make_run(), left_out=tmp_path), make_sources(3)
    for facts in ({"data_seed": 0}, {"data_seed": 1}, {"data_seed": 0, "data_options": {"train": "5"}}):
        left_out_fold(spec, sources, (1,), TRAINING, run, facts)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3


def test_a_model_that_another_process_trains_is_not_trained_twice(
    spec: ModelSpec, make_sources: MakeSources, make_run: MakeRun, tmp_path: Path
) -> None:
    run, sources = replace(make_run(), left_out=tmp_path), make_sources(3)
    left_out_fold(spec, sources, (1,), TRAINING, run)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    with FileLock(tmp_path / f".{folder.name}.lock"), pytest.raises(Timeout):
        left_out_fold(spec, sources, (1,), TRAINING, run, wait=False)
