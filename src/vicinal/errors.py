"""Every error vicinal raises on purpose.

VicinalError
├── UnknownNameError   a method, backbone, algorithm or dataset that is not registered
├── ConfigError        settings that contradict each other or leave their range
├── DataError          images, folders or labels that cannot be used
├── CheckpointError    a file that is damaged, foreign or of another shape
├── TrainingError      training that cannot go on (a loss that is not finite)
└── AdapterError       an adapter called in a way it cannot serve
    ├── LayersError    a layer of somebody's own model that a method needs and that was not found
    └── CopyError      a model that cannot be copied

Each message is one line that says what is wrong and what to do. The command line prints it and exits with
code 2.
"""

from collections.abc import Iterable


class VicinalError(Exception):
    """Base of all errors that a user can cause and mend."""


class UnknownNameError(VicinalError):
    """A name that no registry knows; the message lists the names it does know."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = ", ".join(f"'{one}'" if "," in one else one for one in sorted(known))
        super().__init__(f"unknown {kind} '{name}': choose from {names}")


class ConfigError(VicinalError):
    """Settings that contradict each other or leave their range."""


class DataError(VicinalError):
    """Images, folders or labels that cannot be used."""


class CheckpointError(VicinalError):
    """A checkpoint that is damaged, foreign or of another shape."""


class TrainingError(VicinalError):
    """Training that cannot go on."""


class AdapterError(VicinalError):
    """An adapter called in a way it cannot serve."""


class LayersError(AdapterError):
    """A layer of somebody's own model that a method needs and that was not found."""


class CopyError(AdapterError):
    """A model that cannot be copied."""
