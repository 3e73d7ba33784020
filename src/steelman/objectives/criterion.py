"""The loss of any objective, for any training loop."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from lightning_fabric.wrappers import _FabricModule
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from steelman.attacks.base import check_range
from steelman.errors import UserError
from steelman.heads import Head
from steelman.models.batchnorm import AuxiliaryNorm
from steelman.models.features import parallel
from steelman.objectives.awp import AWP, shift
from steelman.objectives.base import Batch, Objective, Outcome, check_model, objections
from steelman.rng import Key
from steelman.schedules import Schedule, value_at
from steelman.threat import ThreatModel


class Criterion:
    """``criterion(x, y)`` is the training loss of an objective on a batch, as torch's own criteria give one.

        for x, y in criterion.batches(loader):
            loss = criterion(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    The loss has the margin of the model's head and the label smoothing, and each step draws its own noise. What an
    objective does once gradients are there (FreeAT moves its perturbation, TLA fills its pool) happens at the next
    call; so does what follows a step of the optimiser. `outcome` holds the last loss, logits and adversarial images.

    Arguments:
        objective: such as ``steelman.PGDAT()``.
        model: gives logits for images in the threat's range. It may be wrapped by DistributedDataParallel, Lightning
            Fabric or torch.compile; attacks then work on the module inside.
        threat: the norm, the radius and the range of the pixels.
        seed: decides all noise, together with the step and the place of each sample.
        label_smoothing: this share of the label is spread over all classes.
        eps: a schedule of the radius, such as ``SCHEDULES["linear"](start=0, end=8 / 255)``.
        steps: how many calls the whole training makes; a schedule needs it, or `progress` in each call.
        awp: adversarial weight perturbation. It moves the weights before the loss and takes the move back after the
            step, and so needs the optimizer.
        optimizer: the one that steps the model; for `awp` alone.
        helper: the other model that HAT learns from.
        net: the module that attacks work on, where it is not the one inside `model`.

    With several processes each calls its own criterion on its own share of the batch.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> from steelman.objectives import PGDAT
    >>> criterion = Criterion(PGDAT(), model, ThreatModel(eps=0.1))
    >>> criterion(torch.rand(8, 1, 2, 2), torch.arange(8) % 3).shape
    torch.Size([])
    """

    outcome: Outcome
    batch: Batch

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        threat: ThreatModel,
        *,
        seed: int = 0,
        label_smoothing: float = 0.0,
        eps: float | Schedule | None = None,
        steps: int | None = None,
        awp: AWP | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        helper: nn.Module | None = None,
        net: nn.Module | None = None,
    ) -> None:
        _check(objective, model, threat, label_smoothing, steps)
        self.objective, self.model, self.threat = objective, model, threat
        self.net = bare(model) if net is None else net
        self.key, self.label_smoothing, self.eps, self.steps = Key(seed), label_smoothing, eps, steps
        self.awp, self.helper = awp, helper
        self.step = self.seen = 0
        self.carry: dict[str, Tensor] = {}
        self._shift: dict[str, Tensor] | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        self._differentiated = False
        self._finished = True
        self.advise = True  # whether to warn of what will make training slow
        self._check_parts(optimizer)

    def __call__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        index: Tensor | None = None,
        progress: float | None = None,
        eps: float | None = None,
    ) -> Tensor:
        """The mean loss of a batch; call ``backward`` on it.

        Arguments: `index` is the place of each sample in the data, which decides its noise; without it samples are
        counted as they come. `progress` is the share of the training that is done, 0 .. 1, in place of the count of
        `steps`; `eps` is the radius of this step, in place of the schedule.
        """
        self.finish()
        self._check_batch(x, y)
        share = self._share(progress)
        radius = self._radius(share, eps)
        batch = Batch(
            x=x,
            y=y,
            index=self._count(x) if index is None else index,
            threat=self.threat.at(radius),
            ratio=radius / self.threat.eps if self.threat.eps else 1.0,
            key=self.key.fold("attack", self.step),
            model=self.model,
            net=self.net,
            carry=self.carry,
            smoothing=self.label_smoothing,
            progress=share,
            helper=self.helper,
        )
        if self.awp is not None and share >= self.awp.start:
            shifted = self.awp.shifted(self.objective, batch)
            if shifted is not None:
                batch, self._shift = shifted
        self.outcome = self.objective(batch)
        self.step += 1
        self._finished = self._differentiated = False
        this = weakref.ref(self)

        def seen(_: Tensor) -> None:
            if (criterion := this()) is not None:
                criterion._differentiated = True

        if not self.outcome.loss.requires_grad:
            raise UserError("the loss does not depend on any weight that requires a gradient: nothing would be trained")
        self.outcome.loss.register_hook(seen)  # type: ignore[no-untyped-call]
        return self.outcome.loss

    def finish(self) -> None:
        """Do what follows a step of the optimiser: it happens at the next call, or here for who cannot wait.

        An objective takes up what the gradients told it, if there was a backward pass; a weight perturbation that no
        step has taken back is taken back; heads with ``wn_mode="project"`` put their weights back on the sphere.
        """
        if self._finished:
            return
        self._finished = True
        if self._differentiated and self.outcome.after is not None:
            self.outcome.after()
        self._unshift()
        self.project()

    def project(self) -> None:
        """Put the weights of heads with ``wn_mode="project"`` on the sphere."""
        for module in self.net.modules():
            if isinstance(module, Head):
                module.project()

    def batches(self, loader: Any) -> Any:
        """The batches of a loader, each as often in a row as the objective wants to see it (FreeAT: `replays`)."""
        for batch in loader:
            for _ in range(self.objective.repeats):
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for the training to go on as if it had not stopped."""
        self.finish()
        return {"step": self.step, "seen": self.seen, "carry": dict(self.carry)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave."""
        if not isinstance(state, dict) or state.keys() != {"step", "seen", "carry"}:
            got = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise UserError(f"expected the state of a criterion (step, seen, carry), got {got}")
        device = next((parameter.device for parameter in self.net.parameters()), torch.device("cpu"))
        self.step, self.seen = int(state["step"]), int(state["seen"])
        self.carry = {name: value.to(device) for name, value in state["carry"].items()}
        self._last, self._shift, self._finished = None, None, True

    def _unshift(self, *_: object) -> None:
        """Take a weight perturbation back."""
        if self._shift is not None:
            shift(self.net, self._shift, -1)
            self._shift = None

    def _share(self, progress: float | None) -> float:
        """The share of the training that is done."""
        if progress is not None:
            if not 0 <= progress <= 1:
                raise UserError(f"progress: expected the share of the training that is done, 0 .. 1, got {progress!r}")
            return float(progress)
        if self.steps is None:
            if self._scheduled():
                raise UserError(
                    f"{self._scheduled()} changes with the progress of the training: give Criterion the number of "
                    "`steps`, or each call its `progress`"
                )
            return 0.0
        if self.step == self.steps:
            warnings.warn(
                f"the criterion was made for {self.steps} steps, and this is one more: schedules stay at their end",
                stacklevel=3,
            )
        return min(self.step / self.steps, 1.0)

    def _scheduled(self) -> str:
        """What needs to know the progress; nothing if nothing does."""
        if callable(self.eps):
            return "eps"
        if self.awp is not None and self.awp.start > 0:
            return "awp.start"
        own = self.objective.scheduled()
        return f"{type(self.objective).__name__}.{own}" if own else ""

    def _radius(self, share: float, eps: float | None) -> float:
        radius = eps if eps is not None else self.threat.eps if self.eps is None else value_at(self.eps, share)
        if not 0 <= radius <= self.threat.eps * (1 + 1e-9):
            raise UserError(f"eps: expected a radius of 0 up to the threat's {self.threat.eps:g}, got {radius:g}")
        return float(radius)

    def _count(self, x: Tensor) -> Tensor:
        """Numbers for samples that have none: no two samples of the training share one."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several else (0, 1)
        if self.step % self.objective.repeats == 0:
            self.seen += len(x) * world
        return self.seen - len(x) * world + rank + world * torch.arange(len(x), device=x.device)

    def _check_parts(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse what does not go together, before a batch is seen."""
        modules = list(self.model.modules())
        clashes = objections(
            self.objective,
            compiled=any(hasattr(module, "_orig_mod") for module in modules),
            awp=self.awp is not None,
            auxiliary_norm=any(isinstance(module, AuxiliaryNorm) for module in modules),
        )
        if clashes:
            raise UserError("; ".join(reason for _, reason in clashes))
        if self.objective.helped and self.helper is None:
            raise UserError(
                f"{type(self.objective).__name__} learns from another model: expected it as `helper`, got none"
            )
        if self.helper is not None and bare(self.helper) is self.net:
            raise UserError("helper: expected another model than the one that is trained, got the same")
        if self.awp is not None:
            if optimizer is None:
                raise UserError(
                    "weight perturbation is taken back after the optimiser's step: expected `optimizer` with `awp`"
                )
            # Without this hook the weights would stay perturbed until the next call: who saves or measures them in
            # between would have others than those that were trained.
            this = weakref.WeakMethod(self._unshift)
            optimizer.register_step_post_hook(lambda *_: undo() if (undo := this()) is not None else None)

    def _check_batch(self, x: Tensor, y: Tensor) -> None:
        """Refuse what cannot be trained on; the costly looks are at the first batch alone."""
        name = type(self.objective).__name__
        for what, value in (("images", x), ("labels", y)):
            if not isinstance(value, Tensor):
                raise UserError(f"expected {what} as a tensor, got {type(value).__name__}")
        if x.dim() < 2 or not x.is_floating_point():
            raise UserError(f"expected floating-point images (N, C, H, W), got {x.dtype} of shape {tuple(x.shape)}")
        if y.dtype != torch.int64 or y.shape != x.shape[:1]:
            raise UserError(f"expected {len(x)} labels in int64, got {y.dtype} of shape {tuple(y.shape)}")
        if not self.net.training:
            raise UserError("the model is in eval mode, and batch norm and dropout would not train: call model.train()")
        if not torch.is_grad_enabled():
            raise UserError("gradients are off: a training loss needs them; leave torch.no_grad()")
        turn = self.step % self.objective.repeats
        if turn and self._last is not None and not (torch.equal(self._last[1], y) and torch.equal(self._last[0], x)):
            raise UserError(
                f"{name} trains {self.objective.repeats} times in a row on each batch, and this is another one after "
                f"{turn}: loop over criterion.batches(loader)"
            )
        if self.objective.repeats > 1:
            self._last = (x, y)
        if self.step == 0:
            try:
                check_range(x, self.threat)
            except UserError as error:
                raise UserError(
                    f"{error}. Normalisation belongs into the model: steelman.wrap(model, mean=..., std=...)"
                ) from None
            check_model(self.objective, self.net, x[:2])
            if self.advise and (said := parallel(self.net, x[:32])):
                warnings.warn(said, stacklevel=3)


def bare(model: nn.Module) -> nn.Module:
    """The module inside the wrappers that exchange gradients or convert precision; a compiled one stays compiled."""
    while isinstance(model, (_FabricModule, DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def _check(objective: object, model: object, threat: object, label_smoothing: object, steps: object) -> None:
    """Refuse arguments of another kind."""
    if not isinstance(objective, Objective):
        hint = "; call it first" if isinstance(objective, type) and issubclass(objective, Objective) else ""
        got = objective.__name__ if isinstance(objective, type) else type(objective).__name__
        raise UserError(f"objective: expected one such as steelman.PGDAT(), got {got}{hint}")
    if not isinstance(model, nn.Module):
        raise UserError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(threat, ThreatModel):
        raise UserError(f"threat: expected a steelman.ThreatModel, got {type(threat).__name__}")
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing < 1:
        raise UserError(f"label_smoothing: expected a share of at least 0 and below 1, got {label_smoothing!r}")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise UserError(f"steps: expected a number of steps of at least 1, got {steps!r}")
