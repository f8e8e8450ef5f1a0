"""Training algorithms, one file each; importing this room fills the registry."""

from vicinal.training.algorithms import erm, meta, neighbor, single_sample, ttt, ttt_pp

__all__ = ["erm", "meta", "neighbor", "single_sample", "ttt", "ttt_pp"]
