import json
from dataclasses import replace
from typing import Any

import pytest

from vicinal.data.augment import Augment
from vicinal.errors import ConfigError, UnknownNameError, VicinalError
from vicinal.training.config import (
    LATER,
    OutOfFoldConfig,
    TrainConfig,
    as_dict,
    for_pretrained,
    identity,
)

# What tells models apart since the first ones were trained.
FIRST = {
    "adapt_lr",
    "algorithm",
    "augment",
    "backbone_lr",
    "batch_size",
    "difference",
    "draw_labels",
    "group_size",
    "head_lr",
    "iterations",
    "joint_features",
    "kl_weight",
    "label_smoothing",
    "num_samples",
    "phi_layers",
    "phi_lr",
    "precision",
    "second_order",
    "seed",
    "validate_every",
}

FIRST_CHOICES = {
    "baselines",
    "batch_size",
    "decay",
    "epochs",
    "fit_lr",
    "from_rest",
    "hardenings",
    "heed_doubt",
    "hidden",
    "kl_weight",
    "leave_out",
    "marginals",
    "near",
    "num_samples",
    "posterior_weight",
    "rounds",
    "step_sizes",
    "stream_images",
    "tolerance",
    "updates",
}


@pytest.mark.parametrize("name", ["iterations", "batch_size", "group_size", "validate_every", "save_every"])
def test_counts_must_be_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        TrainConfig(**{name: 0})


@pytest.mark.parametrize("value", [0.0, -1e-3])
@pytest.mark.parametrize("name", ["backbone_lr", "head_lr", "phi_lr", "adapt_lr", "difference"])
def test_step_sizes_must_be_above_zero(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (TrainConfig, {"backbone_lr": float("nan")}, "backbone_lr is a finite number, not nan"),
        (TrainConfig, {"iterations": "many"}, "iterations is a whole number, not 'many'"),
        (OutOfFoldConfig, {"votes": 3}, "votes is a word, not 3"),
        (OutOfFoldConfig, {"from_rest": True}, "from_rest is a list, each true or false, not True"),
        (OutOfFoldConfig, {"predictors": "own"}, "predictors is a list, each a word, not 'own'"),
    ],
)
def test_what_is_of_another_type_is_refused(config: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"leave_out": -1},
        {"epochs": 0},
        {"step_sizes": ()},
        {"step_sizes": (1e-3, 0.0)},
        {"stream_images": 0},
        {"hidden": 0},
        {"num_samples": -1},
        {"fit_lr": 0.0},
        {"tolerance": -0.1},
        {"near": -0.1},
        {"kl_weight": -1.0},
        {"decay": 0.0},
        {"decay": 1.5},
    ],
)
def test_out_of_fold_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="out-of-fold fitting needs"):
        OutOfFoldConfig(**options)


def test_an_unknown_hardening_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"hardening 'sharpened'.*edges"):
        OutOfFoldConfig(hardenings=("sharpened",))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"updates": ()}, {"updates": ("anchor",)}])
def test_out_of_fold_settings_that_cannot_work_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, UnknownNameError)):
        OutOfFoldConfig(**options)


@pytest.mark.parametrize("options", [{"num_samples": -1}, {"label_smoothing": 1.5}, {"phi_layers": 1}])
def test_training_settings_that_cannot_work_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TrainConfig(**options)


@pytest.mark.parametrize("average", [-0.1, 1.5])
def test_an_average_over_no_share_of_the_iterations_is_refused(average: float) -> None:
    with pytest.raises(ConfigError, match="average is a share of the iterations"):
        TrainConfig(average=average)


def test_models_from_before_an_option_keep_their_identity() -> None:
    plain = identity(TrainConfig())
    assert set(plain) == FIRST, "a new option belongs into LATER, or every model there is gets another name"
    assert {**identity(TrainConfig(average=0.5))} == {**plain, "average": 0.5}
    told = as_dict(TrainConfig()) | as_dict(OutOfFoldConfig())
    # How neighbors vote counts only where they may, which they did not.
    assert all(told[name] == value for name, value in LATER.items() if name != "votes")


def test_choices_from_before_an_option_keep_their_identity() -> None:
    plain = identity(OutOfFoldConfig())
    assert set(plain) == FIRST_CHOICES, "a new option belongs into LATER, or all choices get another name"
    once = OutOfFoldConfig(predictors=("own", "neighbors"), votes="once")
    assert identity(once) == {**plain, "predictors": ["own", "neighbors"]}
    assert identity(replace(once, votes="rounds")) == {**identity(once), "votes": "rounds"}
    assert identity(OutOfFoldConfig(updates=("neighbors",)))["votes"] == "rounds"
    assert identity(OutOfFoldConfig(votes="once")) == plain


def test_an_unknown_way_to_vote_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="once, rounds"):
        OutOfFoldConfig(votes="twice")  # type: ignore[arg-type]


@pytest.mark.parametrize("predictors", [(), ("own", "before"), ("votes",)])
def test_predictors_that_are_none_are_refused(predictors: Any) -> None:
    with pytest.raises(VicinalError, match="predictor"):
        OutOfFoldConfig(predictors=predictors)


def test_a_pretrained_backbone_starts_from_the_papers_step_sizes() -> None:
    config = for_pretrained(iterations=7, seed=3)
    assert (config.backbone_lr, config.head_lr, config.phi_lr) == (5e-5, 1e-4, 1e-4)
    assert (config.iterations, config.seed, config.augment) == (7, 3, Augment())


@pytest.mark.parametrize(
    "config", [TrainConfig(augment=Augment(max_ratio=1.1)), OutOfFoldConfig(marginals=(0.5, 1.0))]
)
def test_a_config_survives_json_unchanged(config: TrainConfig | OutOfFoldConfig) -> None:
    plain = as_dict(config)
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize("starts", [(), [False], (True, True)])
def test_starts_that_are_none_are_refused(starts: Any) -> None:
    with pytest.raises(ConfigError, match="from_rest lists the starts to try"):
        OutOfFoldConfig(from_rest=starts)
