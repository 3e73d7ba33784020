"""The promises of a head."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.errors import UserError, shown
from steelman.heads import Head, heads_of, with_margin
from steelman.testing.promises import Subject, gap, name_of, noise, same_bits

FEATURES, CLASSES = 6, 4
SCALE, MARGIN = 3.0, 0.25


def check_head(head_factory: Callable[[int, int], Head]) -> None:
    """Raise `ContractBrokenError` unless a head keeps its promises.

    The promises:
    - It is a `Head`, and gives one row of logits for each sample.
    - Its scale is in the logits. Its margin is not: only ``with_margin`` applies it, to the true class.
    - Gradients are finite for features that are zero, or parallel to a weight.
    - Half precision, a deep copy and a saved state work.
    - ``project`` changes no logit.

    Arguments:
        head_factory: called with the numbers of features and classes, it makes a new head with new random weights.

    >>> from steelman.heads import HEADS
    >>> check_head(HEADS["he"])
    """
    if isinstance(head_factory, nn.Module) or not callable(head_factory):  # a head can be called too, with features
        expected = "a function that makes a head for (features, classes), such as HEADS['he']"
        raise UserError(f"head_factory: expected {expected}, got {shown(head_factory)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        _Check(Subject(name_of(head_factory)), head_factory).all()


@dataclasses.dataclass
class _Check:
    subject: Subject
    factory: Callable[[int, int], Any]

    def all(self) -> None:
        self.logits()
        self.scale()
        self.margin()
        self.gradients()
        self.half()
        self.copies()
        self.project()

    def head(self) -> Head:
        with self.subject.runs(f"to be made for {FEATURES} features and {CLASSES} classes"):
            head = self.factory(FEATURES, CLASSES)
        text = f"makes a {type(head).__name__}, expected a steelman Head, because with_margin finds no other"
        self.subject.keeps("kind", isinstance(head, Head), text)
        return head  # type: ignore[no-any-return]

    def asked(self, head: nn.Module, z: Tensor, what: str = "on 5 rows of features") -> Tensor:
        with self.subject.runs(what):
            logits: Tensor = head(z)
        expected = (len(z), CLASSES)
        text = f"gives logits of shape {tuple(logits.shape)} {what}, expected {expected}"
        self.subject.keeps("shape", logits.shape == expected, text)
        wrong = int((~logits.isfinite()).sum())
        self.subject.keeps("finite", not wrong, f"gives {wrong} logits that are NaN or infinite {what}")
        return logits

    def logits(self) -> None:
        """One row for each sample, which depends on that sample alone; and gradients for every weight."""
        head, z = self.head(), noise("z", 5, FEATURES, normal=True).float()
        logits = self.asked(head, z)
        self.asked(head, z[:0], "on an empty batch")
        alone = torch.cat([self.asked(head, z[row : row + 1], "on one row") for row in range(5)])
        text = f"gives a sample other logits alone than among 5, {gap(logits, alone)}"
        self.subject.keeps("batch", torch.allclose(logits, alone, rtol=1e-4, atol=1e-5), text)
        self.subject.keeps("gradient", logits.requires_grad, "gives logits without a gradient for any weight")
        torch.autograd.backward(logits.square().sum())
        for name, weight in head.named_parameters():
            self.subject.keeps("gradient", weight.grad is not None, f"gives no gradient for {name}")

    def scale(self) -> None:
        """The logits are a linear function of the scale, plus a constant such as a bias."""
        head, z = self.head().double(), noise("z", 5, FEATURES, normal=True)
        rows = []
        for factor in (1, 2, 3):
            head.scale = factor * SCALE
            rows.append(self.asked(head, z).detach())
        one, two, three = rows
        text = f"ignores its scale: logits at scale {SCALE:g} and {2 * SCALE:g} are the same"
        self.subject.keeps("scale", not torch.allclose(one, two), text)
        text = f"does not multiply by its scale: from {SCALE:g} to {2 * SCALE:g} logits grow by another amount than"
        self.subject.keeps("scale", torch.allclose(two - one, three - two), f"{text} up to {3 * SCALE:g}")

    def margin(self) -> None:
        """``with_margin`` lowers the true class by scale * margin, and changes nothing else."""
        head, z, y = self.head().double(), noise("z", 5, FEATURES, normal=True), torch.tensor([0, 1, 2, 3, 1])
        head.scale, head.margin = SCALE, 0.0
        plain = self.asked(head, z).detach()
        text = "changes logits in with_margin although its margin is 0"
        self.subject.keeps("margin", torch.allclose(head.with_margin(plain, y), plain), text)
        head.margin = MARGIN
        own = self.asked(head, z).detach()
        text = f"has its margin in the logits that an attack sees, {gap(plain, own)}"
        self.subject.keeps("margin", same_bits(own, plain), text)
        expected = plain - SCALE * MARGIN * F.one_hot(y, CLASSES)
        lowered = with_margin(nn.Sequential(head), plain, y)
        text = f"lowers the true class in with_margin by another amount than scale * margin = {SCALE * MARGIN:g}, off "
        self.subject.keeps("margin", torch.allclose(lowered, expected), text + gap(expected, lowered))
        self.subject.keeps("kind", heads_of(nn.Sequential(head)) == [head], "holds a second steelman head")

    def gradients(self) -> None:
        """Gradients are finite where the derivative of a length or an angle is not: at zero, and along a weight."""
        for dtype in (torch.float32, torch.float64):
            head = self.head().to(dtype)
            rows = head.weight.detach()
            for what, features in (
                ("zero features", torch.zeros(2, FEATURES, dtype=dtype)),
                ("features parallel to a weight", torch.cat((3 * rows, -3 * rows, rows))),
            ):
                z = features.requires_grad_()
                logits = self.asked(head, z, f"on {what}")
                loss = F.cross_entropy(logits, torch.arange(len(z)) % CLASSES)
                for name, gradient in _gradients(loss, {"features": z, **dict(head.named_parameters())}).items():
                    wrong = int((~gradient.isfinite()).sum())
                    text = f"gives {wrong} gradients of {name} that are NaN or infinite on {what}"
                    self.subject.keeps("gradient", not wrong, text)

    def half(self) -> None:
        """In bfloat16 and under autocast, the logits are about those of full precision."""
        head, z = self.head(), noise("z", 5, FEATURES, normal=True).float()
        full = self.asked(head, z).detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            auto = self.asked(head, z, "under autocast to bfloat16").detach()
        rounded = copy.deepcopy(head).bfloat16()
        low = z.bfloat16().requires_grad_()
        half = self.asked(rounded, low, "in bfloat16")
        gradient = _gradients(half.float().square().sum(), {"features": low})["features"]
        self.subject.keeps("half", gradient.isfinite().all(), "gives gradients in bfloat16 that are not finite")
        largest = float(full.abs().max())
        for what, logits in (("under autocast to bfloat16", auto), ("in bfloat16", half.detach())):
            off = float((logits.float() - full).abs().max())
            text = f"gives logits {what} that are wrong by {off:.3g}; the largest logit is {largest:.3g}"
            self.subject.keeps("half", off <= 0.1 * largest, text)

    def copies(self) -> None:
        """A deep copy, and a head that loads the state, give the same logits. The copy has its own weights."""
        head, z = self.head(), noise("z", 5, FEATURES, normal=True).float()
        logits = self.asked(head, z).detach()
        with self.subject.runs("to be copied"):
            twin = copy.deepcopy(head)
        self.subject.keeps("copy", same_bits(self.asked(twin, z).detach(), logits), "gives other logits as a deep copy")
        with torch.no_grad():
            for weight in twin.parameters():
                weight.add_(1)
        text = "shares weights with its deep copy: they changed together"
        self.subject.keeps("copy", same_bits(self.asked(head, z).detach(), logits), text)
        other = self.head()
        with self.subject.runs("to load its own state_dict"):
            other.load_state_dict(copy.deepcopy(head.state_dict()))
        loaded = self.asked(other, z).detach()
        text = f"gives other logits after state_dict and load_state_dict, {gap(logits, loaded)}"
        self.subject.keeps("state", same_bits(loaded, logits), text)

    def project(self) -> None:
        """``project`` may change the length of the weights after a step of an optimiser, but no logit."""
        head, z = self.head().double(), noise("z", 5, FEATURES, normal=True)
        with torch.no_grad():
            for weight in head.parameters():
                weight.mul_(2)
        weights = list(head.parameters())
        before = self.asked(head, z).detach()
        with self.subject.runs("in project()"):
            head.project()
        after = self.asked(head, z).detach()
        text = f"changes logits in project(), {gap(before, after)}"
        self.subject.keeps("project", torch.allclose(after, before), text)
        kept = all(one is other and one.requires_grad for one, other in zip(weights, head.parameters(), strict=True))
        self.subject.keeps("project", kept, "replaces or freezes weights in project(): an optimiser keeps the old ones")
        head.project()
        text = "has other weights after a second project()"
        self.subject.keeps("project", torch.allclose(self.asked(head, z).detach(), after), text)


def _gradients(loss: Tensor, of: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of a loss, by name. The gradient is zero where the loss does not depend on a tensor."""
    found = torch.autograd.grad(loss, list(of.values()), materialize_grads=True)
    return dict(zip(of, found, strict=True))
