"""FreeAT: the gradients of one backward pass serve the weights and the perturbation."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from steelman.attacks.pgd import ascend
from steelman.errors import UserError
from steelman.objectives.base import Batch, Objective, Outcome
from steelman.settings import Count, Number, settings


@settings
class FreeAT(Objective):
    """mean CE(f(x + delta), y), each batch `replays` times; after each backward, delta <- delta + step eps U_p(grad).

    delta starts at zero. Row i of delta is carried to row i of the next replay and of the next batch. One backward
    gives the gradients of the weights and of delta. So the attack has the training loss, with the margin. Everything
    runs in train mode, and batch norm moves at every replay.

    Shafahi et al. (2019), "Adversarial Training for Free!", Algorithm 1.
    """

    single_pass: ClassVar[str] = (
        "makes its perturbation while it trains, so it has no adversarial images for a second loss: expected no awp, "
        "or another objective, such as FastAT"
    )
    replays: Count = 8
    step: Annotated[Number, Field(gt=0)] = 1.0

    @property
    def repeats(self) -> int:
        return self.replays

    def __call__(self, batch: Batch) -> Outcome:
        x, threat = batch.x, batch.threat
        carried = batch.carry.get("delta", x[:0])
        if carried.shape[1:] != x.shape[1:]:
            raise UserError(f"FreeAT: expected images of shape {tuple(carried.shape[1:])}, got {tuple(x.shape[1:])}")
        carried = torch.cat((carried, torch.zeros_like(x[len(carried) :])))  # for a batch larger than all before
        x_adv = threat.project(x + carried[: len(x)].to(x.dtype), x).requires_grad_(True)
        logits = batch.adversarial(x_adv)

        def after() -> None:
            """Move delta by the gradient that the backward pass left on the images."""
            if x_adv.grad is None:
                raise UserError("FreeAT needs the gradient of its images: call loss.backward() without `inputs`")
            moved = ascend(x_adv.detach(), x_adv.grad, x, threat, self.step * threat.eps) - x
            # After a step that overflowed, delta would be NaN for ever.
            sound = x_adv.grad.isfinite().flatten(1).all(dim=1) & moved.isfinite().flatten(1).all(dim=1)
            moved = torch.where(sound.view(-1, *[1] * (x.dim() - 1)), moved, carried[: len(x)].to(x.dtype))
            batch.carry["delta"] = torch.cat((moved, carried[len(x) :])).contiguous()

        loss = batch.cross_entropy(logits).mean()
        return Outcome(loss=loss, logits=logits.detach(), x_adv=x_adv.detach(), after=after)
