"""The registry of methods, their options, and where a live adapter takes its settings from."""

import inspect
import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import vicinal
from vicinal.adapters import methods
from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import METHODS, adapt, configure, idle, register, settled
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.adapters.vnl_settings import VnlSettings
from vicinal.data.augment import Augment
from vicinal.errors import AdapterError, ConfigError, UnknownNameError
from vicinal.registry import Registry

CHOSEN = {
    "vnl": {
        "stream": {"update": "entropy", "lr": 3e-4, "predict": "own", "doubt": 0.2},
        "batch": {"update": "anchored", "lr": 3e-3, "predict": "labels"},
    },
    "hard": {"batch": {"lr": 7e-4}, "stream": {"lr": 8e-4}},
}


@pytest.fixture
def chosen(make_source: Any) -> Any:
    source = make_source()
    source.choice = json.loads(json.dumps({"methods": CHOSEN, "table": []}))  # as a checkpoint returns it
    return source


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", Registry("method"))

    @register("mine", Settings(lr=0.5))
    class Mine(Adapter):
        """What it does.

        More about it.
        """

        def adapt(self, x: torch.Tensor) -> torch.Tensor:
            return x

    entry = methods.METHODS["mine"]
    assert (entry.build, entry.defaults.lr, entry.summary) == (Mine, 0.5, "What it does.")
    with pytest.raises(ValueError, match="'mine' is registered twice"):
        register("mine", Settings())(Mine)
    assert methods.METHODS["mine"] is entry


def test_a_shipped_name_cannot_be_taken() -> None:
    before = METHODS["vnl"]
    with pytest.raises(ValueError, match="registered twice"):
        register("vnl", Settings())(before.build)
    assert METHODS["vnl"] is before


def test_an_unknown_method_lists_the_known_ones(make_source: Any) -> None:
    with pytest.raises(UnknownNameError) as caught:
        adapt(make_source(), "vln")
    assert "unknown method 'vln'" in str(caught.value)
    assert all(name in str(caught.value) for name in METHODS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_unknown_option_lists_the_known_ones(make_source: Any, method: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown option learning_rate, z: choose from .*\blr\b") as caught:
        adapt(make_source(), method, z=1, learning_rate=1)
    assert "\n" not in str(caught.value)


def test_an_option_of_another_method_is_unknown(make_source: Any) -> None:
    with pytest.raises(ConfigError, match="unknown option update"):
        adapt(make_source(), "hard", update="none")


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"steps": 0},
        {"num_samples": -1},
        {"predict": "all"},
        {"statistics": "running"},
    ],
)
def test_an_option_out_of_range_is_refused(make_source: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        adapt(make_source(), "hard", **wrong)


def test_options_are_put_into_the_defaults() -> None:
    defaults = VnlSettings(lr=0.25, statistics=StatisticsConfig("stream", source_images=7))
    assert configure(defaults, {}) == defaults
    assert configure(defaults, {"steps": 3, "augment": Augment()}).augment == Augment()
    by_name = configure(defaults, {"statistics": "blend"})
    assert by_name.statistics == StatisticsConfig("blend", source_images=7)
    whole = configure(defaults, {"statistics": StatisticsConfig("batch")})
    assert whole.statistics == StatisticsConfig("batch")
    assert (by_name.lr, whole.lr, type(whole)) == (0.25, 0.25, VnlSettings)


def test_without_a_choice_the_methods_own_defaults_hold(make_source: Any) -> None:
    for method in ("vnl", "hard", "erm"):
        assert adapt(make_source(), method).settings == METHODS[method].defaults
    assert adapt(make_source()).settings == METHODS["vnl"].defaults


@pytest.mark.parametrize(
    ("method", "options", "kind"),
    [
        ("vnl", {}, "stream"),
        ("vnl", {"statistics": "batch"}, "batch"),
        ("vnl", {"statistics": StatisticsConfig("batch", source_images=5)}, "batch"),
        ("hard", {}, "batch"),
        ("hard", {"statistics": "stream"}, "stream"),
    ],
)
def test_what_was_chosen_for_the_kind_of_statistics_is_taken(
    chosen: Any, method: str, options: dict[str, Any], kind: str
) -> None:
    settings = adapt(chosen, method, **options).settings
    assert settings.statistics.kind == kind
    for name, value in CHOSEN[method][kind].items():
        assert getattr(settings, name) == value
    assert settings.steps == METHODS[method].defaults.steps


def test_balanced_statistics_take_what_was_chosen_on_the_streams(chosen: Any) -> None:
    told = {"output_temperature": 1.5, "agreement": 1.0}
    stream = chosen.choice["methods"]["vnl"]["stream"]
    spread = {**CHOSEN, "vnl": {**CHOSEN["vnl"], "stream": {**stream, **told}}}
    source = replace(chosen, choice={**chosen.choice, "methods": spread})
    settings = adapt(source, "vnl", statistics="balanced").settings
    assert all(getattr(settings, name) == value for name, value in stream.items())
    assert (settings.output_temperature, settings.agreement) == (1.0, 0.0), "nobody looked at balanced ones"
    own = {**spread, "vnl": {**spread["vnl"], "balanced": {"lr": 0.25}}}
    source = replace(chosen, choice={**chosen.choice, "methods": own})
    assert adapt(source, "vnl", statistics="balanced").settings.lr == 0.25
    assert adapt(chosen, "soft", statistics="balanced").settings.lr == METHODS["soft"].defaults.lr


def test_options_win_over_what_was_chosen(chosen: Any) -> None:
    settings = adapt(chosen, "vnl", lr=0.5, update="none").settings
    assert (settings.lr, settings.update) == (0.5, "none")
    assert settings.predict == "own"  # the rest of the choice stays
    assert adapt(chosen, "vnl", lr=0.5).settings.doubt is None, "known of the chosen step size alone"
    assert adapt(chosen, "vnl", update="none").settings.doubt == 0.2
    assert adapt(chosen, "vnl", lr=0.5, doubt=0.3).settings.doubt == 0.3
    assert CHOSEN["vnl"]["stream"] == chosen.choice["methods"]["vnl"]["stream"]


@pytest.mark.parametrize(
    ("method", "options", "names"),
    [
        ("erm", {"lr": 1.0}, {"lr"}),
        ("soft", {"lr": 1.0, "rounds": 3}, None),
        ("vnl", {"lr": 1.0, "rounds": 3}, {"rounds"}),
        ("vnl", {"predict": "neighbors", "rounds": 3}, set()),
        ("vnl", {"update": "none", "lr": 1.0, "agreement": 1.0, "doubt": 0.1, "rounds": 2},
         {"lr", "agreement", "doubt", "rounds"}),
    ],
)  # fmt: skip
def test_options_that_play_no_part_change_nothing(
    chosen: Any, images: Any, method: str, options: dict[str, Any], names: set[str] | None
) -> None:
    if names is None:
        with pytest.raises(ConfigError, match="unknown option rounds"):
            settled(chosen, method, options)
        return
    found = names_of_idle(chosen, method, options)
    assert found == names
    rest = {name: value for name, value in options.items() if name not in found}
    x = images(6)
    one, other = adapt(chosen, method, **options), adapt(chosen, method, **rest)
    for _ in range(2):
        assert torch.equal(one(x), other(x))


def test_whoever_calls_is_told_of_options_that_play_no_part(chosen: Any) -> None:
    with pytest.warns(UserWarning, match="^vnl: agreement, lr play no part here$") as caught:
        vicinal.adapt(chosen, "vnl", update="none", agreement=1.0, lr=0.5)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="^erm: lr plays no part here$"):
        vicinal.adapt(chosen, "erm", lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vicinal.adapt(chosen, "vnl", lr=0.5, update="marginal", seed=1)
        vicinal.adapt(chosen, "erm", seed=1)
        adapt(chosen, "erm", lr=0.5)  # who calls from inside says so in a way of his own


def test_whoever_calls_can_say_what_can_be_said_inside() -> None:
    assert inspect.signature(vicinal.adapt) == inspect.signature(adapt)


def names_of_idle(trained: Any, method: str, options: dict[str, Any]) -> set[str]:
    return {*options} & {*idle(METHODS[method], settled(trained, method, options))}


@pytest.mark.parametrize("thing", [{"kind": "batch"}, ["batch"], 3])
def test_statistics_are_a_name_or_a_config(chosen: Any, thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"statistics takes batch, .* or a StatisticsConfig, not"):
        adapt(chosen, "tent", statistics=thing)


@pytest.mark.parametrize(("scale", "shift"), [(255.0, 0.0), (4.0, -2.0), (2.0, -1.0)])
def test_pixels_that_are_not_those_of_images_are_refused(
    chosen: Any, images: Any, scale: float, shift: float
) -> None:
    adapter = adapt(chosen, "soft")
    spread = images(6) - images(6).min()
    spread = spread / spread.max()  # from 0 to 1 exactly
    with pytest.raises(AdapterError, match=r"floats in \[0, 1\], got pixels from"):
        adapter(spread * scale + shift)
    assert adapter.steps_taken == 0
    adapter(spread * 1.8 - 0.4)  # noise, and what resampling adds


@pytest.mark.parametrize(("method", "kind"), [("vnl", "blend"), ("soft", "batch")])
def test_nothing_chosen_for_this_method_or_kind_leaves_the_defaults(
    chosen: Any, method: str, kind: str
) -> None:
    settings = adapt(chosen, method, statistics=kind).settings
    assert settings == configure(METHODS[method].defaults, {"statistics": kind})


def test_the_chosen_step_size_is_the_one_used(chosen: Any, images: Any) -> None:
    x = images(6)
    assert torch.equal(adapt(chosen, "hard")(x), adapt(chosen, "hard", lr=7e-4)(x))
    assert not torch.equal(adapt(chosen, "hard")(x), adapt(chosen, "hard", lr=1e-4)(x))
