"""The engine of all attacks: frozen weights, counts of passes, and the best point of each sample.

An attack is a settings class with a method ``search(problem)``. The engine holds what all attacks share: the call, the
context around the model, the counts and the answer. ``Problem.adversarial`` alone decides whether an attack has
succeeded.
"""

from __future__ import annotations

import abc
import warnings
import weakref
from typing import ClassVar, get_args

import torch
from torch import Tensor, nn

from steelman.arguments import check_plain, model_of
from steelman.attacks.base import Mode, check_range, untouched
from steelman.attacks.layout import laid_out
from steelman.attacks.parallel import search_in_parts
from steelman.attacks.problem import Found, Precision, Problem
from steelman.errors import UserError, shown
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel

_TRAINING = weakref.WeakSet[nn.Module]()  # models in train mode that an attack was called on without a key

__all__ = ["Found", "Precision", "Problem", "Search"]


class Search(abc.ABC):
    """The call that all attacks share. A subclass is a settings class with its own ``search``.

    Class attributes describe an attack:
    `norms`: the norms that it knows.
    `minimum_norm`: whether it looks for the nearest adversarial point, and not for any point within eps.
    `black_box`: whether it asks the model for logits only, never for a gradient.
    `reduced`: whether its search may run in reduced precision. That is too coarse to find a boundary or a small
    difference.
    `warm`: whether it can begin from given points.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")
    minimum_norm: ClassVar[bool] = False
    black_box: ClassVar[bool] = False
    reduced: ClassVar[bool] = True
    warm: ClassVar[bool] = False

    @property
    def copies(self) -> int:
        """How many points of one sample the attack may put into one batch."""
        return 1

    @abc.abstractmethod
    def search(self, problem: Problem) -> None:
        """Look for adversarial points, and give them to the problem, which keeps the best ones."""

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
        return self.run(model, x, y, threat, index=index, key=key, target=target).x_adv

    def warn_of_repeats(self, model: nn.Module, index: Tensor | None, key: Key) -> None:
        """Warn a hand-made training loop that each of its calls draws the same noise."""
        if index is not None or key != Key(0) or not model.training:
            return
        if model in _TRAINING and getattr(self, "start", "zero") != "zero":
            warnings.warn(
                f"the model is in train mode, and {type(self).__name__} draws the same noise at each call: give each "
                "step its own key=steelman.Key(seed).fold(step), or use steelman.Criterion, which does",
                stacklevel=4,
            )
        _TRAINING.add(model)

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        index: Tensor | None = None,
        key: Key = Key(0),  # noqa: B008 - a Key is frozen
        target: Tensor | None = None,
        start: Tensor | None = None,
        distances: bool = False,
        precision: Precision = "full",
    ) -> Found:
        """Attack, and return what was found and what it cost.

        Arguments, besides those of every attack:
            start: points in the threat model, such as the best points of another attack. The first restart of a `warm`
                attack begins there.
            distances: True lets a minimum-norm attack search to the end of its budget for each sample. Otherwise a
                sample leaves at its first point within eps.
            precision: the precision of the search. Every success is checked in full precision.
        """
        model_of("model", model)
        self._check(x, y, threat, index, target, distances, precision)
        self.warn_of_repeats(model, index, key)
        if start is not None and not self.warm:
            raise UserError(f"{type(self).__name__} cannot begin from given points")
        if start is not None and not threat.contains(start, x).all():
            raise UserError("start: expected points inside the threat model, got some outside")
        mode: Mode = getattr(self, "mode", "eval")
        with (
            torch.inference_mode(False),
            torch.autocast(x.device.type, enabled=False),
            untouched(model, mode),
            torch.enable_grad(),
        ):
            x, y = (part.clone() if part.is_inference() else part for part in (x, y))
            target = None if target is None else target.long().clone()
            problem = Problem(
                model,
                x,
                y.long(),
                threat,
                index=index,
                key=key,
                target=target,
                start=None if start is None else start.detach(),
                distances=distances,
                precision=precision,
            )
            if self.minimum_norm:
                problem.nearest = problem.x.clone()
            if len(x) and (threat.eps > 0 or distances):
                with laid_out(model, problem.x, threat, mode, backward=not self.black_box) as problem.memory_format:
                    if mode == "eval":
                        search_in_parts(self.search, problem, self.copies)
                    else:
                        self.search(problem)
            elif len(x):  # no radius: a sample is broken only if its clean image is misclassified
                self._look(problem, problem.x)
        return problem.found()

    def _look(self, problem: Problem, points: Tensor) -> None:
        """Give the problem one point of each remaining sample. Their losses do not matter."""
        rows = problem.remaining()
        with torch.no_grad():
            logits = problem.logits(points, rows)
        if self.minimum_norm:
            problem.keep_nearest(points, logits, rows)
        else:
            problem.keep(points, logits, torch.zeros_like(logits[:, 0]), rows)

    def _check(
        self,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        index: Tensor | None,
        target: Tensor | None,
        distances: bool,
        precision: Precision,
    ) -> None:
        """Refuse wrong arguments before the attack begins."""
        name = type(self).__name__
        if not isinstance(threat, ThreatModel):
            raise UserError(f"expected a ThreatModel, got {shown(threat)}")
        for what, value in (("images", x), ("labels", y), ("targets", target), ("indices", index)):
            if isinstance(value, Tensor):
                check_plain(what, value)
        if threat.norm not in self.norms:
            raise UserError(f"{name}: expected one of the norms {', '.join(self.norms)}, got {threat.norm}")
        if distances and not self.minimum_norm:
            raise UserError(f"{name} looks for any point within eps, and knows no distances")
        if precision not in get_args(Precision):
            raise UserError(f"precision: expected one of {', '.join(get_args(Precision))}, got {precision!r}")
        if precision != "full" and not self.reduced:
            raise UserError(f"{name}: expected precision 'full', for it looks for small differences; got {precision!r}")
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim():
            raise UserError(f"expected images as a tensor of floats, got {getattr(x, 'dtype', type(x).__name__)}")
        for what, labels in (("labels", y), ("targets", target), ("indices", index)):
            if labels is None and what != "labels":
                continue
            if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != (len(x),):
                got = f"{labels.dtype} of shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else shown(labels)
                raise UserError(f"expected {len(x)} {what} as a tensor of integers, got {got[:80]}")
        if x.numel():
            check_range(x, threat)
