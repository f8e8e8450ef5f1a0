"""One adapter over one stream, compared with the same adapter run by hand."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import vicinal.adapters  # noqa: F401  fills the registry
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import adapt
from vicinal.checkpoint import Trained
from vicinal.data.streams import Stream
from vicinal.errors import DataError
from vicinal.evaluation.online import Outcome, Setup, evaluate_online, run_online, score
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.versions import made_by, versions

CLASSES = 3
SETUP = Setup("made", "there", "small", "erm", "soft", 5, {"note": "kept"})


@pytest.fixture(scope="module")
def source() -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        preprocessing = Preprocessing(8, 1, (0.5,), (0.25,))
        model = build_classifier("small", CLASSES, preprocessing=preprocessing)
    return Trained(model.eval(), "small", ("a", "b", "c"), preprocessing, "erm")


@pytest.fixture
def stream() -> Stream:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (23, 1, 8, 8), generator=generator, dtype=torch.uint8)
    return Stream("online", images, torch.randperm(23, generator=generator)[:17], 5)


@pytest.fixture
def labels() -> Tensor:
    return torch.randint(0, CLASSES, (23,), generator=torch.Generator().manual_seed(2))


def by_hand(adapter: Adapter, stream: Stream) -> Tensor:
    x = stream.images[stream.order].float() / 255
    return torch.cat([adapter(part).softmax(-1) for part in x.split(stream.batch_size)])


def soft(source: Trained, lr: float = 1e-2) -> Adapter:
    return adapt(source, "soft", lr=lr)


def test_a_stream_yields_inputs_only(stream: Stream) -> None:
    batches = list(stream.batches("cpu"))
    assert [tuple(x.shape) for x in batches] == [(5, 1, 8, 8)] * 3 + [(2, 1, 8, 8)]
    assert all(isinstance(x, Tensor) and x.dtype == torch.float32 for x in batches)
    assert {item.name for item in fields(stream)} == {"kind", "images", "order", "batch_size"}


def test_the_predictions_are_those_of_an_adapter_run_by_hand(source: Trained, stream: Stream) -> None:
    outcome = run_online(soft(source), stream)
    assert torch.equal(outcome.probabilities, by_hand(soft(source), stream))
    assert outcome.seconds > 0


def test_the_adapter_sees_each_batch_once_in_order(source: Trained, stream: Stream) -> None:
    adapter, seen = soft(source), []
    adapter.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    run_online(adapter, stream)
    assert torch.equal(torch.cat(seen), stream.images[stream.order].float() / 255)
    assert adapter.steps_taken == len(stream) == 4


def test_predictions_come_from_after_the_update(source: Trained, stream: Stream) -> None:
    first = replace(stream, order=stream.order[:5])
    x = first.images[first.order].float() / 255
    after = run_online(soft(source), first).probabilities
    model = copy.deepcopy(source.model).train()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    logits = model(x)
    before = logits.detach().softmax(-1)
    (-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()).backward()
    optimizer.step()
    torch.testing.assert_close(after, model(x).detach().softmax(-1), rtol=1e-4, atol=1e-5)
    assert (after - before).abs().max() > 1e-2


def test_the_curve_is_the_cumulative_accuracy(source: Trained, stream: Stream, labels: Tensor) -> None:
    record = evaluate_online(soft(source), stream, labels, SETUP)
    guesses = by_hand(soft(source), stream).argmax(-1).tolist()
    right = [guess == truth for guess, truth in zip(guesses, labels[stream.order].tolist(), strict=True)]
    assert record.curve == pytest.approx([sum(right[:end]) / end for end in (5, 10, 15, 17)], abs=1e-6)
    assert record.accuracy == pytest.approx(record.curve[-1], abs=1e-6)
    assert record.seconds > 0
    assert record.images_per_second == pytest.approx(17 / record.seconds)


def test_a_record_says_who_ran_on_what(source: Trained, stream: Stream, labels: Tensor) -> None:
    record = evaluate_online(soft(source, lr=3e-3), stream, labels, SETUP)
    who = (record.dataset, record.target, record.backbone, record.algorithm, record.method, record.seed)
    assert who == ("made", "there", "small", "erm", "soft", 5)
    assert (record.statistics, record.predict, record.stream, record.batch_size) == (
        "batch", "own", "online", 5,
    )  # fmt: skip
    assert record.protocol["note"] == "kept"
    assert record.protocol["adapter"]["lr"] == 3e-3
    assert (record.protocol["images"], record.protocol["reset"]) == (17, "never")
    assert record.versions == made_by()
    assert set(versions()) <= set(record.versions)
    assert sum(record.reliability["count"]) == 17


@pytest.mark.parametrize("length", [0, 17, 22, 24])
def test_labels_of_another_length_are_refused(source: Trained, stream: Stream, length: int) -> None:
    with pytest.raises(DataError, match=f"{length} labels for 23 images of target 'there'"):
        evaluate_online(soft(source), stream, torch.zeros(length, dtype=torch.int64), SETUP)


def test_labels_are_looked_up_by_the_order_of_arrival(source: Trained, stream: Stream) -> None:
    truth = torch.arange(23) % CLASSES
    sure = torch.nn.functional.one_hot(truth[stream.order], CLASSES).float()
    record = score(soft(source), stream, Outcome(sure, 1.0), truth, SETUP)
    assert record.accuracy == 1
    assert record.curve == [1, 1, 1, 1]
    assert record.images_per_second == 17


def test_labels_change_no_prediction(source: Trained, stream: Stream, labels: Tensor) -> None:
    counted: list[int] = []
    outcome = run_online(soft(source), stream, counted.append)
    assert counted == [1, 2, 3, 4]
    records: list[Any] = [
        score(soft(source), stream, outcome, answers, SETUP) for answers in (labels, (labels + 1) % CLASSES)
    ]
    assert records[0].accuracy + records[1].accuracy <= 1
    assert records[0].reliability["confidence"] == records[1].reliability["confidence"]
