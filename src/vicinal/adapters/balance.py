"""What every image counts in statistics of a stream in which all classes are to count the same.

An average over a stream holds what the domain looks like and also how frequent the classes are in it, and
takes the one for the other: where classes are skewed, a net on it is worse than on the source's. So an image
counts the less the more frequent its class is, and of classes that are hardly there the source's statistics
stand in. Classes are those of the frozen source model on its own statistics, which no stream can skew; they
are believed as far as the adapted model comes to the same, since far from the sources it is the source model
that fails, and takes everything for a few classes. All this is for some ten classes: of a thousand most are
missing from any stream of hundreds, and the source's statistics then stand in for half.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vicinal.errors import AdapterError
from vicinal.functional.normalization import Moments, mix, stream_weight, transport, weighted_moments
from vicinal.functional.shares import AGREED, believed_shares, equalizing_weights, share_distance
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped, copied


class Weighed(NamedTuple):
    """What is known of a batch before it joins the statistics."""

    each: Tensor  # (N,), what every image counts; one number for all where nothing is known of them
    missing: Tensor  # how far the shares that are believed are from equal ones
    shares: Tensor  # (C,), of the classes along the stream, this batch included
    c: Tensor | None = None  # (N,), the classes by the source model

    def seen_in(self, views: int) -> "Weighed":
        """Return the same of a pass that holds so many views of the batch, one after the other."""
        return self if views == 1 else self._replace(each=self.each.repeat(views))


class Part(NamedTuple):
    """What a layer runs on, after what it is made of."""

    batch: Moments
    average: Moments  # the stream's
    home: Moments  # the source's, where updates have carried them
    used: Moments


class ClassBalance(nn.Module):
    """The source model as it is, and how frequent the classes of the stream are by its predictions."""

    shares: Tensor  # from equal ones, averaged as the statistics are
    agreed: Tensor  # how often the adapted model has said the same; from so often that it is believed
    seen: Tensor  # images so far

    def __init__(self, model: Classifier | Wrapped, source_images: int, floor: float) -> None:
        super().__init__()
        self.source = copied(model).eval().requires_grad_(False)
        self.source_images, self.floor = source_images, floor
        try:
            bias = model.linear.bias.detach().double()
        except AdapterError:
            raise AdapterError(
                "balanced statistics count classes and need the model's linear classifier: name it, as in "
                "adapt(model, method, head='classifier.3')"
            ) from None
        self.register_buffer("shares", torch.full_like(bias, 1 / len(bias)))
        self.register_buffer("agreed", torch.full_like(bias[0], AGREED))
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
        shares = self.shares.lerp(here, self._weight(len(c)))
        m = believed_shares(shares, self.agreed)
        return Weighed(equalizing_weights(c, m), share_distance(m), shares, c)

    def unweighed(self) -> Weighed:
        """Return what is known of images that nobody has looked at: all count alike."""
        m = believed_shares(self.shares, self.agreed)
        return Weighed(torch.ones_like(self.seen).unsqueeze(0), share_distance(m), self.shares)

    @torch.no_grad()
    def keep(self, weighed: Weighed, logits: Tensor) -> None:
        """Remember a batch, and how often its prediction is what the source model says."""
        if weighed.c is None:
            return
        same = (weighed.c == logits.argmax(-1)).double().mean()
        self.agreed.lerp_(same, self._weight(len(logits)))
        self.shares.copy_(weighed.shares)
        self.seen += len(logits)

    def _weight(self, images: int) -> Tensor:
        return stream_weight(images, self.seen, self.source_images, self.floor)


def part_of(
    x: Tensor, weighed: Weighed, average: Moments, home: Moments, share: Tensor, before: Moments | None
) -> Part:
    """Return what a layer runs on with what it is fed, x, in its average: mix(average, home, missing).

    x may have several rows an image, as of nets that fold places into them. `before`: the batch's moments
    before an update, by which both averages are carried along.
    """
    each, rest = weighed.each, len(x) % len(weighed.each)
    each = torch.ones_like(each[:1]) if rest else each  # nobody knows whose rows these are
    batch = weighted_moments(x, each.repeat_interleave(len(x) // len(each)))
    if before is not None:
        average, home = transport(average, before, batch), transport(home, before, batch)
    average = mix(average, batch, share)
    return Part(batch, average, home, mix(average, home, weighed.missing))
