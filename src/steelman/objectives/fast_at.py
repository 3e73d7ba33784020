"""FastAT: one random-start step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from steelman.attacks import PGD
from steelman.attacks.base import Mode
from steelman.objectives.base import Batch, Objective, Outcome
from steelman.settings import Number, settings


@settings
class FastAT(Objective):
    """mean CE(f(x*), y), where x* is one step of size `step` * eps from a uniform draw of the ball.

    The draw may leave the box; the step's result is then projected. If the draw were clipped, most pixels of a black
    background would take one of two values, and the model would learn these values. The released code does not clip
    the draw on MNIST, but does on CIFAR-10: `clipped_start` True.

    `mode` is that of the model during the attack. The released code attacks in train mode, and so is the default: the
    model uses the statistics of the batch. Here the attack's forward does not record them; in the released code it
    does.

    Wong et al. (2020), "Fast is better than free: Revisiting adversarial training", Algorithm 3.
    """

    step: Annotated[Number, Field(gt=0)] = 1.25
    mode: Mode = "train"
    clipped_start: bool = False

    def __call__(self, batch: Batch) -> Outcome:
        eps = batch.threat.eps
        start: Literal["uniform", "ball"] = "uniform" if self.clipped_start else "ball"
        one_step = PGD(steps=1, step_size=self.step * eps or None, start=start, keep="last", mode=self.mode)
        # Not batch.attacked: it would multiply the step by the scheduled radius a second time.
        x_adv = batch.x_adv
        if x_adv is None:
            x_adv = one_step(batch.net, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
        logits = batch.adversarial(x_adv)
        return Outcome(loss=batch.cross_entropy(logits).mean(), logits=logits.detach(), x_adv=x_adv)
