"""The contract of every test-time method: adapt, then predict; reset; save and restore.

An adapter owns a copy of the source model. `forward(x)` adapts to the batch and returns the logits from after
the update. `reset()` restores the source bit for bit. `state_dict()` holds everything a stream has left
behind, optimizer and random generator included, so that loading it continues the stream exactly.

Calls from several threads are taken one after another; what a call leaves behind meets the next one, whoever
makes it, so that every stream needs an adapter of its own.
"""

import copy
import math
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from vicinal.adapters.settings import Predict, Settings
from vicinal.adapters.statistics import NormStatistics
from vicinal.adapters.turns import in_turn
from vicinal.checkpoint import Trained
from vicinal.errors import AdapterError, ConfigError
from vicinal.graphs import Recorder, overwritten, suited
from vicinal.models.classifier import Classifier
from vicinal.models.pooling import fuse_pools
from vicinal.models.wrap import Wrapped, copied, cuts_gradients
from vicinal.types import Head

if TYPE_CHECKING:
    from vicinal.adapters.prediction import Prediction

Observer = Callable[[Tensor, Tensor, Head], None]
HALF = (torch.float16, torch.bfloat16)
# Pixels beyond which a batch is no image in [0, 1]: one that was normalized already, if only to [-1, 1], or
# holds numbers up to 255. Images that were resampled, sharpened or made noisy overshoot by less.
FARTHEST = (-0.5, 1.5)


class Observed(NamedTuple):
    """What an observer is shown of a prediction: features and logits of the batch, the head they met."""

    z: Tensor
    logits: Tensor
    weight: Tensor
    bias: Tensor


class Adapter(nn.Module, ABC):
    """A model that adapts itself to what it is asked to predict.

    A method fills in `adapt` and, where it has state of its own, `prepare`. What it keeps lives in modules,
    buffers, the optimizer, the generator or, where shapes grow with the stream, in `memory`. Calls from
    several threads are taken one after another: one adapter per stream.
    """

    predicts: tuple[Predict, ...] = ("own",)
    takes_steps = True  # whether anything is updated by gradients
    needs_features = False  # whether features and a linear head are indispensable
    own_scale = (
        False  # whether its logits are so scaled that their certainty does not compare with the model's
    )
    # Whether a batch of a shape makes the same work for a device whatever it holds: no number is looked at on
    # the way, all that is kept is a tensor written in place. Such a step can be recorded.
    steady = False
    # Whether its model stays as it is and `adapt` begins with its pass: one that another has run on the same
    # statistics will do.
    still = False
    model: Classifier | Wrapped
    seen: Tensor  # images so far; a tensor, since a recorded step must count them too

    def __init__(self, source: Trained, settings: Settings, inplace: bool = False) -> None:
        super().__init__()
        self.lock = threading.RLock()
        if settings.predict not in self.predicts:
            raise ConfigError(f"this method predicts by {' or '.join(self.predicts)}, not {settings.predict}")
        self.settings = settings
        self.source = source
        model = source.model if inplace else copied(source.model)
        self.output_dtype = next(model.parameters()).dtype
        # A step of 1e-4 is lost in the rounding of half precision: such a model adapts in full precision.
        full = model.float() if self.output_dtype in HALF else model
        self.model = full.eval().requires_grad_(True)
        self.model.precision = torch.bfloat16 if settings.precision == "bfloat16" else None
        # How tensor cores take images; somebody's own net may count on the layout it has.
        if isinstance(self.model, Classifier) and next(model.parameters()).is_cuda:
            self.model.to(memory_format=torch.channels_last)
            fuse_pools(self.model)
        if self.needs_features:
            self.model.linear  # noqa: B018  raises, saying what to pass, where there is none
        elif isinstance(self.model, Wrapped):
            self.model.dispensable = settings.parameters in ("all", "norm")
        self.norm = NormStatistics(self.model, settings.statistics)
        self.optimizer: torch.optim.Optimizer | None = None
        self.memory: dict[str, Tensor] = {}
        self.observer: Observer | None = None  # sees features, logits and head of a batch's prediction
        self.observed: Observed | None = None
        self.told: tuple[Tensor, Tensor] | None = None  # z and logits of a batch, where they are known
        # Probabilities (S, N, C) of the last batch by each draw of w; None where none were drawn.
        self.draws: Tensor | None = None
        self.steps_taken = 0
        self.lost: Tensor | None = None  # whether the last predictions were not numbers
        self.recovered = 0  # how often the source was gone back to for that
        device = next(self.model.parameters()).device
        self.generator = torch.Generator(device=device).manual_seed(settings.seed)
        self.recorder = Recorder((self.generator,))
        self.register_buffer("seen", torch.zeros((), dtype=torch.double, device=device))
        self.prepare(source)
        self.eval()
        # What state_dict hands out must not change when the stream goes on.
        self.register_state_dict_post_hook(_cut_off)  # type: ignore[no-untyped-call]
        self._initial = copy.deepcopy(self.state_dict())

    def prepare(self, source: Trained) -> None:
        """Set up what the method keeps besides the model."""

    def step_share(self) -> Tensor | None:
        """Return how much of its length the next step has, horizon / (horizon + seen); None: all of it."""
        horizon = self.settings.horizon
        return None if horizon is None else horizon / (horizon + self.seen)

    @abstractmethod
    def adapt(self, x: Tensor) -> Tensor:
        """Adapt to a batch and return the logits that the settings ask for."""

    @in_turn
    def forward(self, x: Tensor) -> Tensor:
        """Return logits (N, C) of a batch of images after adapting to them.

        What the features are computed in is for `precision` to say: torch.autocast around it has no say.
        """
        with as_it_is(self.model):
            x = self.checked(x)
            self._leave_lost_state()
            logits = self._answered(x)
            self.lost = logits.isnan().any()
            return logits

    def _leave_lost_state(self) -> None:
        """Go back to the source where the last predictions were not numbers: no batch would mend that.

        Pixels that are finite can be large enough to leave moments or weights that are not. It is looked at
        with the next batch, whose check waits for the device anyway.
        """
        if self.lost is None or not bool(self.lost):
            return
        self.start_over()
        self.recovered += 1
        warnings.warn(
            "the last batch left predictions that are not numbers: the adapter went back to its source",
            stacklevel=4,
        )

    def _answered(self, x: Tensor) -> Tensor:
        """Return logits of a batch that can be taken."""
        self.draws = None
        if self.settings.episodic:
            self.start_over()
        watched = self.observer is not None
        made = self.recorder.run(self._adapted, x, variant=watched) if self.records else self._adapted(x)
        self.draws = made.get("draws")
        self.steps_taken += 1
        if self.observer is not None and "observed.z" in made:
            z, logits, *head = (made[f"observed.{name}"] for name in Observed._fields)
            self.observer(z, logits, Head(*head))
        logits = made["logits"]
        if self.settings.output_temperature != 1:
            logits = logits / self.settings.output_temperature
        return logits.to(self.output_dtype)

    def _adapted(self, x: Tensor) -> dict[str, Tensor]:
        """Adapt to a batch and return all that its prediction leaves behind."""
        self.norm.begin(x)
        self.observed = None
        with torch.enable_grad():
            made = {"logits": self._adapt(x).detach()}
        self.norm.carry(self.model, x)
        self.norm.end(made["logits"])
        self.seen += len(x)
        if self.draws is not None:
            made["draws"] = self.draws
        if self.observed is not None:
            made |= {f"observed.{name}": value for name, value in self.observed._asdict().items()}
        return made

    def _adapt(self, x: Tensor) -> Tensor:
        """Adapt, and say so in one line if that fails since the model lets no gradient through."""
        try:
            return self.adapt(x)
        except RuntimeError:
            if isinstance(self.model, Wrapped) and cuts_gradients(self.model, x):
                raise AdapterError(
                    "this model's forward runs without gradients, under no_grad or inference_mode: take that "
                    "off it, or choose a method that takes no steps, as in adapt(model, 'bn')"
                ) from None
            raise

    def start_over(self) -> None:
        """Go back to the source within a stream; steps stay as short as a guard has made them."""
        lengths = [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]
        recovered = self.recovered
        self.reset()
        self.recovered = recovered
        if self.optimizer is not None:
            for group, lr in zip(self.optimizer.param_groups, lengths, strict=True):
                group["lr"] = lr

    def show(self, z: Tensor, logits: Tensor, model: Classifier | Wrapped) -> None:
        """Leave what a prediction was made of for the observer, if there is one; the last one counts."""
        if self.observer is not None:
            self.observed = Observed(z, logits, *(value.detach() for value in model.linear))

    @property
    def divided_by(self) -> float | Tensor:
        """What the last logits were divided by, to be as sure as they should be."""
        return self.settings.output_temperature

    @property
    def records(self) -> bool:
        """Whether steps may be recorded: a net of somebody's own may look at numbers on its way."""
        plain = self.settings.augment is None and not self.settings.episodic
        return self.steady and plain and self.told is None and not isinstance(self.model, Wrapped)

    def train(self, mode: bool = True) -> "Adapter":
        """Stay in evaluation mode, whatever is asked: a pass sets what it needs, where it needs it."""
        return super().train(False)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of: a lock belongs to one object in one process."""
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.lock = threading.RLock()

    @in_turn
    def _apply(self, *args: Any, **kwargs: Any) -> "Adapter":
        """Move all tensors, as modules do: recordings do not move along."""
        convert = args[0] if args else kwargs["fn"]
        if convert(torch.empty(0, device=self.seen.device)).dtype in HALF:
            raise AdapterError(
                "an adapter keeps its weights in single precision, since half rounds its steps away: for "
                "features in half pass precision='bfloat16', as in adapt(model, precision='bfloat16')"
            )
        self.recorder.forget()
        moved: Adapter = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return moved

    @in_turn
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return all that the stream has left behind, as it is between two batches."""
        return super().state_dict(*args, **kwargs)

    @in_turn
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Continue the stream that left this state behind."""
        return super().load_state_dict(*args, **kwargs)

    @in_turn
    def reset(self) -> None:
        """Go back to the source model, bit for bit, and forget the stream."""
        self.load_state_dict(self._initial)
        self.recovered = 0

    @property
    def initial_state(self) -> dict[str, Any]:
        """The state that `reset` goes back to; not to be written to."""
        initial: dict[str, Any] = self._initial
        return initial

    @in_turn
    def predict(self, x: Tensor) -> "Prediction":
        """Return label, probability, entropy and spread of each image, after adapting to the batch."""
        from vicinal.adapters.prediction import predict

        return predict(self, x)

    @in_turn
    def save(self, path: str | Path) -> None:
        """Write the source, the settings and the whole state to one file; `load_adapter` goes on from it."""
        from vicinal.adapters.persist import save_adapter

        save_adapter(path, self)

    @property
    def predictor(self) -> tuple[Classifier | Wrapped, NormStatistics]:
        """The model whose output predicts, and its statistics: where a method has a teacher, the teacher."""
        return self.model, self.norm

    @in_turn
    def export(self, x: Tensor | None = None) -> nn.Module:
        """Return the adapted model alone, frozen; per-batch statistics need a batch x to be settled on."""
        from vicinal.adapters.export import frozen

        return frozen(self, x)

    @in_turn
    def get_extra_state(self) -> dict[str, Any]:
        """Return what is not a tensor of the module tree: optimizer, random state, memory, count of steps."""
        # Copied: an optimizer goes on writing into the tensors its state_dict hands out.
        optimizer = None if self.optimizer is None else copy.deepcopy(self.optimizer.state_dict())
        return {
            "optimizer": optimizer,
            "generator": self.generator.get_state(),
            "memory": {name: value.clone() for name, value in self.memory.items()},
            "steps": self.steps_taken,
        }

    @in_turn
    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned."""
        if self.optimizer is not None:
            self._bring_back(self.optimizer, state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        device = self.generator.device
        self.memory = {name: value.clone().to(device) for name, value in state.get("memory", {}).items()}
        self.steps_taken = state["steps"]
        self.lost = None

    def _bring_back(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Bring an optimizer to a saved state, in the tensors that recordings write to where that can be."""
        if self.recorder.recordings and overwritten(optimizer, saved):
            return
        # Copied again: the optimizer adopts the tensors it is given and would write into the snapshot.
        with torch.inference_mode(False):
            optimizer.load_state_dict(suited(copy.deepcopy(saved), optimizer))
        self.recorder.forget()

    def checked(self, x: Tensor) -> Tensor:
        """Return the batch as the model takes it; raise where it cannot be taken."""
        if torch.is_inference_mode_enabled():
            raise AdapterError("adapters update by gradients: call them outside torch.inference_mode()")
        if not isinstance(x, Tensor):
            raise AdapterError(f"expected a batch of images as a tensor (N, C, H, W), got {type(x).__name__}")
        channels = self.model.channels
        if x.ndim != 4 or x.shape[1] != (channels or x.shape[1]) or x.numel() == 0:
            wanted = "C" if channels is None else channels
            raise AdapterError(f"expected a batch of images (N >= 1, {wanted}, H, W), got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise AdapterError(f"expected images as floats in [0, 1], got {x.dtype}: divide by 255 first")
        low, high = torch.stack(x.aminmax()).tolist()  # not finite where any pixel is not
        if not math.isfinite(low) or not math.isfinite(high):
            raise AdapterError(
                "the batch holds pixels that are not finite: it was refused, nothing was updated"
            )
        if isinstance(self.model, Classifier) and not FARTHEST[0] <= low <= high <= FARTHEST[1]:
            raise AdapterError(
                f"expected images as floats in [0, 1], got pixels from {low:.3g} to {high:.3g}: this model "
                "normalizes them itself"
            )
        return (x.clone() if x.is_inference() else x).to(next(self.model.parameters()).dtype)


def as_it_is(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a block in which a model computes in the precision it has, whatever there is around it."""
    return torch.autocast(next(model.parameters()).device.type, enabled=False)


def _cut_off(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.detach().clone()
