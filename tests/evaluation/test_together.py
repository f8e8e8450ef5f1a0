"""Methods that share a pass predict as each does alone, and the pass is run once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.methods import METHODS, adapt
from vicinal.adapters.statistics import KINDS
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment
from vicinal.data.streams import Stream
from vicinal.errors import ConfigError, VicinalError
from vicinal.evaluation.online import run_online
from vicinal.evaluation.together import Passes, pass_of
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.models.inference import StreamInferenceNet

STILL = sorted(name for name in METHODS if METHODS[name].build.still)


@pytest.fixture(scope="module")
def source() -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        preprocessing = Preprocessing(8, 1, (0.5,), (0.25,))
        model = build_classifier("small", 3, preprocessing=preprocessing).eval()
        nets = {"anchor_phi": StreamInferenceNet(), "predict_phi": StreamInferenceNet()}
    return Trained(model, "small", ("a", "b", "c"), preprocessing, "erm", **nets)  # type: ignore[arg-type]


@pytest.fixture
def stream() -> Stream:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (23, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return Stream("online", images, torch.randperm(23, generator=generator)[:16], 5)  # and a batch of one


@pytest.fixture
def count(source: Trained, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the passes of the model and of its copies."""
    passes, own = [0], type(source.model).features_and_logits

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        passes[0] += 1
        return own(self, *args, **named)

    monkeypatch.setattr(type(source.model), "features_and_logits", counted)
    return passes


def test_these_methods_leave_their_model_as_it_is() -> None:
    assert STILL == ["bn", "erm", "labels", "lame", "t3a", "tast"]


@pytest.mark.parametrize("statistics", KINDS)
def test_they_predict_as_each_does_alone(
    source: Trained, stream: Stream, count: list[int], statistics: str
) -> None:
    def made(method: str) -> Any:
        return adapt(source, method, statistics=statistics)

    alone = [run_online(made(method), stream).probabilities for method in STILL]
    assert count[0] == len(STILL) * len(stream)
    count[0] = 0
    passes = Passes([pass_of(made(method)) for method in STILL], stream)
    for method, expected in zip(STILL, alone, strict=True):
        assert torch.equal(passes.run(made(method)).probabilities, expected), method
    assert count[0] == len(stream) * (len(STILL) if statistics == "balanced" else 1)


def test_only_what_is_equal_is_shared(source: Trained, stream: Stream, count: list[int]) -> None:
    told: list[tuple[str, dict[str, Any]]] = [
        ("erm", {}),
        ("lame", {}),
        ("lame", {"statistics": "batch"}),
        ("bn", {"statistics": "stream"}),
        ("t3a", {"episodic": True}),
        ("tast", {"augment": Augment()}),
        ("soft", {"statistics": "source"}),
        ("t3a", {"precision": "bfloat16"}),
    ]
    every = [adapt(source, method, **options) for method, options in told]
    keys = [pass_of(adapter) for adapter in every]
    assert keys[0] == keys[1] is not None
    assert len({keys[0], keys[2], keys[3], keys[7]}) == 4
    assert keys[4:7] == [None] * 3
    alone = [run_online(adapt(source, method, **options), stream) for method, options in told]
    ran, count[0] = count[0], 0
    passes = Passes(keys, stream)
    for adapter, expected in zip(every, alone, strict=True):
        assert torch.equal(passes.run(adapter).probabilities, expected.probabilities)
        assert adapter.told is None
    assert count[0] == ran - len(stream)


def test_what_one_was_told_does_not_stay(source: Trained, stream: Stream) -> None:
    """A batch that is refused is none: the next one is another."""
    told = [(torch.zeros(5, 4), torch.zeros(5, 3))] * len(stream)
    adapter = adapt(source, "lame")
    wide = Stream("online", torch.zeros(5, 3, 8, 8, dtype=torch.uint8), torch.arange(5), 5)
    with pytest.raises(VicinalError):
        run_online(adapter, wide, told=told)
    assert adapter.told is None


def test_a_method_that_updates_cannot_be_told(source: Trained, stream: Stream) -> None:
    told = [(torch.zeros(5, 4), torch.zeros(5, 3))] * len(stream)
    with pytest.raises(ConfigError, match="stays as it is"):
        run_online(adapt(source, "soft"), stream, told=told)


def test_the_time_of_the_pass_counts_for_each(
    source: Trained, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch takes a second, whatever is done."""
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    every = [adapt(source, method) for method in ("erm", "lame", "soft")]
    passes = Passes([pass_of(adapter) for adapter in every], stream)
    seconds = [passes.run(adapter).seconds for adapter in every]
    assert seconds == [len(stream), 2 * len(stream), len(stream)]


def test_a_temperature_is_each_methods_own(source: Trained, stream: Stream, count: list[int]) -> None:
    rule = {"lr": 1e-4, "output_temperature": 5.0}
    warm = replace(source, choice={"methods": {"bn": {"source": rule}}})
    made = [
        adapt(warm, "erm"),
        adapt(warm, "bn", statistics="source", output_temperature=1.0),
        adapt(warm, "bn", statistics="source"),
        adapt(warm, "erm", output_temperature=2.0),
    ]
    expected = [run_online(adapter, stream).probabilities for adapter in made]
    for adapter in made:
        adapter.reset()
    passes = Passes([pass_of(adapter) for adapter in made], stream)
    count[0] = 0
    for adapter, alone in zip(made, expected, strict=True):
        torch.testing.assert_close(passes.run(adapter).probabilities, alone)
    assert count[0] == len(list(stream.batches("cpu")))
