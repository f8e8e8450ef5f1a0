"""vnl: entropy held by class shares or by nearest neighbors, on stream statistics; the default.

Departs from the paper in five ways, each measured (docs/experiments.md): a frozen source model, the anchor,
teaches the model how frequent the classes are, not which image is which, where the model soon knows better;
steps become shorter along the stream, and are so where the anchor has fewer doubts than such models had when
the step size was chosen; predictions run on stream statistics; the updated model's batch is predicted by
neighbor labels; and phi is fitted on predictions of models that never saw the domain it labels. Which of
these is used was chosen on left-out domains.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vicinal.adapters.agreement import Agreement
from vicinal.adapters.contract import Adapter
from vicinal.adapters.labeler import StreamLabeler
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.neighborhood import Neighborhood
from vicinal.adapters.passes import Loss, as_logits, optimizer_for, predict, update
from vicinal.adapters.statistics import NormStatistics
from vicinal.adapters.vnl_settings import WITH_ANCHOR, WITH_SHARES, VnlSettings
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError
from vicinal.functional.losses import prediction_entropy, soft_cross_entropy
from vicinal.functional.neighbors import side_by_side
from vicinal.functional.shares import (
    doubt_share,
    effective_images,
    gentle_divergence,
    likely_shares,
    mean_square,
    share_divergence,
    sharpened,
)
from vicinal.graphs import Branch
from vicinal.models.inference import StreamInferenceNet
from vicinal.models.wrap import copied


class Seen(NamedTuple):
    """What the anchor sees in a batch."""

    z: Tensor  # features (N, d)
    logits: Tensor  # (N, C)


@register(
    "vnl",
    VnlSettings(),
    Traits(
        paper="vicinal, after Ambekar et al. 2024",
        updates="all parameters, if left-out domains say so",
        training="phi and the rule on left-out domains; none where its own output predicts",
        passes="3 forward, 1 backward",
    ),
)
class Vnl(Adapter):
    """Entropy held to class shares by a frozen source model, or by nearest neighbors, on stream statistics.

    Loss, by `update`:

    - "marginal": entropy_weight H(p) + marginal_weight KL[pi || p_bar]
    - "neighbors": entropy_weight H(p) + neighbor_weight CE(y_near, p) + share_weight KL[m || p_bar]
    - "anchored": entropy_weight H(p) + anchor_weight CE(y_anchor, p)
    - "entropy": entropy_weight H(p)
    - "none": nothing is updated

    p_bar: the classes' shares along the stream in the model's predictions; pi: those that it is likely to
    have by the predictions of a frozen source model, the anchor (`vicinal.functional.shares`); y_near: votes
    of nearest neighbors among the last images of the stream (`vicinal.functional.neighbors`); m: the batch's
    mean prediction; y_anchor: the anchor's neighbor labels.

    Steps of lr / (1 + seen / horizon) after so many images; of "marginal", times min(1, u / doubt), u how
    much the anchor doubts its predictions of the stream, `doubt` how much left-out models did on the streams
    on which lr was chosen. Whether and how it updates, the step size, whether Adam's momentum starts from
    rest, and who predicts (own output, labels by phi or votes of neighbors) were chosen there too; a model
    without left-out models takes the defaults and predicts by its own output.

    Prediction after the update. Votes that predict may be taken in several `rounds`, and by features of model
    and anchor together (`joint`). With `agreement`, logits are divided by the temperature at which the last
    predictions are as unsure as they are likely to be wrong, by how often the anchor differs
    (`vicinal.functional.calibration`).
    """

    steady = True
    predicts = ("own", "labels", "neighbors")
    settings: VnlSettings
    # With update="neighbors" or "marginal", averages along the stream:
    counted: Tensor  # the classes' shares in the anchor's sharpened predictions; from zero, as Adam's are
    sureness: Tensor  # the mean square of these predictions, likewise
    predicted: Tensor  # the classes' shares in the model's predictions, from equal ones

    def prepare(self, source: Trained) -> None:
        """Set up the anchor, the labelers of anchor and model, and the optimizer."""
        head = self.model.linear
        if self.settings.predict == "labels":
            self.labeler = StreamLabeler(fitted(source.predict_phi), head)
        if self.has_neighbors:
            spaces = 2 if self.looks_twice else 1
            self.neighborhood = Neighborhood(self.settings.crowd_size(len(head.bias)), head, spaces)
        if self.has_anchor:
            self.anchor = copied(self.model).eval().requires_grad_(False)
            self.anchor_norm = NormStatistics(self.anchor, self.settings.statistics, beside=self.norm)
        if self.settings.update == "anchored":
            self.anchor_labeler = StreamLabeler(fitted(source.anchor_phi), head)
        shares = torch.zeros_like(head.bias.detach())
        if self.heeds_agreement:
            self.agreement = Agreement(self.settings.agreement_window, shares)
        if self.settings.update in WITH_SHARES:
            self.register_buffer("predicted", torch.full_like(shares, 1 / len(shares)))
        if self.settings.update == "marginal":
            self.register_buffer("counted", shares)
            self.register_buffer("sureness", shares.new_zeros(()))
        if self.settings.update != "none":
            self.optimizer = optimizer_for(self)

    def adapt(self, x: Tensor) -> Tensor:
        """Update on the batch, then predict it, by labels or not, as sure as the settings say."""
        seen = None if self.settings.update == "none" else self._learn(x)
        z, logits = predict(self, x)
        y_hat = self._labels(z, logits, seen)
        if self.has_neighbors:
            self.neighborhood.keep(self._beside(z, seen), logits.softmax(-1))
        found = logits if y_hat is None else as_logits(y_hat)
        if not self.heeds_agreement:
            return found
        settings, says = self.settings, None if seen is None else seen.logits.argmax(-1)
        T: Tensor = self.agreement(found, says, settings.agreement, settings.agreement_prior)
        return found / T

    @property
    def has_neighbors(self) -> bool:
        """Whether nearest neighbors have a say, in updates or in predictions."""
        return "neighbors" in (self.settings.predict, self.settings.update)

    @property
    def heeds_agreement(self) -> bool:
        """Whether predictions are as sure as they agree with the source; not updated, they are the source."""
        return self.settings.agreement > 0 and self.settings.update != "none"

    @property
    def looks_twice(self) -> bool:
        """Whether neighbors are near by the anchor's features too; not updated, the model is the anchor."""
        return self.settings.joint and self.has_neighbors and self.settings.update != "none"

    @property
    def has_anchor(self) -> bool:
        """Whether a frozen source model goes along."""
        return self.settings.update in WITH_ANCHOR or self.heeds_agreement or self.looks_twice

    @property
    def divided_by(self) -> float | Tensor:
        """What the last logits were divided by, to be as sure as they should be."""
        given = super().divided_by
        return given * self.agreement.temperature if self.heeds_agreement else given

    def _labels(self, z: Tensor, logits: Tensor, seen: Seen | None) -> Tensor | None:
        """Return the labels that predict a batch, by nearest neighbors or by phi; None: own output does."""
        if self.settings.predict == "neighbors":
            self._check(logits)
            return self._voted(self._beside(z, seen), logits, self.settings.rounds)
        if self.settings.predict == "own":
            return None
        draws = self.settings.num_samples
        y_hat: Tensor = self.labeler(z, logits, self.model.linear, draws, self.generator)
        self.draws = self.labeler.draws
        return y_hat

    def _learn(self, x: Tensor) -> Seen | None:
        """Update on the batch; return what the anchor sees in it, where there is one."""
        with Branch(x.device) as branch:  # the anchor's pass beside the model's own
            seen = self._by_anchor(x) if self.has_anchor else None
            held = self._held(seen, len(x))

        def loss(z: Tensor, logits: Tensor) -> Tensor:
            branch.join()
            self._check(logits)
            entropy = self.settings.entropy_weight * prediction_entropy(logits)
            return entropy if held is None else entropy + held(z, logits)

        for _ in range(self.settings.steps):
            logits = update(self, x, loss)
        if self.settings.update in WITH_SHARES:
            self._join("predicted", logits.softmax(-1).mean(0), len(x))
        return seen

    @torch.no_grad()
    def _by_anchor(self, x: Tensor) -> Seen:
        """Return features and logits of a batch by the anchor, on statistics of its own."""
        self.anchor_norm.begin()
        with self.anchor_norm.predicting(len(x)):
            z, logits = self.anchor.features_and_logits(x)
        self._check(logits)
        return Seen(z, logits)

    def _check(self, logits: Tensor) -> None:
        """Raise if classes are counted and the linear layer that was found has others than the logits."""
        found, counted = len(self.model.linear.bias), self.settings.update in WITH_SHARES
        if (counted or self.has_neighbors or self.heeds_agreement) and logits.shape[-1] != found:
            raise AdapterError(
                f"the model returns {logits.shape[-1]} logits and its last linear layer {found}: "
                "name its classifier, as in adapt(model, 'vnl', head='classifier.3')"
            )

    def _held(self, seen: Seen | None, images: int) -> Loss | None:
        """Return what holds the entropy, of z and logits: neighbors, or what an anchor has seen."""
        settings = self.settings
        if settings.update == "neighbors":
            return partial(self._by_neighbors, seen)
        if settings.update not in WITH_ANCHOR or seen is None:
            return None
        if settings.update == "anchored":
            y_anchor = self._anchor_labels(*seen)
            return lambda z, logits: settings.anchor_weight * soft_cross_entropy(logits, y_anchor)
        pi, fade = self._expected(seen.logits), self._fade(images)
        weight = settings.marginal_weight
        return lambda z, logits: weight * share_divergence(logits, self.predicted, pi, fade)

    def _by_neighbors(self, seen: Seen | None, z: Tensor, logits: Tensor) -> Tensor:
        """Return CE(y_near, p) and KL[m || p_bar], weighted: what neighbors say, and the classes' shares."""
        settings = self.settings
        label = soft_cross_entropy(logits, self._voted(self._beside(z, seen), logits, 1))
        return settings.neighbor_weight * label + settings.share_weight * gentle_divergence(
            logits, self.predicted
        )

    @torch.no_grad()
    def _beside(self, z: Tensor, seen: Seen | None) -> Tensor:
        """Return by which features neighbors are sought: the model's, with the anchor's beside or without."""
        return z if not self.looks_twice or seen is None else side_by_side(z, seen.z)

    @torch.no_grad()
    def _voted(self, z: Tensor, logits: Tensor, rounds: int) -> Tensor:
        """Return the labels of a batch by its nearest neighbors."""
        settings = self.settings
        y_near: Tensor = self.neighborhood(
            z, logits.softmax(-1), settings.neighbors, settings.tau, settings.voted, rounds
        )
        return y_near

    @torch.no_grad()
    def _anchor_labels(self, z: Tensor, logits: Tensor) -> Tensor:
        """Return y_hat by the anchor, with a memory of its own."""
        draws = self.settings.num_samples
        y_hat: Tensor = self.anchor_labeler(z, logits, self.anchor.linear, draws, self.generator)
        self.draws = self.anchor_labeler.draws
        return y_hat

    @torch.no_grad()
    def _expected(self, logits: Tensor) -> Tensor:
        """Return pi, the shares the classes of the stream are likely to have, this batch included."""
        y = sharpened(logits)
        self._join("counted", y.mean(0), len(y))
        self._join("sureness", mean_square(y), len(y))
        m, s = self.counted / self._begun, self.sureness / self._begun
        return likely_shares(m, s, effective_images(self._begun, self._window))

    @property
    def _begun(self) -> Tensor:
        """Return what the averages, from zero, have come to: labels sum to 1."""
        return self.counted.sum()

    @torch.no_grad()
    def step_share(self) -> Tensor | None:
        """Return how much of its length a step has, by images seen and by the anchor's doubts so far."""
        share, u_0 = super().step_share(), self.settings.doubt
        if self.settings.update != "marginal" or u_0 is None:
            return share
        less = doubt_share(self.sureness / self._begun, u_0)
        return less if share is None else share * less

    @property
    def _window(self) -> float:
        """Return over how many images shares are averaged."""
        settings = self.settings
        each = settings.share_window if settings.update == "neighbors" else settings.window
        return each * len(self.predicted)

    def _fade(self, images: int) -> float:
        """Return what is left of the averages after so many images."""
        return math.exp(-images / self._window)

    @torch.no_grad()
    def _join(self, name: str, value: Tensor, images: int) -> None:
        """Let a batch join an average along the stream."""
        average, fade = self.get_buffer(name), self._fade(images)
        average.copy_(fade * average + (1 - fade) * value)


def fitted(phi: StreamInferenceNet | None) -> StreamInferenceNet:
    """Return a phi that is there, or say how to get one."""
    if phi is None:
        raise AdapterError("this model has no out-of-fold phi: train it again without --no-out-of-fold")
    return phi
