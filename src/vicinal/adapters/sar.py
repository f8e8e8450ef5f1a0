"""SAR: sharpness-aware entropy minimisation on reliable samples, with recovery."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import optimizer_for, take_step
from vicinal.adapters.settings import Parameters, Predict, Settings
from vicinal.adapters.steps import logits_on, step_and_predict, update_view
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.losses import entropies
from vicinal.functional.peers_entropy import masked_mean

TINY = 1e-12  # keeps the climb finite where the gradient is zero, as in the authors' sam.py
NOTHING_YET = -1.0  # the average of losses before the first one; no loss is below 0
# What the authors' code leaves out: the last stage of ResNets; the last blocks and the norm of ViT-B.
LAST_LAYERS = ("layer4", "blocks.9", "blocks.10", "blocks.11", "norm")
ROOTS = ("features", "net")  # what such layers are under: of a model built here, of somebody's own


@dataclass(frozen=True)
class SarSettings(Settings):
    """What `sar` can be told besides what every method can."""

    predict: Predict = "before"
    lr: float = 2.5e-4  # the authors' main.py for ResNet-50 at batches of 64; 1e-3 for ViT-B there
    parameters: Parameters = "norm"
    optimizer: Literal["adam", "sgd"] = "sgd"
    momentum: float = 0.9  # the authors' main.py
    margin: float = 0.4  # reliable: entropy below this times ln(classes); E_0 of the paper
    rho: float = 0.05  # how far the weights climb before the gradient is taken; the paper's
    recovery: float = 0.2  # back to the source when the average loss falls under this; e_0 of the paper
    average: float = 0.9  # what the average loss keeps of itself at every update
    exclude: tuple[str, ...] | None = None  # layers that stay, by parts of dotted names; None: LAST_LAYERS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.margin > 0 or self.rho < 0 or self.recovery < 0 or not 0 <= self.average < 1:
            raise ConfigError(
                "sar needs a margin above 0, rho and recovery of at least 0 "
                "and an average of at least 0 and below 1"
            )


TRAITS = Traits(
    paper="Niu et al. 2023",
    updates="scale and shift of normalization layers",
    batch_of_one="as any batch without BatchNorm; with it, on the average over the stream",
    norms="any, made for GroupNorm and LayerNorm; a net without any needs parameters='all'",
    passes="2 forward, 2 backward",
)


@register("sar", SarSettings(), TRAITS)
class Sar(Adapter):
    """Entropy of reliable samples minimised toward flat regions, with recovery from collapse.

    Niu, Wu, Zhang, Wen, Chen, Zhao, Tan, "Towards stable test-time adaptation in dynamic wild world", ICLR
    2023.

    Loss: L(theta) = mean_{i in S} H_i, S = {i: H_i < E_0}, E_0 = margin * ln C. Its gradient is taken at
    theta + rho * grad L / |grad L|, over the samples of S that are still reliable there, and applied at
    theta. An average of that second loss, a <- 0.9 a + 0.1 L, is kept; under `recovery` the model has
    collapsed: weights, optimizer and statistics go back to the source.
    Updated: scale and shift of every normalization layer but those under `exclude`: by default, as in the
    authors' code, `layer4` of a ResNet, the blocks 9 to 11 and the last norm of a ViT; a net that has no such
    layers, or no others, is updated whole.
    Prediction: before the last update of the batch, from the first pass.
    Statistics: the batch's, for nets with BatchNorm.
    Defaults: SGD, lr 2.5e-4, momentum 0.9, margin 0.4, rho 0.05, recovery 0.2: the authors' code for
    ResNet-50 at batches of 64 (ViT-B: lr 1e-3). Where no sample is reliable the gradient is zero and momentum
    goes on, as in that code.

    Departs: the code scales lr with the batch, of a ResNet below 32 (to 1/32 at batches of one), of a ViT
    always; here lr is what is asked for. The code's average of losses outlives the recovery, so that a
    collapse is followed by one recovery a batch until the average has climbed; here, as its `reset` means to,
    the average starts anew.
    """

    predicts = ("own", "before")
    settings: SarSettings
    loss_average: Tensor

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer without the excluded layers, and the average of losses."""
        self.optimizer = optimizer_for(self)
        (group,) = self.optimizer.param_groups
        for value in self._excluded():
            value.requires_grad_(False)
        group["params"] = [value for value in group["params"] if value.requires_grad]
        if not group["params"]:
            raise AdapterError("exclude leaves nothing to update: name fewer layers")
        start = torch.tensor(NOTHING_YET).to(group["params"][0])
        self.register_buffer("loss_average", start)

    def _excluded(self) -> list[Tensor]:
        """Return the parameters under the excluded layers."""
        if self.settings.exclude is None:
            parts = [f".{root}.{part}." for root in ROOTS for part in LAST_LAYERS]
            usual = [value for part in parts for value in self._inside(part)]
            left_out = {id(value) for value in usual}
            moving = [value for value in self.model.parameters() if value.requires_grad]
            return [] if all(id(value) in left_out for value in moving) else usual
        found = []
        for part in self.settings.exclude:
            inside = self._inside(f".{part}.")
            if not inside:
                raise AdapterError(f"exclude names '{part}', which is no layer of this model")
            found += inside
        return found

    def _inside(self, part: str) -> list[Tensor]:
        return [value for name, value in self.model.named_parameters() if part in f".{name}."]

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the reliable samples; predict before the last update, or after it."""
        return step_and_predict(self, x, self._step)

    def _step(self, x: Tensor) -> Tensor:
        assert self.optimizer is not None
        view = update_view(self, x)
        logits = logits_on(self, view)
        entropy, margin = entropies(logits), self.settings.margin * math.log(logits.shape[1])
        reliable = entropy.detach() < margin
        self._gradient(masked_mean(entropy, reliable))
        start = self._climb()
        entropy = entropies(logits_on(self, view))
        reliable = reliable & (entropy.detach() < margin)
        loss = masked_mean(entropy, reliable)
        self._gradient(loss)
        with torch.no_grad():
            torch._foreach_copy_(self._parameters_updated(), start)
        take_step(self)
        self._recover(loss.detach(), reliable.any())
        return logits.detach()

    def _gradient(self, loss: Tensor) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]

    def _parameters_updated(self) -> list[Tensor]:
        assert self.optimizer is not None
        values: list[Tensor] = self.optimizer.param_groups[0]["params"]
        return [value for value in values if value.grad is not None]

    @torch.no_grad()
    def _climb(self) -> list[Tensor]:
        """Move the weights by rho along their gradient and return where they were."""
        values = self._parameters_updated()
        gradients = [value.grad for value in values if value.grad is not None]
        start = [value.detach().clone() for value in values]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_add_(values, torch._foreach_mul(gradients, self.settings.rho / (norm + TINY)))
        return start

    def _recover(self, loss: Tensor, any_reliable: Tensor) -> None:
        """Take the loss into the average and go back to the source where it says that all is lost."""
        old = self.loss_average
        new = torch.where(old < 0, loss, old.lerp(loss, 1 - self.settings.average))
        self.loss_average.copy_(torch.where(any_reliable, new, old))
        # Asked when all of the step is under way: waiting for the device here holds nothing up.
        if bool((self.loss_average >= 0) & (self.loss_average < self.settings.recovery)):
            self._forget()

    def _forget(self) -> None:
        """Go back to the source; the stream goes on: only what was learned is lost."""
        random, steps, seen = self.generator.get_state(), self.steps_taken, self.seen.clone()
        self.start_over()
        self.norm.begin()  # what was measured under the lost weights does not carry over
        self.generator.set_state(random)
        self.steps_taken = steps
        self.seen.copy_(seen)  # with a horizon, fewer images would mean longer steps
