"""Sureness by agreement: against a reference that remembers the whole stream, and inside vnl."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from vicinal.adapters.agreement import Agreement
from vicinal.adapters.guard import Guarded
from vicinal.adapters.methods import adapt
from vicinal.checkpoint import Trained
from vicinal.errors import ConfigError

MakeSource = Callable[..., Trained]
MakeImages = Callable[..., Tensor]
OWN = {"predict": "own", "lr": 0.05, "from_rest": False}


def batches(*counts: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (3 * torch.randn(n, 4, generator=generator), torch.randint(4, (n,), generator=generator))
        for n in counts
    ]


def unsure(logits: Tensor) -> float:
    return float(1 - logits.softmax(-1).amax(-1).mean())


@pytest.mark.parametrize("counts", [(5, 5, 5, 5), (3, 20, 4), (1, 1, 1), (9, 2)])
def test_the_last_predictions_are_as_unsure_as_they_are_likely_to_be_wrong(counts: tuple[int, ...]) -> None:
    window, kappa, prior = 8, 0.7, 3.0
    agreement = Agreement(window, torch.zeros(4))
    stream = batches(*counts)
    for end, (logits, says) in enumerate(stream, start=1):
        found = agreement(logits, says, kappa, prior)
        last = torch.cat([one for one, _ in stream[:end]])[-window:]
        said = torch.cat([one for _, one in stream[:end]])[-window:]
        differ = sum(int(row.argmax()) != int(word) for row, word in zip(last, said, strict=True))
        wrong = (kappa * differ + prior * unsure(last)) / (len(last) + prior)
        assert unsure(last / found) == pytest.approx(wrong, abs=2e-3)


@pytest.mark.parametrize("update", ["marginal", "neighbors", "anchored", "entropy"])
def test_vnl_says_the_same_classes_less_or_more_surely(
    update: str, make_source: MakeSource, images: MakeImages
) -> None:
    source = make_source()
    plain, told = (adapt(source, "vnl", update=update, agreement=k, **OWN) for k in (0.0, 1.0))
    frozen = adapt(source, "bn", statistics="stream")
    agreement = Agreement(200, torch.zeros(len(source.classes)))
    for seed in range(4):
        x = images(8, seed=seed)
        expected, says = plain(x), frozen(x).argmax(-1)
        T = agreement(expected, says, 1.0, 20.0)
        torch.testing.assert_close(told(x), expected / T, rtol=1e-4, atol=1e-4)
        assert float(told.divided_by) == pytest.approx(float(T), rel=1e-4)
    assert float(T) != pytest.approx(1.0, rel=1e-2)


def test_without_updates_there_is_no_second_opinion(make_source: MakeSource, images: MakeImages) -> None:
    plain, told = (adapt(make_source(), "vnl", update="none", predict="own", agreement=k) for k in (0.0, 1.0))
    assert torch.equal(plain(images(8)), told(images(8)))
    assert told.divided_by == 1.0


def test_a_stream_goes_on_where_it_was_saved_and_resets(make_source: MakeSource, images: MakeImages) -> None:
    whole, part = (adapt(make_source(), "vnl", agreement=1.0, **OWN) for _ in range(2))
    first = part(images(8))
    torch.testing.assert_close(whole(images(8)), first)
    other = adapt(make_source(), "vnl", agreement=1.0, **OWN)
    other.load_state_dict(part.state_dict())
    torch.testing.assert_close(other(images(8, seed=1)), whole(images(8, seed=1)))
    whole.reset()
    assert float(whole.divided_by) == 1.0
    torch.testing.assert_close(whole(images(8)), first)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"lr": 1e-3}, False),
        ({"update": "entropy"}, False),
        ({"predict": "neighbors"}, False),
        ({"output_temperature": 2.0}, False),
    ],
)
def test_one_that_was_chosen_goes_with_its_rule(
    options: dict[str, Any], kept: bool, make_source: MakeSource
) -> None:
    rule = {"lr": 1e-4, "update": "marginal", "predict": "own", "agreement": 1.0}
    source = replace(make_source(), choice={"methods": {"vnl": {"stream": rule}}})
    assert adapt(source, "vnl", **options).settings.agreement == (1.0 if kept else 0.0)  # type: ignore[attr-defined]


def test_who_asks_for_agreement_gets_no_temperature_that_was_chosen_without_it(
    make_source: MakeSource,
) -> None:
    rule = {"lr": 1e-4, "update": "marginal", "predict": "own", "output_temperature": 0.5}
    source = replace(make_source(), choice={"methods": {"vnl": {"stream": rule}}})
    assert adapt(source, "vnl", agreement=1.0).settings.output_temperature == 1.0
    assert adapt(source, "vnl", agreement=1.0, output_temperature=0.5).settings.output_temperature == 0.5


def test_both_divide_where_both_are_asked_for(make_source: MakeSource, images: MakeImages) -> None:
    one, both = (adapt(make_source(), "vnl", agreement=1.0, output_temperature=t, **OWN) for t in (1.0, 2.0))
    for seed in range(2):
        torch.testing.assert_close(one(images(8, seed=seed)), 2 * both(images(8, seed=seed)))
    assert float(both.divided_by) == pytest.approx(2 * float(one.divided_by))


def test_a_batch_that_broke_down_says_nothing_of_the_next() -> None:
    (good, _), (next_, _) = batches(10, 10)
    says, said = good.argmax(-1), next_.argmax(-1)
    for classes in (says, said):  # 2 of 10 differ: by neither end of the temperatures
        classes[:2] = (classes[:2] + 1) % 4
    whole, broken = Agreement(20, torch.zeros(4)), Agreement(40, torch.zeros(4))
    whole(good, says, 1.0, 5.0)
    broken(good, says, 1.0, 5.0)
    nothing = torch.full((10, 4), torch.nan)
    assert 0.2 < float(broken(nothing, (nothing.argmax(-1) + 1) % 4, 1.0, 5.0)) < 9
    expected = whole(next_, said, 1.0, 5.0)
    assert 0.2 < float(expected) < 9
    torch.testing.assert_close(broken(next_, said, 1.0, 5.0), expected)


def test_a_guard_judges_what_the_adapter_said_before_it_was_divided(
    make_source: MakeSource, images: MakeImages
) -> None:
    plain, told = (Guarded(adapt(make_source(), "vnl", agreement=k, **OWN)) for k in (0.0, 1.0))
    for seed in range(12):
        plain(images(8, seed=seed)), told(images(8, seed=seed))
    assert plain.report() == told.report()


@pytest.mark.parametrize(
    "options",
    [
        {"agreement": -1.0},
        {"agreement": float("nan")},
        {"agreement": float("inf")},
        {"agreement": "1"},
        {"agreement_window": 0},
        {"agreement_window": 20.5},
        {"agreement_prior": -0.1},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], make_source: MakeSource) -> None:
    with pytest.raises(ConfigError, match="agreement"):
        adapt(make_source(), "vnl", **options)
