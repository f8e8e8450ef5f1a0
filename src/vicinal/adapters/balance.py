"""What every image counts in statistics of a stream in which all classes are to count the same.

An average over a stream holds what the domain looks like and also how frequent the classes are in it, and
takes the one for the other: where classes are skewed, a net on it is worse than on the source's. So an image
counts the less the more frequent its class is, and of classes that are hardly there the source's statistics
stand in. Classes are those of the frozen source model on its own statistics, which no stream can skew.
"""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vicinal.errors import AdapterError
from vicinal.functional.normalization import Moments, mix, stream_weight, transport, weighted_moments
from vicinal.functional.shares import equalizing_weights, share_distance
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped


class Weighed(NamedTuple):
    """What is known of a batch before it joins the statistics."""

    each: Tensor  # (N,), what every image counts; one number for all where nothing is known of them
    shares: Tensor  # (C,), of the classes along the stream, this batch included
    missing: Tensor  # how far these are from equal ones


class Part(NamedTuple):
    """What a layer runs on, after what it is made of."""

    batch: Moments
    average: Moments  # the stream's
    home: Moments  # the source's, where updates have carried them
    used: Moments


class ClassBalance(nn.Module):
    """The source model as it is, and how frequent the classes of the stream are by its predictions."""

    shares: Tensor  # from equal ones, averaged as the statistics are
    seen: Tensor  # images so far

    def __init__(self, model: Classifier | Wrapped, source_images: int, floor: float) -> None:
        super().__init__()
        self.source = copy.deepcopy(model).eval().requires_grad_(False)
        self.source_images, self.floor = source_images, floor
        bias = model.linear.bias.detach().double()
        self.register_buffer("shares", torch.full_like(bias, 1 / len(bias)))
        self.register_buffer("seen", torch.zeros_like(bias[0]))

    @torch.no_grad()
    def weigh(self, x: Tensor) -> Weighed:
        """Return what the images of a batch count; nothing is kept of it yet."""
        logits = self.source(x)
        if logits.shape[-1] != len(self.shares):
            raise AdapterError(
                f"the model returns {logits.shape[-1]} logits and its last linear layer {len(self.shares)}: "
                "name its classifier, as in adapt(model, method, head='classifier.3')"
            )
        c = logits.argmax(-1)
        here = torch.zeros_like(self.shares).index_add_(0, c, torch.ones_like(c, dtype=torch.double)) / len(c)
        m = self.shares.lerp(here, stream_weight(len(x), self.seen, self.source_images, self.floor))
        return Weighed(equalizing_weights(c, m), m, share_distance(m))

    def unweighed(self) -> Weighed:
        """Return what is known of images that nobody has looked at: all count alike."""
        return Weighed(torch.ones_like(self.seen).unsqueeze(0), self.shares, share_distance(self.shares))

    @torch.no_grad()
    def keep(self, weighed: Weighed, images: int) -> None:
        """Remember a batch that has joined the statistics."""
        self.shares.copy_(weighed.shares)
        self.seen += images


def part_of(
    x: Tensor, weighed: Weighed, average: Moments, home: Moments, share: Tensor, before: Moments | None
) -> Part:
    """Return what a layer runs on with what it is fed, x, in its average: mix(average, home, missing).

    x may hold several views of the batch, one after the other. `before`: its moments before an update, by
    which both averages are carried along.
    """
    each = weighed.each if len(x) % len(weighed.each) == 0 else torch.ones_like(weighed.each[:1])
    batch = weighted_moments(x, each.repeat(len(x) // len(each)))
    if before is not None:
        average, home = transport(average, before, batch), transport(home, before, batch)
    average = mix(average, batch, share)
    return Part(batch, average, home, mix(average, home, weighed.missing))
