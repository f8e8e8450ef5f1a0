"""Comparisons of methods over seeds and targets."""
