"""How frequent the classes of a stream are, by the predictions of a model that errs."""

import torch
from torch import Tensor
from torch.nn import functional as F

SHARPNESS = 2.0  # of the predictions that are counted
EVIDENCE = 4.0  # how soon unequal shares count as the stream's and not as errors
LEAST_SURE = 0.2  # a model that knows nothing has no shares to give
# Where two models agree on no more of a stream than this, neither can vouch for the other's shares ...
LEAST_AGREED = 0.5
AGREED = 0.75  # ... and from here on they are believed.
RARE = 1e-2  # of an equal share: a class never seen is as rare as that, and not impossible


def sharpened(logits: Tensor) -> Tensor:
    """Return y_i = softmax(2 logits_i), (..., N, C): between predictions, which are smeared, and counts.

    Counting each image for one class leaves out classes that are never the likeliest.
    """
    return (SHARPNESS * logits).softmax(-1)


def mean_square(y: Tensor) -> Tensor:
    """Return s = (1/N) sum_i sum_c y_ic^2: 1 for sure labels, 1/C for none at all."""
    return y.square().sum(-1).mean(-1)


def doubt_share(s: Tensor, u_0: float) -> Tensor:
    """Return min(1, u / u_0), u = 1 - s: the doubt in labels as a share of a doubt u_0 known from elsewhere.

    Of a model that knows how sure it can be, 1 - s grows and falls with its errors.
    """
    return ((1 - s) / max(u_0, torch.finfo(s.dtype).tiny)).clamp(0, 1)


def effective_images(begun: Tensor, window: float) -> Tensor:
    """Return n, the images that an average of them counts for, whose weights fall by e over a window.

    begun: the sum of all weights, 1 - exp(-images / w). n = 2 w begun / (2 - begun): all of a short stream,
    at most twice the window. Of a batch that is longer than the window it is too small.
    """
    return 2 * window * begun / (2 - begun)


def likely_shares(m: Tensor, s: Tensor, n: Tensor) -> Tensor:
    """Return pi, the shares that the classes of a stream are likely to have, (C,).

    m: shares in a model's labels of n images, s: their mean square.
    pi_c ~ (m_c + 0.01/C)^g, g = min(1/r, 4 sqrt(D)), D = (1/C) sum_c (C m_c - 1)^2 - (C - 1)/n where
    positive, r = (s - 1/C) / (1 - 1/C), at least 0.2.
    D is how unequal the shares are beyond chance, r how much of itself a label shows. Shares that are nearly
    equal differ more likely by errors than in truth: g < 1 levels them. Large differences are in the stream,
    smeared by all that is unsure: g > 1 brings them out, the more the less sure the labels are.
    """
    classes = m.shape[-1]
    if classes == 1:
        return torch.ones_like(m)
    chance = (classes - 1) / n
    unequal = (classes * m - 1).square().mean(-1).sub(chance).clamp_min(0)
    sure = ((s - 1 / classes) / (1 - 1 / classes)).clamp_min(LEAST_SURE)
    g = torch.minimum(1 / sure, EVIDENCE * unequal.sqrt())
    return (g.unsqueeze(-1) * (m + RARE / classes).log()).softmax(-1)


def equalizing_weights(c: Tensor, m: Tensor) -> Tensor:
    """Return w_i = (1/C) / m_(c_i), (N,): what images of classes c (N,) count where all classes count alike.

    m: the classes' shares in the stream these images come from, (C,). Along it the mean of w is 1.
    """
    return 1 / (m[c] * len(m))


def believed_shares(m: Tensor, a: Tensor) -> Tensor:
    """Return m' = 1/C + t (m - 1/C), t = (a - 1/2) / (1/4) from 0 to 1: equal shares, or those of a model.

    a: how often another model says the same. One that has collapsed onto a few classes, in a domain too far
    away, gives shares that look like a skewed stream's.
    """
    t = ((a - LEAST_AGREED) / (AGREED - LEAST_AGREED)).clamp(0, 1)
    return 1 / len(m) + t * (m - 1 / len(m))


def share_distance(m: Tensor) -> Tensor:
    """Return TV(m, 1/C) = (1/2) sum_c |m_c - 1/C|: what part of a stream has to change for equal shares."""
    return (m - 1 / len(m)).abs().sum() / 2


def share_divergence(logits: Tensor, predicted: Tensor, expected: Tensor, fade: float) -> Tensor:
    """Return how far the classes' shares in the predictions are from those expected, KL[pi || p_bar].

    p_bar = fade * predicted + (1 - fade) * mean_i p_i, an average along the stream that the batch joins.
    Divided by 1 - fade, so that the pull on the batch does not depend on how long the average is.
    """
    p_bar = fade * predicted + (1 - fade) * logits.softmax(-1).mean(-2)
    # Clamped at the smallest number alone: once the average has forgotten a class, it is called back.
    log_p_bar = p_bar.clamp_min(torch.finfo(p_bar.dtype).tiny).log()
    return F.kl_div(log_p_bar, expected, reduction="sum") / (1 - fade)


def gentle_divergence(logits: Tensor, expected: Tensor) -> Tensor:
    """Return how far the classes' shares in a batch are from those expected, KL[m || pi], m = mean_i p_i.

    Gentle, since it calls no class back that the batch does not have: a class of which m has nothing adds
    nothing, where `share_divergence` has no bound. With equal shares it is SHOT's diversity, up to log C.
    """
    m = logits.softmax(-1).mean(-2)
    tiny = torch.finfo(m.dtype).tiny
    return (m * (m.clamp_min(tiny).log() - expected.clamp_min(tiny).log())).sum(-1)
