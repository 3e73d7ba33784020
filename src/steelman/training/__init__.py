"""Training: the loop, its settings, checkpoints and what watches over it."""

from steelman.training.settings import OPTIMIZERS, Compute, Guard, Training, Validation
from steelman.training.trainer import Trained, Trainer

__all__ = ["OPTIMIZERS", "Compute", "Guard", "Trained", "Trainer", "Training", "Validation"]
