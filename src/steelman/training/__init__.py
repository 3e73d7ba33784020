"""Training: the loop, its settings, checkpoints and what watches over it."""

from steelman.training.awp import AWP
from steelman.training.settings import OPTIMIZERS, Around, Compute, Guard, Training, Validation
from steelman.training.trainer import Trained, Trainer

__all__ = ["AWP", "OPTIMIZERS", "Around", "Compute", "Guard", "Trained", "Trainer", "Training", "Validation"]
