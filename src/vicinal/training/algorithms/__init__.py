"""Training algorithms, one file each; importing this room fills the registry."""

from vicinal.training.algorithms import erm, meta, neighbor

__all__ = ["erm", "meta", "neighbor"]
