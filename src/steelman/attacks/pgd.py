"""The gradient step, and the loop around it: FGSM, BIM, PGD and MIM are settings of this one file."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from steelman.attacks.base import Mode, input_gradient, logits_of, untouched
from steelman.errors import UserError, unknown
from steelman.heads import Head, heads_of
from steelman.losses import LOSSES, adversarial_loss
from steelman.rng import Key
from steelman.settings import Count, Number, SettingsError, settings
from steelman.threat import ThreatModel

# The spread of the Gaussian start of the published TRADES code.
GAUSSIAN_START = 1e-3


def ascend(x_adv: Tensor, gradient: Tensor, x: Tensor, threat: ThreatModel, step_size: float) -> Tensor:
    """x' <- project(x' + step_size * U_p(gradient)): the one gradient step of the repository."""
    return threat.project(x_adv + threat.steepest(gradient, x_adv, step_size), x)


@settings
class PGD:
    """Projected gradient ascent on a loss, with momentum and restarts: x' <- project(x' + eta U_p(g)).

    With momentum mu, g <- mu g + grad / mean|grad| (MIM); without, g = grad.

    Arguments: `step_size` None means 2.5 eps / steps, or eps for a single step; `start` is uniform in the threat model,
    uniform in its ball (outside the box until the first step, as FastAT trains), a small Gaussian, or zero; `keep`
    "best" returns each sample's first success, or else its point of highest loss, and drops fallen samples from the
    loop, while "last" returns the last point, as a training attack wants it; `mode` is the mode the model is attacked
    in (its batch-norm statistics never move). `head_scale` False divides logits by the head's scale before the loss, as
    the published evaluation of hypersphere embedding did, and is a weaker attack for it; `head_margin` True climbs the
    training loss, margin included: the adaptive attack.

    Madry et al. (2018), Eq. (2); Dong et al. (2018), "Boosting Adversarial Attacks with Momentum", Eq. (6).

    >>> from steelman.heads import linear
    >>> net = nn.Sequential(nn.Flatten(), linear(4, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> threat = ThreatModel(norm="linf", eps=0.1)
    >>> bool(threat.contains(PGD(steps=5)(net, x, y, threat), x).all())
    True
    """

    steps: Count = 20
    step_size: Annotated[Number, Field(gt=0)] | None = None
    restarts: Count = 1
    loss: str = "cross-entropy"
    start: Literal["uniform", "ball", "gaussian", "zero"] = "uniform"
    momentum: Annotated[Number, Field(ge=0)] = 0.0
    keep: Literal["best", "last"] = "best"
    mode: Mode = "eval"
    head_scale: bool = True
    head_margin: bool = False

    @model_validator(mode="after")
    def _sensible(self) -> PGD:
        if self.loss not in LOSSES:
            raise SettingsError([(("loss",), str(unknown("loss", self.loss, LOSSES)))])
        if self.start == "zero" and LOSSES[self.loss].needs == "reference":
            raise UserError(f"loss {self.loss!r} is flat at the clean image: start 'zero' would never leave it")
        if self.head_margin and LOSSES[self.loss].needs == "reference":
            raise UserError(f"loss {self.loss!r} has no true class for a head's margin to lower")
        if self.start == "ball" and self.keep != "last":
            raise UserError("start 'ball' may leave the valid range, so it is for training attacks (keep 'last') alone")
        if self.start == "zero" and self.restarts > 1:
            raise UserError(
                f"restarts from the same point repeat one another: start 'zero' with {self.restarts} restarts"
            )
        if self.mode == "train" and (self.keep == "best" or self.restarts > 1):
            raise UserError(
                "mode 'train' ties a batch's samples together through batch norm, so none may leave it early: "
                f"expected keep 'last' and 1 restart, got keep {self.keep!r} and {self.restarts}"
            )
        return self

    def at(self, ratio: float) -> PGD:
        """The attack for a radius `ratio` times the one its step size was made for."""
        if self.step_size is None or ratio == 1:
            return self
        return dataclasses.replace(self, step_size=self.step_size * ratio)

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        index: Tensor | None = None,
        key: Key = Key(0),  # noqa: B008 - a Key is frozen
        target: Tensor | None = None,
    ) -> Tensor:
        if len(x) == 0 or threat.eps == 0:
            return x.detach().clone()
        index = torch.arange(len(x), device=x.device) if index is None else index.to(x.device)
        with untouched(model, self.mode), torch.enable_grad():
            problem = _Problem(self, model, x.detach(), y, threat, target)
            best = x.detach().clone()
            best_loss = torch.full((len(x),), float("-inf"), device=x.device, dtype=torch.float64)
            todo = torch.arange(len(x), device=x.device)
            for restart in range(self.restarts):
                stream = key.fold("restart", restart)
                if self.keep == "last" and self.restarts == 1:
                    return problem.climb(self._begin(problem.x, threat, index, stream))
                todo = problem.search(todo, self._begin(x[todo], threat, index[todo], stream), best, best_loss)
                if len(todo) == 0:
                    break
        return best

    def _begin(self, x: Tensor, threat: ThreatModel, index: Tensor, key: Key) -> Tensor:
        if self.start in ("uniform", "ball"):
            return threat.random_start(x, index, key, box=self.start == "uniform")
        if self.start == "gaussian":
            return threat.project(x + GAUSSIAN_START * key.normal(index, tuple(x.shape[1:]), x.dtype), x)
        return x.clone()

    def eta(self, threat: ThreatModel) -> float:
        """The step size in use."""
        if self.step_size is not None:
            return self.step_size
        return threat.eps if self.steps == 1 else 2.5 * threat.eps / self.steps


class _Problem:
    """One call's data: the loss to climb, and how to climb it on all or on the surviving samples."""

    def __init__(
        self, attack: PGD, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, target: Tensor | None
    ) -> None:
        self.attack, self.model, self.x, self.y, self.threat = attack, model, x, y, threat
        self.head = self.head_that_matters()
        self.targeted = target is not None
        self.target = target
        self.reference: Tensor | None = None
        needs = LOSSES[attack.loss].needs
        if needs == "reference" or (needs == "target" and target is None):
            with torch.no_grad():
                clean = logits_of(model, x)
            self.reference = clean
            if needs == "target":  # towards the runner-up class
                self.target = clean.scatter(1, y[:, None], float("-inf")).argmax(dim=1)

    def head_that_matters(self) -> Head | None:
        """The head whose scale or margin the attack sees otherwise than the model shows it, if there is one."""
        heads = [
            head
            for head in heads_of(self.model)
            if (self.attack.head_margin and head.margin) or (not self.attack.head_scale and head.scale != 1)
        ]
        if len(heads) > 1:
            raise UserError(
                f"head_margin and head_scale are for a model with one head; this one has {len(heads)}, and gives the "
                "mean of their probabilities: attack it with pgd"
            )
        return heads[0] if heads else None

    def evaluate(self, x_adv: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Logits and losses of the given rows."""
        logits = logits_of(self.model, x_adv)
        target = None if self.target is None else self.target[rows]
        reference = None if self.reference is None else self.seen(self.reference[rows], rows)
        seen = self.seen(logits, rows)
        return logits, adversarial_loss(self.attack.loss, seen, self.y[rows], target=target, reference=reference)

    def seen(self, logits: Tensor, rows: Tensor | slice) -> Tensor:
        """Logits as the loss sees them."""
        if self.head is None:
            return logits
        if self.attack.head_margin:
            logits = self.head.with_margin(logits, self.y[rows])
        return logits if self.attack.head_scale else logits / self.head.scale

    def direction(self, gradient: Tensor, velocity: Tensor | None) -> Tensor:
        """The gradient, or its accumulated, normalised form under momentum."""
        if velocity is None:
            return gradient
        size = gradient.flatten(1).abs().mean(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
        return self.attack.momentum * velocity + gradient / size.view(-1, *[1] * (gradient.dim() - 1))

    def climb(self, x_adv: Tensor) -> Tensor:
        """All steps on all samples; the last point."""
        velocity = torch.zeros_like(x_adv) if self.attack.momentum else None
        eta = self.attack.eta(self.threat)
        for _ in range(self.attack.steps):
            x_adv.requires_grad_(True)
            _, losses = self.evaluate(x_adv, slice(None))
            gradient = self.direction(input_gradient(losses, x_adv), velocity)
            velocity = gradient if velocity is not None else None
            x_adv = ascend(x_adv.detach(), gradient, self.x, self.threat, eta)
        return x_adv.detach()

    def search(self, rows: Tensor, x_adv: Tensor, best: Tensor, best_loss: Tensor) -> Tensor:
        """All steps on the samples `rows`, each leaving when it falls; the rows that survive.

        Success is read from the logits that also give the gradient: one forward and one backward a step.
        """
        velocity = torch.zeros_like(x_adv) if self.attack.momentum else None
        eta = self.attack.eta(self.threat)
        for step in range(self.attack.steps + 1):
            last = step == self.attack.steps
            x_adv = x_adv.detach().requires_grad_(not last)
            with torch.set_grad_enabled(not last):
                logits, losses = self.evaluate(x_adv, rows)
            fallen = self.fooled(logits, rows)
            if self.attack.keep == "best" or last:
                better = fallen | (losses.detach() > best_loss[rows])
                best[rows[better]] = x_adv.detach()[better]
                best_loss[rows[better]] = losses.detach()[better].to(best_loss.dtype)
            leaving = fallen if self.attack.keep == "best" or last else torch.zeros_like(fallen)
            if last or bool(leaving.all()):
                return rows[~leaving]
            gradient = self.direction(input_gradient(losses, x_adv), velocity)
            velocity = gradient if velocity is not None else None
            if leaving.any():
                stay = ~leaving
                rows, x_adv, gradient = rows[stay], x_adv[stay], gradient[stay]
                velocity = velocity[stay] if velocity is not None else None
            x_adv = ascend(x_adv.detach(), gradient, self.x[rows], self.threat, eta)
        return rows

    def fooled(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Whether each sample's prediction is what the attack wants."""
        predicted = logits.detach().argmax(dim=1)
        return (
            predicted == self.target[rows] if self.targeted and self.target is not None else predicted != self.y[rows]
        )
