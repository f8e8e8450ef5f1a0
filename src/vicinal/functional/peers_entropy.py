"""Losses of the methods that learn from their own confidence: confident labels, information, balance."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.functional.losses import prediction_entropy


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the values that the mask keeps; 0, with a gradient of 0, where it keeps none."""
    weight = mask.to(values.dtype)
    return (values * weight).sum() / weight.sum().clamp_min(1)


def confident_cross_entropy(logits: Tensor, told: Tensor, threshold: float) -> Tensor:
    """Return the cross-entropy with the argmax of `told`, a mean over samples it is confident of.

    -(1/|S|) sum_{i in S} log p[i, argmax_c q[i, c]], S = {i: max_c q[i, c] > threshold}, q = softmax(told).
    """
    confidence, label = told.detach().softmax(-1).max(-1)
    return masked_mean(F.cross_entropy(logits, label, reduction="none"), confidence > threshold)


def information_maximization(logits: Tensor, floor: float) -> Tensor:
    """Return the mean entropy less the entropy of the mean prediction.

    (1/N) sum_i H(p_i) + sum_c m_c log(m_c + floor), m = (1/N) sum_i p_i: sure of each, yet of all classes.
    """
    marginal = logits.softmax(-1).mean(0)
    return prediction_entropy(logits) + (marginal * (marginal + floor).log()).sum()


def balance_weights(p: Tensor, frequency: Tensor) -> Tensor:
    """Return a weight a sample (N,), one over the frequency of its predicted class; their mean is 1."""
    common = frequency[p.argmax(-1)].clamp_min(torch.finfo(p.dtype).tiny)
    weight = common.min() / common  # at most 1, however rare a class has become
    return weight / weight.mean()
