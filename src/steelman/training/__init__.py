"""Training: the loop, its settings, checkpoints and what watches over it."""

from steelman.training.awp import AWP
from steelman.training.records import Trained
from steelman.training.settings import OPTIMIZERS, Around, Compute, Guard, Training, Validation
from steelman.training.trainer import Trainer

__all__ = ["AWP", "OPTIMIZERS", "Around", "Compute", "Guard", "Trained", "Trainer", "Training", "Validation"]
