"""Temperatures of models on their own domains, and how they come with what left-out domains teach."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vicinal.data.domains import SourceDomain
from vicinal.functional.calibration import fitted_temperature
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.sureness import NAME, mean_temperature, validation_temperature
from vicinal.training.train import ModelSpec, train

MakeSources = Callable[..., list[SourceDomain]]
CONFIG = TrainConfig(algorithm="erm", iterations=20, batch_size=8, backbone_lr=2e-3)


def test_it_is_that_of_all_validation_images(spec: ModelSpec, make_sources: MakeSources) -> None:
    sources = make_sources(2, train=64, val=16)
    trained = train(spec, sources, CONFIG)
    parts = [source.val for source in sources]
    with torch.no_grad():
        p = [trained.model(part.images.float() / 255).softmax(-1) for part in parts]
    expected = fitted_temperature(p, [part.labels for part in parts])
    assert trained.provenance[NAME] == pytest.approx(expected, rel=1e-3)
    assert expected != 1.0


def test_without_validation_images_there_is_none(spec: ModelSpec, make_sources: MakeSources) -> None:
    sources = make_sources(2, train=64, val=0)
    assert validation_temperature(train(spec, sources, CONFIG).model, sources) is None


def test_the_mean_is_over_models_however_many_streams_they_have(
    spec: ModelSpec, make_sources: MakeSources
) -> None:
    trained = train(spec, make_sources(2, train=64, val=16), CONFIG)
    half, double, unknown = (replace(trained, provenance=p) for p in ({NAME: 0.5}, {NAME: 2.0}, {}))
    assert mean_temperature([half, half, half, double, unknown]) == pytest.approx(1.0)
    assert mean_temperature([unknown]) is None


def test_what_is_taught_names_that_of_the_left_out_models(spec: ModelSpec, make_sources: MakeSources) -> None:
    out_of_fold = OutOfFoldConfig(
        batch_size=8, epochs=2, step_sizes=(1e-3,), updates=("none",), baselines=(), left_out_iterations=5
    )
    sources = make_sources(3, train=64, val=16)
    plain, asked = (
        train(spec, sources, CONFIG, replace(out_of_fold, calibrate=calibrate)) for calibrate in (False, True)
    )
    assert NAME not in plain.choice
    assert 0 < asked.choice[NAME] != asked.provenance[NAME]
    assert asked.choice["methods"]["vnl"]["stream"]["output_temperature"] != 1.0
