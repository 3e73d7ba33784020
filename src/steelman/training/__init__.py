"""Training: the loop, its settings, checkpoints and what watches over it."""

from steelman.objectives.awp import AWP
from steelman.training.records import Trained
from steelman.training.settings import OPTIMIZERS, Around, Compute, Guard, RunSettings, Training, Validation
from steelman.training.trainer import Trainer

__all__ = [
    "AWP",
    "OPTIMIZERS",
    "Around",
    "Compute",
    "Guard",
    "RunSettings",
    "Trained",
    "Trainer",
    "Training",
    "Validation",
]
