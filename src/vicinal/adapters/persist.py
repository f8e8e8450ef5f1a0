"""A stream to a file and back: it goes on, on another machine too, as if it had never stopped.

One safetensors file holds the source model with all that travels with it, the method, its settings and the
whole state: weights, statistics, optimizer, random generator, memory and, under guard, snapshots. Loading
reads tensors and JSON; it executes no code. Of a model that was not built here only the state is stored: its
owner brings it again.
"""

import hashlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vicinal.adapters.contract import Adapter
from vicinal.adapters.guard import GuardConfig, Guarded
from vicinal.adapters.methods import BARE, METHODS, Method, bare
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.adapters.watch import Limits
from vicinal.checkpoint import Trained, packed, read_tensors, unpacked, usable, write_tensors
from vicinal.data.augment import Augment
from vicinal.data.augmix import AugMix
from vicinal.errors import AdapterError, CheckpointError, UnknownNameError
from vicinal.models.wrap import Wrapped

KIND = "stream"
STATE = "state."


def save_adapter(path: str | Path, thing: Adapter | Guarded) -> None:
    """Write an adapter, or one under guard, with its source and its whole state as one file."""
    adapter = thing.adapter if isinstance(thing, Guarded) else thing
    source = adapter.source
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {
        "kind": KIND,
        "method": _name_of(adapter),
        "settings": encoded(adapter.settings),
        "guard": encoded(thing.config) if isinstance(thing, Guarded) else None,
        "device": adapter.generator.device.type,
        "drawn": _has_drawn(adapter),
    }
    if source.backbone == BARE:
        assert isinstance(adapter.model, Wrapped)
        header["layers"] = {"features": adapter.model.features_name, "head": adapter.model.head_name}
        header["weights"] = digest(_untouched(adapter))
    else:
        tensors, header["source"] = packed(source)
        tensors |= {name: value for name, value in _untouched(adapter).items() if name in tensors}
    header["state"] = flattened(thing.state_dict(), STATE, tensors)
    write_tensors(Path(path), tensors, header)


def load_adapter(
    path: str | Path, model: Trained | nn.Module | None = None, device: str | torch.device | None = None
) -> Adapter | Guarded:
    """Return the adapter in a file, ready for the next batch of its stream.

    `model` is the source again, needed where it was not built by vicinal and then adapted where it is; else
    `device` says where, by default the CPU.
    """
    path, where = Path(path), usable("cpu" if device is None else device)
    tensors, header = read_tensors(path)
    if header.get("kind") != KIND:
        raise CheckpointError(f"{path}: holds no adapter: read it with vicinal.load and adapt it")
    try:
        if model is not None and device is not None:
            raise AdapterError("a model is adapted where it is: move it there first, and leave device out")
        source = _source(path, header, tensors, model, where)
        entry = METHODS[header["method"]]
        with torch.inference_mode(False):
            adapter = entry.build(source, decoded(header["settings"], entry), False)
        guard = header["guard"]
        thing = adapter if guard is None else Guarded(adapter, rebuilt(guard, {GuardConfig, Limits}))
        _continue(path, thing, adapter, unflattened(header["state"], tensors), header)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, UnknownNameError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: its tensors and its header disagree ({reason})") from None
    return thing


def _source(
    path: Path,
    header: dict[str, Any],
    tensors: dict[str, Tensor],
    model: Trained | nn.Module | None,
    device: torch.device,
) -> Trained:
    if model is None:
        if "source" not in header:
            raise AdapterError(
                f"{path}: its model was not built by vicinal: pass it again, as in load_adapter(path, model)"
            )
        return unpacked(header["source"], tensors, device)
    if isinstance(model, Trained):
        return model
    layers = header.get("layers", {"features": None, "head": None})
    return bare(model, layers["features"], layers["head"])


def _check_weights(path: Path, adapter: Adapter, header: dict[str, Any]) -> None:
    """Raise if a model brought again is not the one that was saved: a reset would go back to another source.

    Files from before models were told apart say nothing of it.
    """
    if adapter.source.backbone == BARE and header.get("weights", "") not in ("", digest(_untouched(adapter))):
        raise AdapterError(
            f"{path}: was saved with a model of other weights: pass that one, as it was before it adapted"
        )


def digest(tensors: dict[str, Tensor]) -> str:
    """Return what tells tensors apart by name, shape, precision and every bit, on any device."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        found.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _continue(
    path: Path, thing: Adapter | Guarded, adapter: Adapter, state: dict[str, Any], header: dict[str, Any]
) -> None:
    """Put the state in, if it is of this model's shape and its random numbers can go on here."""
    for name, value in thing.state_dict().items():
        found = state.get(name)
        if isinstance(value, Tensor) and (not isinstance(found, Tensor) or found.shape != value.shape):
            there = tuple(found.shape) if isinstance(found, Tensor) else "missing"
            raise CheckpointError(
                f"{path}: does not fit this model, or is of another version of vicinal: "
                f"'{name}' is {there} in the file, {tuple(value.shape)} here"
            )
    _check_weights(path, adapter, header)
    device = adapter.generator.device.type
    if header["device"] != device:
        if header["drawn"]:
            raise AdapterError(
                f"{path}: its random numbers were drawn on {header['device']} and cannot go on on {device}: "
                f"load it there"
            )
        _replace_generators(state, adapter.generator.get_state())
    thing.load_state_dict(state)


def _replace_generators(state: Any, fresh: Tensor) -> None:
    """Put a generator state of this device wherever an unused one of another device stands."""
    if isinstance(state, dict):
        for name, value in state.items():
            if name == "generator":
                state[name] = fresh
            else:
                _replace_generators(value, fresh)
    elif isinstance(state, list | tuple):
        for value in state:
            _replace_generators(value, fresh)


def _name_of(adapter: Adapter) -> str:
    for name in METHODS:
        if METHODS[name].build is type(adapter):
            return name
    raise AdapterError(f"{type(adapter).__name__} is not registered: a file could not say how to build it")


def _has_drawn(adapter: Adapter) -> bool:
    """Say whether any random number has been drawn."""
    fresh = torch.Generator(device=adapter.generator.device).manual_seed(adapter.settings.seed)
    return not torch.equal(adapter.generator.get_state(), fresh.get_state())


def _untouched(adapter: Adapter) -> dict[str, Tensor]:
    """Return the source model's tensors as the adapter found them: their owner may have gone on with it."""
    source = adapter.source.model.state_dict()
    return {
        name: value.to(adapter.output_dtype if value.is_floating_point() else value.dtype)
        for name, value in adapter.initial_state.items()
        if isinstance(value, Tensor)
        and name.startswith("model.")
        and name.removeprefix("model.") in source
        and source[name.removeprefix("model.")].shape == value.shape
    }


def flattened(value: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """Return nested values with every tensor moved to `tensors` and named where it stood.

    A mapping becomes pairs, since its keys may be numbers.
    """
    if isinstance(value, Tensor):
        name = f"{prefix}{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        return {"pairs": [[key, flattened(item, prefix, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [flattened(item, prefix, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise AdapterError(f"a state may hold tensors and plain values, not {type(value).__name__}")


def unflattened(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return what `flattened` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "pairs":
        return {key: unflattened(item, tensors) for key, item in inside}
    items = [unflattened(item, tensors) for item in inside]
    return items if kind == "list" else tuple(items)


def encoded(settings: Any) -> Any:
    """Return settings as plain values; a dataclass inside them names its class."""
    if is_dataclass(settings):
        values = {item.name: encoded(getattr(settings, item.name)) for item in fields(settings)}
        return {"class": type(settings).__name__, "fields": values}
    if isinstance(settings, tuple):
        return [encoded(item) for item in settings]
    return settings


def decoded(value: Any, entry: Method) -> Settings:
    """Return the settings of a method that `encoded` was given."""
    inside = [getattr(entry.defaults, item.name) for item in fields(entry.defaults)]
    own = {type(part) for part in (entry.defaults, *inside) if is_dataclass(part)}
    settings: Settings = rebuilt(value, {StatisticsConfig, Augment, AugMix} | own)
    return settings


def rebuilt(value: Any, classes: set[Any]) -> Any:
    """Return what `encoded` was given; of dataclasses only these are built."""
    if isinstance(value, dict):
        kind = {known.__name__: known for known in classes}[value["class"]]
        return kind(**{name: rebuilt(item, classes) for name, item in value["fields"].items()})
    return tuple(rebuilt(item, classes) for item in value) if isinstance(value, list) else value
