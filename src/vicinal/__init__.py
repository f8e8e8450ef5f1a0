"""vicinal: image classifiers that adapt themselves to unseen domains by variational neighbor labels."""

from vicinal import adapters
from vicinal.adapters.asked import adapt
from vicinal.adapters.contract import Adapter
from vicinal.adapters.guard import GuardConfig, Guarded
from vicinal.adapters.persist import load_adapter
from vicinal.checkpoint import Trained, load, save
from vicinal.data.domains import assign_roles
from vicinal.data.load import load_dataset
from vicinal.data.streams import Stream
from vicinal.errors import VicinalError
from vicinal.evaluation.online import evaluate_online
from vicinal.training.config import OutOfFoldConfig, TrainConfig
from vicinal.training.train import ModelSpec, train
from vicinal.versions import __version__

__all__ = [
    "Adapter",
    "GuardConfig",
    "Guarded",
    "ModelSpec",
    "OutOfFoldConfig",
    "Stream",
    "TrainConfig",
    "Trained",
    "VicinalError",
    "__version__",
    "adapt",
    "adapters",
    "assign_roles",
    "evaluate_online",
    "load",
    "load_adapter",
    "load_dataset",
    "save",
    "train",
]
