"""Options of a method as they were given on the command line, checked, and those that play no part."""

from typing import Any

from vicinal.adapters.methods import METHODS, configure, idle_note, settled
from vicinal.checkpoint import Trained
from vicinal.cli.console import method_options, say
from vicinal.errors import ConfigError


def given(method: str, statistics: str | None, lr: float | None, texts: list[str] | None) -> dict[str, Any]:
    """Return the options of a method that were given; those it does not know are refused by its name."""
    named = {name: value for name, value in (("statistics", statistics), ("lr", lr)) if value is not None}
    more = method_options(texts)
    for name in named.keys() & more.keys():
        raise ConfigError(f"{name} was given twice: leave out --{name} or --option {name}=...")
    try:
        configure(METHODS[method].defaults, named | more)
    except ConfigError as error:
        raise ConfigError(f"{method}: {error}") from None
    return named | more


def note_idle(
    trained: Trained, method: str, statistics: str | None, lr: float | None, texts: list[str] | None
) -> None:
    """Say so if options that were given play no part, as a step size where nothing is updated."""
    options = given(method, statistics, lr, texts)
    if (note := idle_note(method, settled(trained, method, options), options)) is not None:
        say(note, style="yellow")
