"""From what a user asks for to what training and evaluation take: data, roles, model and settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vicinal.checkpoint import Trained
from vicinal.data.catalog import DATASETS
from vicinal.data.domains import MIN_SOURCES, DomainSet, Roles, assign_roles
from vicinal.data.files import printable
from vicinal.data.load import load_dataset
from vicinal.errors import ConfigError, DataError
from vicinal.models.backbones import Preprocessing, default_weights, preprocessing_for
from vicinal.training.config import OutOfFoldConfig, TrainConfig, for_pretrained
from vicinal.training.train import ModelSpec

Decoding = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainRequest:
    """What `vicinal train` is asked for; None and empty mean: decide for me."""

    data: str
    targets: tuple[str, ...] = ()
    backbone: str | None = None
    weights: str | None = None
    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    seed: int = 0
    skip_bad: bool = False
    data_dir: Path | None = None
    data_options: dict[str, str] = field(default_factory=dict)  # of a named data set, as text
    training: dict[str, Any] = field(default_factory=dict)  # fields of TrainConfig
    out_of_fold: dict[str, Any] | None = field(default_factory=dict)  # fields of OutOfFoldConfig
    sources: tuple[str, ...] = ()  # domains to train on; empty: all that are not targets


@dataclass(frozen=True)
class Settled:
    """What a request comes to before any data are read: model and settings."""

    backbone: str
    weights: str
    preprocessing: Preprocessing
    config: TrainConfig
    out_of_fold: OutOfFoldConfig | None


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything training takes, and the roles that evaluation will take."""

    spec: ModelSpec
    roles: Roles
    config: TrainConfig
    out_of_fold: OutOfFoldConfig | None
    provenance: dict[str, Any]
    bad: tuple[str, ...]


def settle(request: TrainRequest) -> Settled:
    """Return the model and the settings of a training; touches no data."""
    entry = DATASETS[request.data] if request.data in DATASETS else None  # noqa: SIM401
    backbone = request.backbone or ("small" if entry and entry.size <= 32 else "resnet18")
    weights = request.weights or default_weights(backbone)
    channels = entry.channels if entry else 3
    channels = 3 if not backbone.startswith("small") else channels
    size = request.size
    if size is None and entry and backbone.startswith("small"):
        size = entry.size
    preprocessing = preprocessing_for(
        backbone, channels=channels, size=size, mean=request.mean, std=request.std
    )
    preprocessing = replace(preprocessing, fit=entry.fit if entry else "crop")
    config = _train_config(weights, {"seed": request.seed, **request.training})
    out_of_fold = None if request.out_of_fold is None else _out_of_fold(weights, request.out_of_fold)
    return Settled(backbone, weights, preprocessing, config, out_of_fold)


def load_for(request: TrainRequest, decoding: Decoding | None = None) -> DomainSet:
    """Return the images that a training asks for, as its backbone takes them."""
    preprocessing = settle(request).preprocessing
    return load_dataset(
        request.data,
        preprocessing.size,
        preprocessing.channels,
        fit=preprocessing.fit,
        seed=request.seed,
        skip_bad=request.skip_bad,
        progress=decoding,
        data_dir=request.data_dir,
        options=request.data_options,
    )


def prepare_training(
    request: TrainRequest, decoding: Decoding | None = None, data: DomainSet | None = None
) -> Prepared:
    """Return the data, loaded unless they are given, and the settings of a training."""
    settled = settle(request)  # cheap checks come before the images are read
    entry = DATASETS[request.data] if request.data in DATASETS else None  # noqa: SIM401
    data = data or load_for(request, decoding)
    if len(data.classes) < 2:
        raise DataError(f"'{data.name}' has one class, '{data.classes[0]}': a classifier needs two or more")
    min_sources = entry.min_sources if entry else MIN_SOURCES
    targets = request.targets or _default_targets(request.data, data)
    roles = assign_roles(data, targets, min_sources, request.sources)
    spec = ModelSpec(settled.backbone, settled.weights, settled.preprocessing, data.classes)
    named = request.data if entry else str(Path(request.data).resolve())
    facts = {
        "dataset": named,
        "targets": [target.name for target in roles.targets],
        "sources": [source.name for source in roles.sources],
        "data_seed": request.seed,
        "data_options": request.data_options,
        "data": dict(data.facts),
    }
    return Prepared(spec, roles, settled.config, settled.out_of_fold, facts, data.bad)


def _train_config(weights: str, options: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**options) if weights == "none" else for_pretrained(**options)


def _out_of_fold(weights: str, options: dict[str, Any]) -> OutOfFoldConfig:
    if weights == "none":
        return OutOfFoldConfig(**options)
    # A pretrained net collapses at steps that a small one from scratch needs. Votes of neighbors paid on PACS
    # (docs/experiments.md, section 46): whether they do elsewhere is for left-out domains to say.
    pretrained = {"step_sizes": (3e-6, 1e-5, 3e-5), "predictors": ("own", "labels", "neighbors")}
    return OutOfFoldConfig(**{**pretrained, **options})


def _default_targets(name: str, data: DomainSet) -> Sequence[str]:
    if name in DATASETS:
        return DATASETS[name].default_targets
    raise ConfigError(f"say which domain to hold out with --target: one of {', '.join(data.domains)}")


def roles_for(
    trained: Trained,
    data: str | None = None,
    targets: Sequence[str] = (),
    *,
    skip_bad: bool = False,
    decoding: Decoding | None = None,
    data_dir: Path | None = None,
) -> Roles:
    """Return the roles a trained model is evaluated on: those it was trained with, unless told otherwise."""
    facts = trained.provenance
    name = data or facts.get("dataset")
    if not name:
        raise ConfigError("this model does not say what data it was trained on: pass --data")
    if not data and name not in DATASETS and not Path(name).exists():
        raise DataError(
            f"the images this model was trained on are no longer at '{printable(name)}': say where they, or "
            "others of its classes, are with --data"
        )
    loaded = load_dataset(
        name,
        trained.preprocessing.size,
        trained.preprocessing.channels,
        fit=trained.preprocessing.fit,
        seed=facts.get("data_seed", 0),
        skip_bad=skip_bad,
        progress=decoding,
        data_dir=data_dir,
        options=facts.get("data_options") if name == facts.get("dataset") else None,
    )
    if loaded.classes != trained.classes:
        raise DataError(
            f"'{loaded.name}' has {len(loaded.classes)} classes ({_few(loaded.classes)}), the model was "
            f"trained on {len(trained.classes)} ({_few(trained.classes)}): they must be the same"
        )
    return assign_roles(loaded, targets or facts.get("targets", []), min_sources=0)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
