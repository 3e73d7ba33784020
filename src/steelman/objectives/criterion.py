"""The loss of any objective, for any training loop."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from lightning_fabric.wrappers import _FabricModule
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from steelman.arguments import check_plain, model_of, number_of
from steelman.attacks.base import check_range
from steelman.errors import UserError, shown
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

    The loss includes the margin of the model's head and the label smoothing. Each step draws its own noise. `outcome`
    holds the last loss, logits and adversarial images. Some work must wait for the gradients, or for the step of the
    optimiser: FreeAT moves its perturbation, TLA fills its pool. This work happens at the next call, or in ``finish``.

    Arguments:
        objective: the method, such as ``steelman.PGDAT()``.
        model: gives logits for images in the threat's range. DistributedDataParallel, Lightning Fabric or torch.compile
            may wrap it. Attacks then work on the module inside.
        threat: the norm, the radius and the range of the pixels.
        seed: decides all noise, together with the step and the index of each sample.
        label_smoothing: this share of the label is spread over all classes.
        eps: a schedule of the radius, such as ``SCHEDULES["linear"](start=0, end=8 / 255)``.
        steps: the number of calls in the whole training. A schedule needs it, or else `progress` in each call.
        awp: adversarial weight perturbation. It moves the weights before the loss, and moves them back after the step
            of the optimiser. So it needs `optimizer`. If no step followed the last loss, call ``criterion.finish()``
            before you measure or save the model.
        optimizer: the optimiser of the model; only `awp` needs it.
        helper: the other model that HAT learns from.
        net: the module that attacks work on. By default it is the one inside `model`.

    With several processes, each process calls its own criterion on its own share of the batch.

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
        check_kinds(objective, model, threat)
        _check(label_smoothing, steps, seed)
        self.objective, self.model, self.threat = objective, model, threat
        if eps is not None and not callable(eps):
            number_of("eps", eps, "a radius or a schedule")
        self.net = bare(model) if net is None else model_of("net", net)
        self.key, self.label_smoothing, self.eps, self.steps = Key(seed), label_smoothing, eps, steps
        self.awp, self.helper = awp, helper
        self.step = self.seen = 0
        self.carry: dict[str, Tensor] = {}
        self._shift: dict[str, Tensor] | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        self._differentiated = False
        self._finished = True
        self.advise = True  # whether to warn if training will be slow
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
        """The mean loss of a batch. Call ``backward`` on it.

        Arguments:
            x, y: images and labels.
            index: the place of each sample in the data. It decides the sample's noise. By default samples are counted.
            progress: the share of the training that is done, 0 .. 1. By default it is (calls done) / `steps`.
            eps: the radius of this step. By default it is that of the schedule.
        """
        self.finish()
        self._check_batch(x, y)
        share = self._share(progress)
        radius = self._radius(share, eps)
        if index is not None and (not isinstance(index, Tensor) or index.shape != y.shape or index.is_floating_point()):
            raise UserError(f"index: expected a tensor with the place of each of the {len(y)} samples")
        if index is not None:
            check_plain("index", index)
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
            raise UserError("the loss depends on no weight that requires a gradient: nothing would be trained")
        self.outcome.loss.register_hook(seen)  # type: ignore[no-untyped-call]
        return self.outcome.loss

    def finish(self) -> None:
        """Do the work that follows a step of the optimiser. The next call does it too.

        After a backward pass, the objective uses the gradients: FreeAT, for example, moves its perturbation. Weights
        that are still perturbed move back. Heads with ``wn_mode="project"`` put their weights back on the sphere.
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
        """The batches of a loader, each as many times in a row as the objective trains on it (FreeAT: `replays`)."""
        for batch in loader:
            for _ in range(self.objective.repeats):
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint needs, so that a resumed training ends with the same weights."""
        self.finish()
        return {**self._named(), "step": self.step, "seen": self.seen, "carry": dict(self.carry)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` gave."""
        expected = {*self._named(), "step", "seen", "carry"}
        if not isinstance(state, dict) or state.keys() != expected:
            got = (", ".join(map(str, state)) or "none") if isinstance(state, dict) else type(state).__name__
            raise UserError(f"expected the state of a criterion ({', '.join(sorted(expected))}), got {got}")
        if state["objective"] != self._named()["objective"]:
            raise UserError(
                f"expected the state of a criterion of {self._named()['objective']}, got one of {state['objective']}"
            )
        device = next((parameter.device for parameter in self.net.parameters()), torch.device("cpu"))
        self.step, self.seen = int(state["step"]), int(state["seen"])
        self.carry = {name: value.to(device) for name, value in state["carry"].items()}
        self._last, self._shift, self._finished = None, None, True

    def _named(self) -> dict[str, str]:
        """The objective's name, kept with the state, so that the state of another objective is refused."""
        return {"objective": type(self.objective).__name__}

    def _unshift(self, *_: object) -> None:
        """Move perturbed weights back."""
        if self._shift is not None:
            shift(self.net, self._shift, -1)
            self._shift = None

    def _share(self, progress: float | None) -> float:
        """The share of the training that is done."""
        if progress is not None:
            if not 0 <= number_of("progress", progress, "the share of the training that is done, 0 .. 1") <= 1:
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
                f"the criterion was made for {self.steps} steps, and this is one more: schedules keep their last value",
                stacklevel=3,
            )
        return min(self.step / self.steps, 1.0)

    def _scheduled(self) -> str:
        """The name of a setting that changes with the progress of the training, or an empty text."""
        if callable(self.eps):
            return "eps"
        if self.awp is not None and self.awp.start > 0:
            return "awp.start"
        own = self.objective.scheduled()
        return f"{type(self.objective).__name__}.{own}" if own else ""

    def _radius(self, share: float, eps: float | None) -> float:
        radius = (
            number_of("eps", eps)
            if eps is not None
            else self.threat.eps
            if self.eps is None
            else value_at(self.eps, share)
        )
        if not 0 <= radius <= self.threat.eps * (1 + 1e-9):
            raise UserError(f"eps: expected a radius of 0 up to the threat's {self.threat.eps:g}, got {radius:g}")
        return float(radius)

    def _count(self, x: Tensor) -> Tensor:
        """Indices for samples without one: each sample of the training gets another index."""
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several else (0, 1)
        if self.step % self.objective.repeats == 0:
            self.seen += len(x) * world
        return self.seen - len(x) * world + rank + world * torch.arange(len(x), device=x.device)

    def _check_parts(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse parts that cannot be combined, before the first batch."""
        modules = list(self.model.modules())
        clashes = objections(
            self.objective,
            compiled=any(_compiled(module) for module in modules),
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
            raise UserError("helper: expected another model than the model in training, got the same")
        if self.awp is not None:
            if not isinstance(self.awp, AWP):
                raise UserError(f"awp: expected one such as steelman.AWP(), got {shown(self.awp)}")
            if optimizer is None:
                raise UserError(
                    "weight perturbation moves the weights back after the optimiser's step: expected `optimizer` with "
                    "`awp`"
                )
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise UserError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
            mine = {id(parameter) for parameter in self.net.parameters()}
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if not mine & stepped:
                raise UserError(
                    "optimizer: expected the one that steps the model's weights, got one that steps none of them"
                )
            # Without this hook the weights would stay perturbed until the next call. A checkpoint or an evaluation in
            # between would use the perturbed weights.
            this = weakref.WeakMethod(self._unshift)
            optimizer.register_step_post_hook(lambda *_: undo() if (undo := this()) is not None else None)

    def _check_batch(self, x: Tensor, y: Tensor) -> None:
        """Refuse a batch that cannot be trained on. The slow checks look at the first batch alone."""
        name = type(self.objective).__name__
        for what, value in (("images", x), ("labels", y)):
            if not isinstance(value, Tensor):
                raise UserError(f"expected {what} as a tensor, got {type(value).__name__}")
            check_plain(what, value)
        if x.dim() < 2 or not x.is_floating_point() or not x.numel():
            raise UserError(f"expected floating-point images (N, C, H, W), got {x.dtype} of shape {tuple(x.shape)}")
        _check_precision(self.net, x)
        if y.dtype != torch.int64 or y.shape != x.shape[:1]:
            raise UserError(f"expected {len(x)} labels in int64, got {y.dtype} of shape {tuple(y.shape)}")
        if int(y.min()) < 0:
            raise UserError(f"expected labels of 0 or more, got {int(y.min())}")
        if not self.net.training:
            raise UserError(
                "the model is in eval mode, and batch norm and dropout would not train: call model.train(). To measure "
                "a model, attack it instead, such as with steelman.PGD()(model, x, y, threat)"
            )
        if not torch.is_grad_enabled():
            raise UserError("gradients are off, and a training loss needs them: call the criterion outside no_grad()")
        turn = self.step % self.objective.repeats
        if turn and self._last is not None and not (torch.equal(self._last[1], y) and torch.equal(self._last[0], x)):
            raise UserError(
                f"{name} trains {self.objective.repeats} times in a row on each batch, and this is another batch after "
                f"{turn} times: loop over criterion.batches(loader), and do not change the images inside the loop"
            )
        if self.objective.repeats > 1:
            self._last = (x, y)
        try:
            check_range(x, self.threat)
        except UserError as error:
            raise UserError(
                f"{error}. The model must normalise its own images: steelman.wrap(model, mean=..., std=...)"
            ) from None
        if self.step == 0:
            check_model(self.objective, self.net, x[:2])
            if self.advise and (said := parallel(self.net, x[:32])):
                warnings.warn(said, stacklevel=3)


def _compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, by ``torch.compile(module)`` or by ``module.compile()``."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _check_precision(net: nn.Module, x: Tensor) -> None:
    """Refuse images of another precision than the weights, unless autocast converts them."""
    kinds = {parameter.dtype for parameter in net.parameters() if parameter.is_floating_point()}
    if kinds and x.dtype not in kinds and not torch.is_autocast_enabled(x.device.type):
        names = " or ".join(sorted(map(str, kinds)))
        raise UserError(f"expected images in {names}, as the model's weights are, got {x.dtype}")


def bare(model: nn.Module) -> nn.Module:
    """The module inside the wrappers that exchange gradients or convert precision. A compiled model stays compiled."""
    while isinstance(model, (_FabricModule, DistributedDataParallel, DataParallel)):
        model = model.module
    return model


def check_kinds(objective: object, model: object, threat: object) -> None:
    """Refuse an objective, a model or a threat model of another kind."""
    if not isinstance(objective, Objective):
        hint = "; call it first" if isinstance(objective, type) and issubclass(objective, Objective) else ""
        got = objective.__name__ if isinstance(objective, type) else type(objective).__name__
        raise UserError(f"objective: expected one such as steelman.PGDAT(), got {got}{hint}")
    model_of("model", model)
    if not isinstance(threat, ThreatModel):
        raise UserError(f"threat: expected a steelman.ThreatModel, got {type(threat).__name__}")


def _check(label_smoothing: object, steps: object, seed: object) -> None:
    """Refuse numbers out of their range."""
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing < 1:
        raise UserError(f"label_smoothing: expected a share of at least 0 and below 1, got {shown(label_smoothing)}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UserError(f"seed: expected a whole number, got {shown(seed)}")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise UserError(f"steps: expected a number of steps of at least 1, got {shown(steps)}")
