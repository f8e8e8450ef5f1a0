"""MEMO: every image for itself, the entropy of its mean prediction over augmented views."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.layers import batch_norms, mixed_norm
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, take_step
from vicinal.adapters.settings import Settings
from vicinal.adapters.statistics import StatisticsConfig
from vicinal.checkpoint import Trained
from vicinal.data.augment import Augment, Draws
from vicinal.data.augmix import AugMix, MixDraws
from vicinal.errors import ConfigError
from vicinal.functional.normalization import blend_weight
from vicinal.functional.peers_consistency import marginal_entropy


@dataclass(frozen=True)
class MemoSettings(Settings):
    """What `memo` can be told besides what every method can."""

    # The source's statistics count as 16 images against the one at hand: prior strength 16 of the code.
    statistics: StatisticsConfig = field(default_factory=lambda: StatisticsConfig("blend", source_images=16))
    lr: float = 2.5e-4  # of the code for ResNet-50 on ImageNet
    optimizer: Literal["adam", "sgd"] = "sgd"
    momentum: float = 0.0  # the code's plain SGD
    augment: Augment | AugMix | None = field(default_factory=AugMix)
    views: int = 32  # augmented copies of an image: 32 for CIFAR-10 in the paper, 64 for ImageNet
    online: bool = False  # keep what an image taught for those after it, instead of going back to the source

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.views < 1 or self.augment is None:
            raise ConfigError("memo needs views of at least 1 and an augmentation to make them")
        if self.horizon is not None and not self.online:
            raise ConfigError(
                "memo starts anew with every image, so its steps cannot shorten along the stream"
            )


@register(
    "memo",
    MemoSettings(),
    Traits(
        paper="Zhang, Levine, Finn 2022",
        batch_of_one="every image adapts alone; statistics lean on the source's",
        passes="for each image 33 images forward, 32 backward",
    ),
)
class Memo(Adapter):
    """Entropy of the mean prediction over augmented views, image by image, back to the source after each.

    Zhang, Levine, Finn: MEMO: Test Time Robustness via Adaptation and Augmentation, 2022. For each image x
    loss = H((1/B) sum_b p(y | a_b(x))), B augmented views a_b (AugMix after a random crop), minimised over
    all parameters by one step of plain SGD; then the clean image is predicted and the source restored
    (`online`: nothing is restored). Defaults: step size 2.5e-4, no momentum, one step, prior strength 16, as
    the authors' code for ResNet-50 on ImageNet; 32 views, as the paper for CIFAR-10 (64 for ImageNet).

    On blended statistics, the default, updates and predictions run on (16 source + 1 own) / 17, own being
    the moments of the views or of the image, as the authors' code has it; departs from it: population
    variance, since a single value has no other. On batch statistics the image and its views are the batch;
    on stream statistics both run on the stream's average, updates with the gradient of the views' own. The
    images of one batch share the draws of their views, so that equal images are predicted equally. Images
    must lie in [0, 1]: AugMix counts its levels there.
    """

    predicts = ("own", "before")
    settings: MemoSettings

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer."""
        self.optimizer = optimizer_for(self)
        self.has_batch_norm = bool(batch_norms(self.model))

    def adapt(self, x: Tensor) -> Tensor:
        """Adapt to and predict each image by itself."""
        settings, augment = self.settings, self.settings.augment
        assert augment is not None
        if settings.statistics.along_stream:
            self.norm.settle(self.model, x)
        size = x.shape[-2], x.shape[-1]
        draws = [augment.draw(settings.views, *size, self.generator) for _ in range(settings.steps)]
        # A loop over images: each has weights of its own, and 32 views keep a device busy.
        told = [self._one(image, draws) for image in torch.split(x, 1)]
        z, logits = (torch.cat(part) for part in zip(*told, strict=True))
        self.show(z, logits, self.model)
        return logits

    def _one(self, image: Tensor, draws: list[Draws | MixDraws]) -> tuple[Tensor, Tensor]:
        """Return features and logits of one image (1, C, H, W), before or after the last update."""
        assert self.optimizer is not None
        moving = [value for group in self.optimizer.param_groups for value in group["params"]]
        start = [] if self.settings.online else [value.detach().clone() for value in moving]
        before = None
        for step, drawn in enumerate(draws):
            views = self._views(image, drawn)
            if self.settings.predict == "before" and step == len(draws) - 1:
                before = self._predict(image, views)
            logits = self._pass(views)[1]
            self.optimizer.zero_grad(set_to_none=True)
            marginal_entropy(logits).backward()  # type: ignore[no-untyped-call]
            take_step(self)
        told = before or self._predict(image, views)
        if not self.settings.online:
            with torch.no_grad():
                torch._foreach_copy_(moving, start)
            self.optimizer.state.clear()
        return told

    def _views(self, image: Tensor, drawn: Draws | MixDraws) -> Tensor:
        augment = self.settings.augment
        assert augment is not None
        copies = image.expand(self.settings.views, -1, -1, -1)
        return augment.apply(copies, drawn).to(image.dtype)  # type: ignore[arg-type]

    def _pass(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features and logits of views, or of one image, on the statistics of updates."""
        statistics = self.settings.statistics
        if statistics.kind == "blend":
            with mixed_norm(self.model, blend_weight(1, statistics.source_images), keep=False):
                return self.model.features_and_logits(images)
        with self.norm.updating(len(images), views=0):
            return self.model.features_and_logits(images)

    @torch.no_grad()
    def _predict(self, image: Tensor, views: Tensor) -> tuple[Tensor, Tensor]:
        kind = self.settings.statistics.kind
        if self.settings.statistics.along_stream or not self.has_batch_norm:
            with self.norm.predicting(1):
                return self.model.features_and_logits(image)
        if kind == "batch":
            z, logits = self._pass(torch.cat([image, views]))
            return z[:1], logits[:1]
        return self._pass(image)
