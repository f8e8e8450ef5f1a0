"""Which way to be as sure as one may: where either must win, and against what was fitted by hand."""

import pytest
import torch

from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.functional.calibration import fitted_temperature
from vicinal.training.sureness import Sureness, Told, agreeing, fitted_sureness

CLASSES, STEPS, BATCH = 4, 30, 20
NOW = VnlSettings(agreement_window=100, agreement_prior=5.0)


def told(domain: str, right: float, sharpness: float, seed: int, second: float | None = None) -> Told:
    """Return a stream predicted right so often, with a frozen model that errs as often, on other images."""
    generator = torch.Generator().manual_seed(seed)

    def answers(y: torch.Tensor, often: float) -> torch.Tensor:
        wrong = (y + torch.randint(1, CLASSES, y.shape, generator=generator)) % CLASSES
        return torch.where(torch.rand(y.shape, generator=generator) < often, y, wrong)

    y = torch.randint(CLASSES, (STEPS, BATCH), generator=generator)
    logits = sharpness * torch.nn.functional.one_hot(answers(y, right), CLASSES).float()
    # A frozen model that differs as often as the predictions are wrong.
    said = answers(logits.argmax(-1), right if second is None else second)
    return Told(domain, logits.softmax(-1), said, y)


def test_where_domains_differ_in_difficulty_agreement_tells_them_apart() -> None:
    streams = [told("easy", 0.98, 3.0, 0), told("middle", 0.85, 3.0, 1), told("hard", 0.6, 3.0, 2)]
    found = fitted_sureness(streams, NOW)
    assert found.nll_by_agreement < found.nll_by_temperature
    assert found.options == {"agreement": 1.0}


def test_where_they_are_alike_and_differences_are_no_errors_a_temperature_is_taken() -> None:
    streams = [told(name, 0.95, 3.0, seed, second=0.6) for seed, name in enumerate("abc")]
    found = fitted_sureness(streams, NOW)
    assert found.nll_by_temperature < found.nll_by_agreement
    assert found.options == {"output_temperature": found.temperature}


def test_each_domain_is_judged_by_what_was_fitted_on_the_others() -> None:
    streams = [told("a", 0.9, 3.0, 0), told("a", 0.7, 3.0, 1), told("b", 0.5, 3.0, 2)]
    halves = [(one.p[STEPS // 2 :].flatten(0, 1), one.y[STEPS // 2 :].flatten()) for one in streams]

    def nll(stream: int, *fitted_on: int) -> float:
        T = fitted_temperature([halves[i][0] for i in fitted_on], [halves[i][1] for i in fitted_on])
        q = halves[stream][0] ** (1 / T)
        q = q / q.sum(-1, keepdim=True)
        return float(-q.gather(1, halves[stream][1][:, None]).log().mean())

    found = fitted_sureness(streams, NOW)
    assert found.nll_by_temperature == pytest.approx((nll(0, 2) + nll(1, 2) + nll(2, 0, 1)) / 3, rel=1e-4)
    every = fitted_temperature(*map(list, zip(*halves, strict=True)))
    assert found.temperature == pytest.approx(every)


def test_agreement_is_judged_by_the_later_half_under_the_settings() -> None:
    streams = [told("a", 0.9, 3.0, 0), told("b", 0.6, 3.0, 1)]
    for settings in (NOW, VnlSettings(agreement_window=30, agreement_prior=50.0)):
        nlls = []
        for one in streams:
            q = agreeing(one, settings)[STEPS // 2 :]
            nlls.append(float(-q.gather(-1, one.y[STEPS // 2 :, :, None]).log().mean()))
        assert fitted_sureness(streams, settings).nll_by_agreement == pytest.approx(sum(nlls) / 2, rel=1e-4)
    first, second = (fitted_sureness(streams, one) for one in (NOW, VnlSettings(agreement_prior=500.0)))
    assert first.nll_by_agreement != pytest.approx(second.nll_by_agreement, rel=1e-3)


def test_one_domain_alone_is_judged_by_itself() -> None:
    found = fitted_sureness([told("a", 0.8, 3.0, 0)], NOW)
    again = fitted_sureness([told("a", 0.8, 3.0, 0), told("a", 0.8, 3.0, 0)], NOW)
    assert found.nll_by_temperature == pytest.approx(again.nll_by_temperature)


def test_agreement_changes_no_class_and_hears_nothing_of_later_steps() -> None:
    one = told("a", 0.7, 3.0, 0)
    found = agreeing(one, NOW)
    assert torch.equal(found.argmax(-1), one.p.argmax(-1))
    start = Told("a", one.p[:9], one.says[:9], one.y[:9])
    torch.testing.assert_close(agreeing(start, NOW), found[:9])


def test_no_temperature_needs_no_option() -> None:
    assert Sureness(1.0, 0.5, 0.6).options == {}
    assert Sureness(2.0, 0.5, 0.6).options == {"output_temperature": 2.0}
    assert Sureness(2.0, 0.5, 0.4).options == {"agreement": 1.0}
