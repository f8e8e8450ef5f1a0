"""One safetensors file: weights, config, class names, preprocessing, what was chosen, and versions.

What left-out domains taught also goes into a file of its own, in the same form: a few kilobytes.
Loading reads tensors and JSON; it executes no code. Writing is atomic: a full disk or a kill leaves the old
file as it was.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vicinal.errors import CheckpointError, ConfigError, VicinalError
from vicinal.models.backbones import Preprocessing, build_classifier
from vicinal.models.classifier import Classifier
from vicinal.models.inference import InferenceNet, StreamInferenceNet
from vicinal.versions import versions

FORMAT = 3
HEADER = "vicinal"
# Files of ours that hold no model, by kind, and what to do instead.
OTHERS = {
    "state": "the state of an unfinished training, not a model: run it to its end",
    "stream": "the state of an adapter, not a model: read it with vicinal.load_adapter",
    "taught": "what left-out domains taught, not the model they taught it for",
}


@dataclass
class Trained:
    """A source-trained model and everything that travels with it."""

    model: Classifier
    backbone: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    algorithm: str
    phi: InferenceNet | None = None  # the paper's, by `meta` or `neighbor` training
    anchor_phi: StreamInferenceNet | None = None  # out-of-fold, for a model that is not updated
    predict_phi: StreamInferenceNet | None = None  # out-of-fold, for the updated model
    choice: dict[str, Any] = field(
        default_factory=dict
    )  # chosen on left-out domains, with the table behind it
    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)  # dataset, sources, seed, validation accuracy
    versions: dict[str, str] = field(default_factory=versions)
    # What methods need of the source besides the model, by name: moments of features, Fisher information, the
    # weights of an auxiliary head.
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Taught:
    """What left-out domains taught for a source model. It needs no such model, and is small beside one."""

    anchor_phi: StreamInferenceNet
    predict_phi: StreamInferenceNet
    choice: dict[str, Any]
    out_of_fold: dict[str, Any]  # the settings it was taught under


def taught_of(trained: Trained) -> Taught | None:
    """Return what left-out domains taught a model; None where there were none."""
    anchor_phi, predict_phi = trained.anchor_phi, trained.predict_phi
    if anchor_phi is None or predict_phi is None:
        return None
    return Taught(anchor_phi, predict_phi, trained.choice, trained.config["out_of_fold"])


def with_taught(trained: Trained, taught: Taught) -> Trained:
    """Return a model with what left-out domains taught, its own or those of another seed."""
    return dataclasses.replace(
        trained,
        anchor_phi=taught.anchor_phi,
        predict_phi=taught.predict_phi,
        choice=taught.choice,
        config={**trained.config, "out_of_fold": taught.out_of_fold},
    )


def save(path: Path, trained: Trained) -> None:
    """Write a trained model as one file."""
    tensors, header = packed(trained)
    write_tensors(path, tensors, {"kind": "model", **header})


def packed(trained: Trained) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a trained model as tensors and plain values, from which `unpacked` makes it again."""
    nets = {"phi": trained.phi, "anchor_phi": trained.anchor_phi, "predict_phi": trained.predict_phi}
    tensors = _tensors({"model": trained.model, **nets})
    tensors |= {f"extras.{name}": value for name, value in trained.extras.items()}
    kept = ("backbone", "classes", "algorithm", "choice", "config", "provenance", "versions")
    header = {name: getattr(trained, name) for name in kept}
    header["preprocessing"] = dataclasses.asdict(trained.preprocessing)
    header["nets"] = {part: net.shape for part, net in nets.items() if net is not None}
    return tensors, header


def _tensors(parts: Mapping[str, nn.Module | None]) -> dict[str, Tensor]:
    """Return the tensors of all parts that there are, each by the name of its part and its own."""
    return {
        f"{part}.{name}": value
        for part, module in parts.items()
        if module is not None
        for name, value in module.state_dict().items()
    }


def unpacked(
    header: dict[str, Any], tensors: dict[str, Tensor], device: str | torch.device = "cpu"
) -> Trained:
    """Return the trained model that `packed` took apart, in evaluation mode on the device."""
    trained = _rebuild(header, tensors)
    trained.extras = {name: value.to(device) for name, value in trained.extras.items()}
    for module in (trained.model, trained.phi, trained.anchor_phi, trained.predict_phi):
        if module is not None:
            module.to(device).eval()
    return trained


def load(path: str | Path, device: str | torch.device = "cpu") -> Trained:
    """Return the trained model in a checkpoint, or in the checkpoint of a run's folder."""
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    tensors, header = read_tensors(path)
    if header.get("kind") != "model":
        raise CheckpointError(f"{path}: holds {OTHERS.get(str(header.get('kind')), OTHERS['state'])}")
    broken = next((name for name, value in tensors.items() if not value.isfinite().all()), None)
    if broken is not None:
        raise CheckpointError(f"{path}: its weights '{broken}' are not finite")
    device = usable(device)
    with _agreeing(path):
        return unpacked(header, tensors, device)


def usable(device: str | torch.device) -> torch.device:
    """Return a device that tensors can be put on here; raise in one line where it is none."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"no device '{device}' here ({reason}): choose 'cpu', or 'cuda' with a GPU"
        ) from None
    return found


def save_taught(path: Path, taught: Taught, of: str) -> None:
    """Write what left-out domains taught as a file of its own: it can go where a model is too large to go.

    `of` says which model it was taught for; whoever loads the file has to know.
    """
    nets = {"anchor_phi": taught.anchor_phi, "predict_phi": taught.predict_phi}
    header = {"choice": taught.choice, "out_of_fold": taught.out_of_fold, "versions": versions()}
    header["nets"] = {part: net.shape for part, net in nets.items()}
    write_tensors(path, _tensors(nets), {"kind": "taught", "of": of, **header})


def load_taught(path: Path, of: str, device: str | torch.device = "cpu") -> Taught:
    """Return what left-out domains taught for a model, from a file of its own."""
    tensors, header = read_tensors(path)
    if header.get("kind") != "taught":
        raise CheckpointError(f"{path}: does not hold what left-out domains taught: remove it")
    if header.get("of") != of:
        whose = header.get("of", "nobody knows which")
        raise CheckpointError(f"{path}: was taught for another model ({whose}, not {of}): remove it")
    device = usable(device)
    with _agreeing(path):
        nets = {part: net.to(device).eval() for part, net in _nets(header["nets"], tensors).items()}
        return Taught(**nets, choice=header["choice"], out_of_fold=header["out_of_fold"])


@contextmanager
def _agreeing(path: Path) -> Iterator[None]:
    """Turn whatever comes of a header that does not fit its tensors into one line about the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, VicinalError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: its weights and its header disagree ({reason})") from None


def _rebuild(header: dict[str, Any], tensors: dict[str, Tensor]) -> Trained:
    fields = header["preprocessing"]
    preprocessing = Preprocessing(
        fields["size"],
        fields["channels"],
        tuple(fields["mean"]),
        tuple(fields["std"]),
        fields.get("fit", "crop"),
    )
    classes = tuple(header["classes"])
    model = build_classifier(header["backbone"], len(classes), weights="none", preprocessing=preprocessing)
    _fill(model, "model", tensors)
    nets = _nets(header["nets"], tensors)
    kept = {
        name: header[name] for name in ("backbone", "algorithm", "choice", "config", "provenance", "versions")
    }
    kept["extras"] = {
        name.removeprefix("extras."): value for name, value in tensors.items() if name.startswith("extras.")
    }
    return Trained(model=model, classes=classes, preprocessing=preprocessing, **nets, **kept)


def _nets(shapes: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the nets of the shapes given, by part, with their weights."""
    kinds = {"phi": InferenceNet, "anchor_phi": StreamInferenceNet, "predict_phi": StreamInferenceNet}
    nets: dict[str, Any] = {part: kinds[part](**shape) for part, shape in shapes.items()}
    for part, net in nets.items():
        _fill(net, part, tensors)
    return nets


def _fill(module: nn.Module, part: str, tensors: dict[str, Tensor]) -> None:
    prefix = part + "."
    own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    kinds = {value.dtype for value in own.values() if value.is_floating_point()}
    if len(kinds) == 1:  # else every precision would come back as single
        module.to(kinds.pop())
    module.load_state_dict(own)


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """Write tensors and a JSON header to `path`, all or nothing."""
    ready = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    metadata = {HEADER: json.dumps({"format": FORMAT, **header}, sort_keys=True)}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
        temporary = Path(name)
        save_file(ready, temporary, metadata=metadata)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~umask())  # a temporary file is its owner's alone; a checkpoint is not
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        kept = "; the checkpoint that was there is intact" if path.exists() else ""
        raise CheckpointError(f"{path}: could not be written ({error}){kept}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def umask() -> int:
    """Return what new files are kept from by this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the JSON header of a file that `write_tensors` wrote."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(metadata[HEADER])
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not a safetensors file ({error}): remove it, or put another there"
        ) from None
    except KeyError:
        raise CheckpointError(f"{path}: a safetensors file, but not one of vicinal's") from None
    found = header.get("format") if isinstance(header, dict) else None
    if found != FORMAT:
        raise CheckpointError(f"{path}: format {found}; this version reads format {FORMAT}")
    return tensors, header
