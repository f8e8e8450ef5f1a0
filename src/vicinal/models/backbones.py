"""Backbones by name: our own entries and every timm model, with their input constants and weights.

A new backbone of our own is one entry in `BACKBONES`; a timm name needs none.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import timm
import torch
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from torch import Tensor, nn

from vicinal.errors import CheckpointError, ConfigError, UnknownNameError
from vicinal.models.classifier import Classifier
from vicinal.models.small import Norm, small_features
from vicinal.registry import Registry

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt")
NESTS = ("state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "backbone.", "model.", "features.", "encoder.")
HEAD_WORDS = frozenset({"fc", "_fc", "classifier", "head", "heads", "head_dist", "last_linear", "linear"})


@dataclass(frozen=True)
class Preprocessing:
    """What a model is fed: square images of `size` px, and the constants its first layer expects.

    `fit` says how a picture that is not square was made so: "crop" or "squash".
    """

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Literal["crop", "squash"] = "crop"


@dataclass(frozen=True)
class Backbone:
    """One backbone: how to make its features, what they are fed, where their weights come from."""

    summary: str
    features: Callable[[Preprocessing, bool], nn.Module]  # True: with timm's weights
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weights: str = "timm"  # what an unset --weights means
    downloads: bool = False  # whether weights "timm" exist
    sizes: tuple[int, int] = (1, 1 << 16)


BACKBONES: Registry[Backbone] = Registry("backbone")


def _small(norm: Norm, preprocessing: Preprocessing, pretrained: bool) -> nn.Module:
    return small_features(preprocessing.channels, norm)[0]


def _resnet50_v1(preprocessing: Preprocessing, pretrained: bool) -> nn.Module:
    net: nn.Module = timm.create_model("resnet50", num_classes=0, in_chans=preprocessing.channels)
    # timm, like torchvision, strides the 3x3 (v1.5); weights trained in the original layout need it here.
    for name in ("layer2.0.conv", "layer3.0.conv", "layer4.0.conv"):
        for number, stride in ((1, 2), (2, 1)):
            conv = net.get_submodule(f"{name}{number}")
            assert isinstance(conv, nn.Conv2d)
            conv.stride = (stride, stride)
    return net


def _timm(name: str, default_size: int, preprocessing: Preprocessing, pretrained: bool) -> nn.Module:
    make = partial(timm.create_model, name, pretrained, num_classes=0, in_chans=preprocessing.channels)
    try:
        if preprocessing.size != default_size:
            with suppress(TypeError):  # a net that takes any size has no such argument
                return make(img_size=preprocessing.size)
        return make()
    except Exception as error:  # timm, the hub client and the network each raise their own
        if not pretrained:
            raise _unfit(name, preprocessing, error) from error
        _timm(name, default_size, preprocessing, False)  # raises if the weights are not what is wrong
        wrong = f"timm's weights of '{name}' cannot be downloaded ({type(error).__name__})"
        raise ConfigError(f"{wrong}: pass --weights FILE or --weights none") from error


def _unfit(name: str, preprocessing: Preprocessing, error: Exception) -> ConfigError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    fed = f"{preprocessing.channels} channel(s) at {preprocessing.size} px"
    return ConfigError(f"backbone '{name}' cannot take {fed} ({reason}): choose another size")


SMALL: dict[str, Norm] = {"small": "batch", "small_gn": "group", "small_ln": "layer", "small_none": "none"}
for _name, _norm in SMALL.items():
    _words = f"three convolution blocks, normalization: {_norm}; images of 4 to 32 px"
    BACKBONES.register(_name)(
        Backbone(_words, partial(_small, _norm), 16, (0.5,), (0.5,), weights="none", sizes=(4, 32))
    )
_words = "ResNet-50, original v1 layout: stride 2 on the first 1x1 convolution of a downsampling block"
BACKBONES.register("resnet50_v1")(Backbone(_words, _resnet50_v1, 224, IMAGENET_MEAN, IMAGENET_STD))


def find_backbone(name: str) -> Backbone:
    """Return our entry of that name, else one made of timm's facts about it."""
    if name in BACKBONES:
        return BACKBONES[name]
    try:
        if not timm.is_model(name):
            raise _unknown(name)
        known = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # a timm model with a tag it does not have
        raise _unknown(name) from error
    if known is not None:
        facts = asdict(known)
    else:  # a deprecated name: only the model it leads to carries the facts
        with torch.device("meta"):
            facts = vars(timm.create_model(name))["pretrained_cfg"]
    size, mean, std = facts["input_size"][-1], tuple(facts["mean"]), tuple(facts["std"])
    return Backbone("a timm model", partial(_timm, name, size), size, mean, std, downloads=True)


def _unknown(name: str) -> UnknownNameError:
    names = timm.list_pretrained() if "." in name else timm.list_models()
    close = difflib.get_close_matches(name, names, n=3)
    nearest = f" (closest: {', '.join(close)})" if close else ""
    error = UnknownNameError("backbone", name, BACKBONES)
    # timm knows over a thousand names: naming the closest keeps the message one readable line.
    error.args = (f"{error}, or any timm name{nearest}",)
    return error


def default_weights(name: str) -> str:
    """Return what an unset --weights means for a backbone: "none" or "timm".

    resnet50_v1 answers "timm" and has no such weights: building it then asks for a file, where "none" would
    quietly start at random.
    """
    return find_backbone(name).weights


def preprocessing_for(
    name: str,
    channels: int | None = None,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Preprocessing:
    """Return what a backbone is fed: its own size and constants wherever none is given."""
    backbone = find_backbone(name)
    channels = 3 if channels is None else channels
    size = backbone.size if size is None else size
    if channels not in (1, 3):
        raise ConfigError(f"images have 1 channel (gray) or 3 (RGB), not {channels}")
    low, high = backbone.sizes
    if not low <= size <= high:
        raise ConfigError(f"backbone '{name}' takes images of {low} to {high} px: {size} is no such size")
    means = _per_channel("mean", backbone.mean if mean is None else mean, channels)
    stds = _per_channel("std", backbone.std if std is None else std, channels)
    if min(stds) <= 0:
        raise ConfigError(f"std must be above zero in every channel, not {min(stds)}")
    return Preprocessing(size, channels, means, stds)


def _per_channel(what: str, values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return one value a channel: one is repeated, three become their average where the images are gray."""
    if not all(math.isfinite(value) for value in values):
        raise ConfigError(f"{what} must be finite, not {list(values)}")
    if len(values) == channels:
        return tuple(map(float, values))
    if len(values) == 1:
        return (float(values[0]),) * channels
    if len(values) == 3:
        return (fmean(values),)
    raise ConfigError(f"{what} has {len(values)} values for {channels} channel(s): give 1 or {channels}")


def build_classifier(
    name: str, num_classes: int, *, weights: str = "none", preprocessing: Preprocessing
) -> Classifier:
    """Return a classifier on that backbone, its head at random.

    `weights` of the features: "none" (random), "timm" (timm's, downloaded), or the path of a local file.
    """
    backbone = find_backbone(name)
    if weights == "timm" and not backbone.downloads:
        raise ConfigError(f"timm has no weights of '{name}': pass --weights FILE or --weights none")
    path = None if weights in ("none", "timm") else _weight_file(weights)
    features = backbone.features(preprocessing, weights == "timm")
    if path is not None:
        load_features(features, path, gray=preprocessing.channels == 1)
    width = _width(name, features, preprocessing)
    return Classifier(features, width, num_classes, list(preprocessing.mean), list(preprocessing.std))


def _width(name: str, features: nn.Module, preprocessing: Preprocessing) -> int:
    """Return d, measured: timm's num_features is not the width of what every model emits."""
    training = features.training
    try:
        with torch.no_grad():
            z = features.eval()(torch.zeros(1, preprocessing.channels, *[preprocessing.size] * 2))
    except Exception as error:  # whatever a net raises on images it cannot take
        raise _unfit(name, preprocessing, error) from error
    features.train(training)
    if not isinstance(z, Tensor) or z.ndim != 2:
        raise ConfigError(f"backbone '{name}' emits no feature vector (N, d): choose another backbone")
    return z.shape[1]


def _weight_file(weights: str) -> Path:
    path = Path(weights)
    if path.suffix.lower() not in WEIGHT_SUFFIXES or not path.is_file():
        raise ConfigError(f"no weights '{weights}': give none, timm or a {', '.join(WEIGHT_SUFFIXES)} file")
    return path


def load_features(features: nn.Module, path: Path, *, gray: bool = False) -> None:
    """Load the features' tensors from a file; the classifier tensors it also holds are dropped."""
    wanted = features.state_dict()
    held = _unwrap(_read_tensors(path), wanted)
    found = {name: held[name] for name in wanted if name in held}
    strangers = _strangers(held, wanted) if found else []
    # A safetensors file lists its tensors by name: their order says nothing of the net.
    if not found and path.suffix.lower() != ".safetensors":
        found = _by_order(held, wanted, gray)
    found = {name: _for_input(value, wanted[name], gray) for name, value in found.items()}
    found = {name: value for name, value in wanted.items() if _is_counter(name)} | found
    bad = [name for name, want in wanted.items() if name not in found or found[name].shape != want.shape]
    if bad:
        got = f"{list(found[bad[0]].shape)}" if bad[0] in found else "nothing"
        raise CheckpointError(
            f"'{path}' does not fit this backbone: {len(bad)} of {len(wanted)} tensors missing or of another "
            f"shape, first '{bad[0]}': {got} where {list(wanted[bad[0]].shape)} is needed"
        )
    if strangers:
        more = f"{len(strangers)} tensors more than this backbone has, first '{strangers[0]}'"
        raise CheckpointError(f"'{path}' holds another model: {more}")
    features.load_state_dict(found)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix.lower() == ".safetensors":
            return load_file(path)
        # weights_only: a pickle can run code, and nothing in a weights file needs to.
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises whatever its parser happens to hit
        raise CheckpointError(f"cannot read '{path}': damaged, or more than a state_dict") from error
    for nest in NESTS * len(NESTS):
        if isinstance(held, Mapping) and isinstance(held.get(nest), Mapping):
            held = held[nest]
    pairs = held.items() if isinstance(held, Mapping) else ()
    tensors = {str(name): value for name, value in pairs if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"'{path}' holds no tensors by name: save a state_dict")
    return tensors


def _unwrap(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the wrappers' prefix that finds most of the wanted names, without it."""
    chains = [""]
    for chain in chains:  # grows as it is read: "module.", then "module.backbone."
        chains += [chain + p for p in PREFIXES if any(name.startswith(chain + p) for name in held)]
    best = max(chains, key=lambda chain: sum(chain + name in held for name in wanted))
    return {name.removeprefix(best): value for name, value in held.items() if name.startswith(best)}


def _strangers(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return names that tell of another net: a ResNet-34 holds all that a ResNet-18 needs, and more."""
    tops = {name.partition(".")[0] for name in wanted}
    weights = [name for name in held if name not in wanted and name.endswith((".weight", ".bias"))]
    inside = [name for name in weights if name.partition(".")[0] in tops]
    return [name for name in inside if not HEAD_WORDS & set(name.split("."))]


def _by_order(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor], gray: bool) -> dict[str, Tensor]:
    """Return held tensors in the order of the wanted; none unless every shape and last name part agrees."""
    mine = [name for name in wanted if not _is_counter(name)]
    theirs = [name for name in held if not _is_counter(name)]
    if len(theirs) < len(mine) or any(held[name].ndim > 2 for name in theirs[len(mine) :]):
        return {}
    pairs = list(zip(mine, theirs, strict=False))
    shapes = all(_for_input(held[b], wanted[a], gray).shape == wanted[a].shape for a, b in pairs)
    parts = all(a.rpartition(".")[2] == b.rpartition(".")[2] for a, b in pairs)
    return {a: held[b] for a, b in pairs} if shapes and parts else {}


def _for_input(value: Tensor, want: Tensor, gray: bool) -> Tensor:
    """Return a first convolution's RGB weights summed to gray, anything else as it is."""
    if not gray or value.ndim != 4 or want.ndim != 4 or value.shape[1] != 3 * want.shape[1]:
        return value
    return adapt_input_conv(1, value)


def _is_counter(name: str) -> bool:
    """Return whether it is BatchNorm's batch count, which old files lack and nothing here reads."""
    return name.endswith("num_batches_tracked")
