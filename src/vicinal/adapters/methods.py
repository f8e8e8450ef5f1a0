"""The methods there are: registered by name, configured by options, set up on any model."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from vicinal.adapters.contract import Adapter
from vicinal.adapters.settings import OF_STEPS, Settings
from vicinal.adapters.statistics import KINDS, StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError, ConfigError, CopyError, LayersError
from vicinal.models.backbones import Preprocessing
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped
from vicinal.registry import Registry

BARE = "somebody's own"  # the backbone of a model that was not built here
SURENESS = ("output_temperature", "agreement")  # options that hold for the statistics they were fitted on


@dataclass(frozen=True)
class Traits:
    """What a reader wants to know of a method before choosing it; docs/methods/README.md shows it."""

    paper: str = ""  # authors and year
    updates: str = "all parameters"
    source_data: str = "none"  # what of the source data it needs at test time
    training: str = "none"  # what training has to do for it
    batch_of_one: str = "on the average over the stream"
    norms: str = "any"  # kinds of normalization layers it works with
    passes: str = "2 forward, 1 backward"  # for each batch, at the defaults


@dataclass(frozen=True)
class Method:
    """A registered method: how to build it, what it starts from, and a line about it."""

    build: type[Adapter]
    defaults: Settings
    summary: str
    traits: Traits


METHODS: Registry[Method] = Registry("method")
A = TypeVar("A", bound=type[Adapter])


def register(name: str, defaults: Settings, traits: Traits | None = None) -> Callable[[A], A]:
    """Return a decorator that files an adapter under `name`; its docstring's first line is the summary."""

    def file(adapter: A) -> A:
        summary = (adapter.__doc__ or "").strip().splitlines()[0]
        METHODS.register(name)(Method(adapter, defaults, summary, traits or Traits()))
        return adapter

    return file


def configure(defaults: Settings, options: dict[str, Any]) -> Settings:
    """Return the settings with the options put in; `statistics` may be just the name of a kind."""
    known = {item.name for item in fields(defaults)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown option {', '.join(unknown)}: choose from {', '.join(sorted(known))}")
    asked: Any = options.get("statistics", defaults.statistics)
    if isinstance(asked, str):
        kind: Any = asked
        options = {**options, "statistics": replace(defaults.statistics, kind=kind)}
    elif not isinstance(asked, StatisticsConfig):
        raise ConfigError(f"statistics takes {', '.join(KINDS)} or a StatisticsConfig, not {asked!r}")
    return replace(defaults, **_by_name(options))


def _by_name(options: dict[str, Any]) -> dict[str, Any]:
    """Return options in which what has two names goes by one."""
    return {**options, "predict": "own"} if options.get("predict") == "after" else options


def told(settings: Settings) -> dict[str, Any]:
    """Return what tells settings apart, as plain values: a method that learns to do more keeps their name.

    An option that came later is left out while it has its default, which changes nothing of what was done.
    """
    defaults = {item.name: item.default for item in fields(settings) if item.name in settings.later}
    return {name: value for name, value in asdict(settings).items() if defaults.get(name, ...) != value}


def servable(source: Trained) -> list[str]:
    """Return the methods this model has everything for."""
    found = []
    for name in METHODS:
        try:
            adapt(source, name)
        except AdapterError:
            continue
        found.append(name)
    return found


def adapt(
    source: Trained | nn.Module,
    method: str = "vnl",
    *,
    features: str | None = None,
    head: str | None = None,
    inplace: bool = False,
    **options: Any,
) -> Adapter:
    """Return a live adapter of a trained model, or of any classifier; see `vicinal.adapters.asked.adapt`."""
    entry = METHODS[method]
    trained = source if isinstance(source, Trained) else bare(source, features, head)
    if isinstance(source, Trained) and (features or head):
        raise ConfigError("features and head are for models of your own: a trained one knows its layers")
    settings = settled(trained, method, options)
    try:
        with torch.inference_mode(False):  # tensors made in that mode could never be updated
            return entry.build(trained, settings, inplace)
    except CopyError:
        raise  # no training would help
    except AdapterError as error:
        # What can do without its training there misses a layer, not the training.
        lacks_layer = isinstance(error, LayersError) and entry.defaults.fallbacks(trained)
        if trained.backbone != BARE or entry.traits.training == "none" or lacks_layer:
            raise
        raise AdapterError(
            f"method '{method}' needs a model trained by vicinal ({entry.traits.training}): "
            "for a model of your own choose one that needs no training, as in adapt(model, 'tent')"
        ) from None


def settled(trained: Trained, method: str, options: Mapping[str, Any]) -> Settings:
    """Return the settings of a method on a model: options given, over what was chosen, over its defaults."""
    entry, options = METHODS[method], _by_name(dict(options))
    chosen = what_holds(trained, method, options)
    return configure(entry.defaults, {**entry.defaults.fallbacks(trained), **chosen, **options})


def what_holds(trained: Trained, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what left-out domains chose for a method, but for what says nothing once options differ."""
    entry, options = METHODS[method], _by_name(dict(options))
    chosen = _by_name(_chosen(trained, method, options))
    settings = configure(entry.defaults, {**entry.defaults.fallbacks(trained), **chosen, **options})
    changed = {name for name, value in options.items() if chosen.get(name, _default(entry, name)) != value}
    changed -= {*idle(entry, settings)}
    void = {name for name, others in entry.defaults.chosen_with.items() if not changed.isdisjoint(others)}
    return {name: value for name, value in chosen.items() if name not in void}


def idle(entry: Method, settings: Settings) -> tuple[str, ...]:
    """Return the options that play no part in a method as it is told to run."""
    return settings.idle if entry.build.takes_steps else (*settings.idle, *OF_STEPS)


def idle_note(method: str, settings: Settings, given: Iterable[str]) -> str | None:
    """Return a line that names the options given that play no part; None where all do."""
    names = [name for name in given if name in idle(METHODS[method], settings)]
    return (
        f"{method}: {', '.join(names)} {'plays' if len(names) == 1 else 'play'} no part here"
        if names
        else None
    )


def _chosen(trained: Trained, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what left-out domains chose for a method, on the kind of statistics that it runs on.

    Balanced ones are an average over the stream too: where nothing was chosen on them, step sizes and rule of
    these serve, though not how sure predictions are then.
    """
    asked = options.get("statistics", METHODS[method].defaults.statistics.kind)
    kind = asked.kind if isinstance(asked, StatisticsConfig) else str(asked)
    chosen: dict[str, dict[str, Any]] = trained.choice.get("methods", {}).get(method, {})
    if kind != "balanced" or kind in chosen:
        return chosen.get(kind, {})
    return {name: value for name, value in chosen.get("stream", {}).items() if name not in SURENESS}


def _default(entry: Method, name: str) -> Any:
    return getattr(entry.defaults, name, None)


def bare(net: nn.Module, features: str | None = None, head: str | None = None) -> Trained:
    """Return somebody's classifier as a trained model about which nothing else is known."""
    if not isinstance(net, nn.Module):
        raise AdapterError(f"expected a model, an nn.Module or what vicinal.load returns, got {net!r}")
    if any(isinstance(module, Adapter) for module in net.modules()):
        raise AdapterError("this is an adapter already: adapt the model it was made of")
    if not any(True for _ in net.parameters()):
        raise AdapterError("this model has no parameters: there is nothing to adapt")
    if any(isinstance(module, torch.jit.ScriptModule) for module in net.modules()):
        raise AdapterError("a TorchScript module hides its layers: pass the nn.Module it was made from")
    broken = _broken(net)
    if broken is not None:
        raise AdapterError(f"the weights '{broken}' of this model are not finite: load it again")
    model = cast(Classifier, Wrapped(net, features, head))
    nothing = Preprocessing(size=0, channels=model.channels or 0, mean=(), std=())
    return Trained(model, BARE, classes=(), preprocessing=nothing, algorithm="unknown")


def _broken(net: nn.Module) -> str | None:
    """Return the name of weights or statistics that nothing can be computed with; None where there are none.

    A buffer may also be a mask, and have minus infinity where it hides something.
    """
    weights = {name for name, _ in net.named_parameters()}
    for name, value in net.state_dict().items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            sound = value.isfinite() if name in weights else value < torch.inf
            if not bool(sound.all()):
                return name
    return None
