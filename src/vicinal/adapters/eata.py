"""EATA: entropy of reliable and non-redundant samples, with a penalty against forgetting."""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vicinal.adapters.contract import Adapter
from vicinal.adapters.methods import Traits, register
from vicinal.adapters.passes import chosen_parameters, optimizer_for, take_step
from vicinal.adapters.settings import Parameters, Predict, Settings
from vicinal.adapters.statistics import NormStatistics, StatisticsConfig
from vicinal.adapters.steps import logits_on, step_and_predict, update_view
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError, ConfigError
from vicinal.functional.losses import entropies
from vicinal.functional.peers_entropy import masked_mean
from vicinal.models.classifier import Classifier
from vicinal.models.wrap import Wrapped

FISHER = "fisher."  # prefix of a parameter's name in Trained.extras
FISHER_IMAGES = 2000  # unlabelled source images it is made from; fisher_size of the authors' main.py
FISHER_BATCH = 64  # of them at once; the authors' main.py


@dataclass(frozen=True)
class EataSettings(Settings):
    """What `eata` can be told besides what every method can."""

    predict: Predict = "before"
    lr: float = 2.5e-4  # the authors' main.py, at batches of 64
    parameters: Parameters = "norm"
    optimizer: Literal["adam", "sgd"] = "sgd"
    momentum: float = 0.9  # the authors' main.py
    margin: float = 0.4  # reliable: entropy below this times ln(classes); E_0 of the paper
    # Not redundant: cosine with the average prediction below this; epsilon of the paper. 0.4, for the ten
    # classes of CIFAR-10, is from the paper only; the authors' main.py has 0.05, for ImageNet's thousand.
    similarity: float = 0.4
    average: float = 0.9  # what the average prediction keeps of itself at every update
    fisher_weight: float = 2000.0  # of the penalty; fisher_alpha of the authors' main.py, beta of the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.margin > 0 or not self.similarity > 0 or self.fisher_weight < 0:
            raise ConfigError("eata needs margin and similarity above 0 and a fisher_weight of at least 0")
        if not 0 <= self.average < 1:
            raise ConfigError("eata needs an average of at least 0 and below 1")


TRAITS = Traits(
    paper="Niu et al. 2022",
    updates="scale and shift of normalization layers",
    source_data="Fisher information, stored by training; without it no penalty",
    batch_of_one="predicted, and updated, on the average over the stream",
    norms="any; a net without any needs parameters='all'",
    passes="1 forward, 1 backward; no backward where no sample is chosen",
)


@register("eata", EataSettings(), TRAITS)
class Eata(Adapter):
    """Entropy of reliable, non-redundant samples minimised, with a Fisher penalty against forgetting.

    Niu, Wu, Zhang, Chen, Zheng, Zhao, Tan, "Efficient test-time model adaptation without forgetting", ICML
    2022.

    Loss: L = (1/|S|) sum_{i in S} exp(E_0 - H_i) H_i + fisher_weight * sum_k F_k (theta_k - theta_s,k)^2,
    S = {i: H_i < E_0 and |cos(p_i, m)| < similarity}, E_0 = margin * ln C, the weight exp(.) held fixed. m is
    the average of the predictions chosen so far: the mean of the first batch that has reliable samples, then
    m <- 0.9 m + 0.1 mean_{i in S} p_i. Until there is an m, reliable is enough. Where S is empty nothing is
    updated at all.
    Updated: scale and shift of every normalization layer.
    Prediction: before the last update of the batch, from the pass whose gradient is taken.
    Statistics: the batch's.
    Fisher information: every training stores that of the normalization layers in `Trained.extras`, from up to
    2000 source validation images and the model's own predictions, as in the authors' main.py. A model that
    was not trained here, or before that was stored, has none and goes without the penalty: the authors call
    that ETA. `fisher_information` makes it for any model.
    Defaults: SGD, lr 2.5e-4, momentum 0.9, margin 0.4, fisher_weight 2000 as in the authors' main.py, which
    is for ImageNet-C at batches of 64; similarity 0.4, for CIFAR-10, is from the paper only. One over the
    root of the number of classes is the cosine with an even average: with six classes or fewer 0.4 lets
    hardly anything pass after the first batch, with many it hardly filters (main.py has 0.05).

    Departs: the code knows BatchNorm alone; here GroupNorm and LayerNorm are updated as well. `reset` forgets
    m too; the code's keeps it.
    """

    predicts = ("own", "before")
    settings: EataSettings

    def prepare(self, source: Trained) -> None:
        """Set up the optimizer and, where the source has Fisher information, where it pulls to."""
        self.optimizer = optimizer_for(self)
        fisher = {
            name: source.extras[FISHER + name]
            for name, value in self.model.named_parameters()
            if value.requires_grad and FISHER + name in source.extras
        }
        self.penalised = tuple(fisher) if self.settings.fisher_weight > 0 else ()
        for index, name in enumerate(self.penalised):
            parameter = self.model.get_parameter(name).detach()
            if fisher[name].shape != parameter.shape:
                raise AdapterError(f"the Fisher information of '{name}' has another shape: make it again")
            # The source's, the same for every stream: no part of what a stream leaves behind.
            self.register_buffer(f"fisher_{index}", fisher[name].to(parameter), persistent=False)
            self.register_buffer(f"start_{index}", parameter.clone(), persistent=False)

    def adapt(self, x: Tensor) -> Tensor:
        """Update by the chosen samples; predict before the last update, or after it."""
        return step_and_predict(self, x, self._step)

    def _step(self, x: Tensor) -> Tensor:
        assert self.optimizer is not None
        logits = logits_on(self, update_view(self, x))
        entropy, p = entropies(logits), logits.detach().softmax(-1)
        margin = self.settings.margin * math.log(logits.shape[1])
        chosen = self._chosen(entropy.detach(), p, margin)
        # The one wait for the device: with nothing chosen the backward pass is saved and momentum rests.
        if bool(chosen.any()):
            weight = (margin - entropy.detach()).exp()
            self.optimizer.zero_grad(set_to_none=True)
            masked_mean(weight * entropy, chosen).backward()  # type: ignore[no-untyped-call]
            self._pull_back()
            take_step(self)
            self._remember(p, chosen)
        return logits.detach()

    def _chosen(self, entropy: Tensor, p: Tensor, margin: float) -> Tensor:
        """Return which samples are reliable and, once there is an average, unlike it (N,)."""
        reliable = entropy < margin
        if "average" not in self.memory:
            return reliable
        cosine = F.cosine_similarity(self.memory["average"].unsqueeze(0), p, dim=1)
        return reliable & (cosine.abs() < self.settings.similarity)

    @torch.no_grad()
    def _pull_back(self) -> None:
        """Add the gradient of the penalty: a handful of fused kernels instead of a graph over all layers."""
        if not self.penalised:
            return
        values: list[Tensor] = [self.model.get_parameter(name) for name in self.penalised]
        starts = [self.get_buffer(f"start_{index}") for index in range(len(values))]
        fishers = [self.get_buffer(f"fisher_{index}") for index in range(len(values))]
        pull = torch._foreach_mul(torch._foreach_sub(values, starts), fishers)
        gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in values]
        torch._foreach_add_(gradients, pull, alpha=2 * self.settings.fisher_weight)
        for value, gradient in zip(values, gradients, strict=True):
            value.grad = gradient

    def _remember(self, p: Tensor, chosen: Tensor) -> None:
        weight = chosen.to(p.dtype) / chosen.sum()
        mean = weight @ p
        average = self.memory.get("average", mean)
        self.memory["average"] = average.lerp(mean, 1 - self.settings.average)


def fisher_information(
    model: Classifier | Wrapped, batches: Iterable[Tensor], parameters: Parameters = "norm"
) -> dict[str, Tensor]:
    """Return the diagonal Fisher information of a model's parameters as entries for `Trained.extras`.

    F = mean over batches of the squared gradient of the cross-entropy with the model's own argmax, on batch
    statistics, as in the authors' main.py, which takes 2000 unlabelled images of the source in batches of 64.
    The gradient is a batch's, not a sample's: F is smaller for larger batches.
    """
    net = copy.deepcopy(model).eval().requires_grad_(False)
    norm = NormStatistics(net, StatisticsConfig("batch"))
    wanted = {id(value) for value in chosen_parameters(net, parameters)}
    values = {name: value for name, value in net.named_parameters() if id(value) in wanted}
    if not values:
        raise AdapterError(f"this model has no parameters of kind '{parameters}': choose others")
    totals = [torch.zeros_like(value.requires_grad_(True)) for value in values.values()]
    count = 0
    with torch.enable_grad():
        for x in batches:
            with norm.updating(len(x)):
                logits = net(x.to(next(iter(values.values()))))
            loss = F.cross_entropy(logits, logits.argmax(-1))
            gradients = torch.autograd.grad(loss, list(values.values()), materialize_grads=True)
            torch._foreach_addcmul_(totals, gradients, gradients)
            count += 1
    if count == 0:
        raise AdapterError("Fisher information needs at least one batch of images")
    return {FISHER + name: total / count for name, total in zip(values, totals, strict=True)}
