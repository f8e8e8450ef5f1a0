"""Predictions with what is known of their certainty."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vicinal.functional.trust import entropy_of


class Prediction(NamedTuple):
    """What an adapter says of the images of a batch, one value an image."""

    label: Tensor  # (N,) the most probable class
    probability: Tensor  # (N,) of that class
    entropy: Tensor  # (N,) of the distribution over classes, in nats
    spread: Tensor | None  # (N,) standard deviation of that probability over draws of w; None without draws


class Predictor(Protocol):
    """An adapter, or one under guard."""

    @property
    def draws(self) -> Tensor | None:
        """Probabilities (S, N, C) by each draw of w."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits (N, C)."""


@torch.no_grad()
def predict(adapter: Predictor, x: Tensor) -> Prediction:
    """Return label, probability, entropy and spread of each image, after adapting to the batch.

    The spread is sqrt(mean_s (p_s - mean p)^2), p_s what draw s of the latent classifier w gives the
    predicted class. Where w labels the update and the model predicts, these are the draws behind the labels.
    """
    p = adapter(x).float().softmax(-1)
    probability, label = p.max(-1)
    draws, spread = adapter.draws, None
    if draws is not None and len(draws) > 1 and draws.shape[1] == len(label):
        of_label = draws.float().gather(-1, label.expand(len(draws), -1).unsqueeze(-1)).squeeze(-1)
        spread = of_label.std(0, correction=0)
    return Prediction(label, probability, entropy_of(p), spread)
