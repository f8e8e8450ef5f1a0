"""How far one model's predictions can be trusted beside another's, without labels."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Comparison(NamedTuple):
    """Sums over images that compare predictions with those of a reference; they add up over batches."""

    agreed: float  # weight of the images on which the two predict the same class
    weight: float  # weight of all images
    excess: float  # entropy of the predictions less that of the reference, in units of log C
    images: int
    mass: tuple[float, ...]  # probability of each class
    reference_mass: tuple[float, ...]
    votes: tuple[float, ...]  # images predicted as each class
    reference_votes: tuple[float, ...]

    @property
    def agreement(self) -> float:
        """The share of the weight on which the two predict the same class."""
        return self.agreed / self.weight

    @property
    def excess_entropy(self) -> float:
        """How much less certain than the reference, mean over images; 1 is from certain to uniform."""
        return self.excess / self.images

    @property
    def lost_diversity(self) -> float:
        """How much lower the entropy of the mean prediction is than the reference's, in units of log C."""
        return _spread(self.reference_mass) - _spread(self.mass)

    @property
    def share(self) -> float:
        """The share of the most common class: in the predictions or the reference's, whichever is larger."""
        return max(*self.votes, *self.reference_votes) / self.images


def entropy_of(p: Tensor) -> Tensor:
    """Return the entropy of each of the predictions p (N, C), in nats; of logits `entropies` is exact."""
    return -(p * p.clamp_min(torch.finfo(p.dtype).tiny).log()).sum(-1)


def mean_entropy(p: Tensor) -> Tensor:
    """Return the mean entropy of predictions p (N, C) in units of log C, between 0 and 1."""
    entropy = entropy_of(p).mean()
    return entropy / torch.tensor(float(max(p.shape[-1], 2))).log().to(entropy)


def information(p: Tensor) -> Tensor:
    """Return what predictions p (N, C) tell apart: I = H(mean p) - mean H(p), in units of its largest value.

    That is log min(N, C): every image certain, and all of them different. Predictions that are all alike, or
    all uncertain, tell nothing.
    """
    images, classes = p.shape
    total = mean_entropy(p.mean(0, keepdim=True)) - mean_entropy(p)
    return total * math.log(max(classes, 2)) / math.log(max(min(images, classes), 2))


def top_share(p: Tensor) -> Tensor:
    """Return the share of the batch whose most probable class is the batch's most common one."""
    return _votes(p.argmax(-1), p).amax() / len(p)


def compared(p: Tensor, reference: Tensor, power: float) -> Comparison:
    """Return how predictions p (N, C) compare with those of a reference.

    agreement = sum_i w_i [argmax p_i = argmax r_i] / sum_i w_i, w_i = (max_c r_ic)^power: what the reference
    is sure of counts, so that correcting its doubtful predictions is no disagreement.
    """
    confidence, expected = reference.max(-1)
    weights, found = confidence**power, p.argmax(-1)
    agreed = (weights * (found == expected)).sum()
    excess = (mean_entropy(p) - mean_entropy(reference)) * len(p)
    each = torch.stack([p.sum(0), reference.sum(0), _votes(found, p), _votes(expected, p)])
    sums = torch.cat([torch.stack([agreed, weights.sum(), excess]), each.flatten()]).tolist()
    classes = p.shape[-1]
    parts = [tuple(sums[3 + k * classes : 3 + (k + 1) * classes]) for k in range(4)]
    return Comparison(sums[0], sums[1], sums[2], len(p), *parts)


def together(comparisons: list[Comparison]) -> Comparison:
    """Return the comparison over the images of several batches."""
    columns = list(zip(*comparisons, strict=True))
    sums = [tuple(sum(values) for values in zip(*column, strict=True)) for column in columns[4:]]
    return Comparison(sum(columns[0]), sum(columns[1]), sum(columns[2]), int(sum(columns[3])), *sums)


def _votes(found: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(like.shape[-1]).index_add(0, found, like.new_ones(len(found)))


def _spread(mass: tuple[float, ...]) -> float:
    """Return the entropy of a distribution given up to its scale, in units of log C."""
    total = sum(mass)
    entropy = -sum(m / total * math.log(m / total) for m in mass if m > 0)
    return entropy / math.log(max(len(mass), 2))
