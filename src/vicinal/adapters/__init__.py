"""Test-time methods, one file each; importing this room fills the registry."""

from vicinal.adapters import bn, erm, hard, labels, neighbor, probabilistic, soft, vnl, vnl_paper

__all__ = ["bn", "erm", "hard", "labels", "neighbor", "probabilistic", "soft", "vnl", "vnl_paper"]
