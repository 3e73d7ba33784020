"""`check_attack`: does an attack keep its promises?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from steelman.attacks.base import Attack, logits_of, untouched
from steelman.rng import Key
from steelman.testing.promises import (
    Curved,
    Interrupt,
    Snapshot,
    Straight,
    Subject,
    check_ingredient,
    gap,
    global_noise,
    made,
    name_of,
    noise,
    one_thread,
    same_bits,
    trapped,
)
from steelman.threat import ORDER, Norm, ThreatModel

CLASSES = 4
# The radius on the linear model. It is so small that a single pixel can change by the whole radius.
REACH: dict[Norm, float] = {"linf": 0.1, "l2": 0.2, "l1": 0.3}
# The distance of the boundary, as a share of the radius. A random search needs a nearer one, above all in l2.
GRADIENT, BLIND, BLIND_L2 = 0.9, 0.4, 0.1
WHOLE = "when it ran on 8 images"


def check_attack(
    attack: Attack | Callable[[], Attack],
    *,
    norms: Sequence[Norm] | None = None,
    model: nn.Module | None = None,
    shape: tuple[int, int, int] = (1, 3, 4),
    boundary: float | None = None,
) -> None:
    """Raise `ContractBrokenError` unless an attack keeps its promises.

    The promises:
    - Its adversarial images have the shape and the type of the images. They lie in the range and in the ball.
    - They depend on the key and on each image's index, not on the batch or its order.
    - The model and the global random generators are as before, even after an exception.
    - One image, no image, two classes and a radius of zero work.
    - It breaks the samples of a linear model whose boundary is near.
    - If it has a method ``run``, the passes and the successes that this reports are true.

    Arguments:
        attack: the attack with small settings, or a function that makes it.
        norms: the norms to check; by default the attack's own `norms`, or all three.
        model: the model to attack, if the attack needs a certain kind. It gives logits for images of `shape`, which are
            the same to the bit in any batch.
        shape: (C, H, W) of the images.
        boundary: the distance of the linear model's boundary, as a share of the radius. By default it is 0.9; for a
            `black_box` attack it is 0.4, and in l2 0.1. 0 skips the linear model.

    >>> from steelman.attacks import PGD
    >>> check_attack(PGD(steps=5), norms=["linf"])
    """
    attack = cast(Attack, made(attack))
    check_ingredient("attack", attack, "an attack, such as PGD(steps=10)")
    chosen = norms or getattr(attack, "norms", None) or tuple(ORDER)
    with one_thread():
        for norm in chosen:
            _Check(Subject(f"{name_of(attack)} ({norm})"), attack, norm, model, shape, boundary).all()


@dataclasses.dataclass
class _Check:
    """One attack in one norm."""

    subject: Subject
    attack: Any
    norm: Norm
    model: nn.Module | None
    shape: tuple[int, int, int]
    boundary: float | None

    def all(self) -> None:
        self.answer()
        self.trace()
        self.key()
        self.batch()
        self.sizes()
        if self.boundary != 0:
            self.finds()
        if hasattr(self.attack, "run"):
            self.account()

    @property
    def threat(self) -> ThreatModel:
        return ThreatModel(norm=self.norm, eps=0.1 * math.prod(self.shape) ** (1 / ORDER[self.norm]))

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the images: that of the given model, or float64."""
        given = None if self.model is None else next(self.model.parameters(), None)
        return torch.float64 if given is None else given.dtype

    def samples(self, classes: int = CLASSES) -> tuple[nn.Module, Tensor, Tensor]:
        """A model, images with pixels at both ends of the range, and the labels that the model gives them."""
        x = (1.4 * noise("x", 8, *self.shape) - 0.2).clamp(0, 1).to(self.dtype)
        model = Curved(classes, math.prod(self.shape)) if self.model is None else self.model
        with untouched(model), torch.no_grad():
            return model, x, logits_of(model, x).argmax(dim=1)

    def call(self, what: str, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
        """The attack's adversarial images. An error, or another type than a tensor, breaks a promise."""
        with self.subject.runs(f"on {what}"):
            x_adv = self.attack(model, x, y, threat, **rest)
        self.subject.keeps("tensor", isinstance(x_adv, Tensor), f"gives {type(x_adv).__name__}, not a tensor of images")
        kept = x_adv.shape == x.shape
        text = f"gives points of shape {tuple(x_adv.shape)} for images of shape {tuple(x.shape)} ({what})"
        self.subject.keeps("shape", kept, text)
        self.subject.keeps("dtype", x_adv.dtype == x.dtype, f"gives points in {x_adv.dtype} for images in {x.dtype}")
        self.subject.keeps("constants", not x_adv.requires_grad, "gives points that require a gradient")
        return cast(Tensor, x_adv)

    def answer(self) -> None:
        """Shape, type, range and radius: in two precisions, for two radii, and for two ranges of pixels."""
        model, x, y = self.samples()
        single = torch.float32 if self.model is None else self.dtype
        for dtype, wide, low in ((single, 1, 0.0), (self.dtype, 4, 0.0), (single, 1, -1.0)):
            threat = ThreatModel(norm=self.norm, eps=wide * self.threat.eps, low=low)
            images = x.to(dtype)
            given, labels = images.clone(), y.clone()
            x_adv = self.call("8 images", model, given, labels, threat, key=Key(1))
            untold = same_bits(given, images) and torch.equal(labels, y)
            self.subject.keeps("input", untold, "changes the images or labels that it was given")
            self._inside(x_adv, images, threat)

    def _inside(self, x_adv: Tensor, x: Tensor, threat: ThreatModel) -> None:
        wrong = int((~x_adv.isfinite()).sum())
        self.subject.keeps("finite", not wrong, f"gives {wrong} pixels that are NaN or infinite")
        low, high = float(x_adv.min()), float(x_adv.max())
        boxed = threat.low <= low and high <= threat.high
        text = f"leaves the range [{threat.low:g}, {threat.high:g}]: its pixels are {low:.6g} .. {high:.6g}"
        self.subject.keeps("box", boxed, text)
        far = torch.linalg.vector_norm((x_adv.double() - x.double()).flatten(1), ord=threat.p, dim=1)
        text = f"leaves the ball: a point is {float(far.max()):.6g} away, and the radius is {threat.eps:.6g}"
        self.subject.keeps("radius", threat.contains(x_adv, x).all(), text)

    def trace(self) -> None:
        """The model and the generators are as before, also if an error of the model ended the attack."""
        net, x, y = self.samples()
        if self.model is None:
            net, x = trapped(CLASSES, self.shape), x.float()
            # A twin gives the labels: `untouched` is not used on the network, for that would hide what it leaves.
            y = trapped(CLASSES, self.shape).eval()(x).argmax(dim=1)
        before = Snapshot(net)
        self.call("a network with batch norm and dropout", net, x, y, self.threat)
        before.check(self.subject, WHOLE)
        for at in (1, 2):
            self._interrupted(net, x, y, at)

    def _interrupted(self, net: nn.Module, x: Tensor, y: Tensor, at: int) -> None:
        calls = 0

        def stop(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Interrupt

        handle = net.register_forward_pre_hook(stop)
        before = Snapshot(net)
        try:
            # With a larger radius, an attack could break all samples and end before the second forward.
            self.attack(net, x, y, self.threat.at(1e-6))
        except Interrupt:
            before.check(self.subject, f"when forward {at} of the model raised an error")
        else:
            self.subject.keeps("errors", calls < at, f"hides that forward {at} of the model was interrupted")
        finally:
            handle.remove()

    def key(self) -> None:
        """The same key gives the same images. The global generators and the gradient mode have no effect."""
        model, x, y = self.samples()
        with global_noise(1):
            one = self.call("8 images", model, x, y, self.threat, key=Key(5))
        with global_noise(2):
            other = self.call("8 images", model, x, y, self.threat, key=Key(5))
        self.subject.keeps("key", same_bits(one, other), f"gives other points for the same key, {gap(one, other)}")
        with torch.no_grad():
            other = self.call("8 images with gradients off", model, x, y, self.threat, key=Key(5))
            off = not torch.is_grad_enabled()
        self.subject.keeps("no_grad", off, "leaves gradients switched on inside torch.no_grad()")
        text = f"gives other points inside torch.no_grad(), {gap(one, other)}"
        self.subject.keeps("no_grad", same_bits(one, other), text)

    def batch(self) -> None:
        """A sample's adversarial image depends on its index, not on its place in the batch or on other samples."""
        model, x, y = self.samples()
        index = torch.tensor([30, 4, 77, 12, 9, 1, 5, 600])
        order = torch.tensor([6, 0, 3, 7, 1, 2, 5, 4])
        whole = self.call("8 images", model, x, y, self.threat, index=index, key=Key(2))
        mixed = self.call("8 images", model, x[order], y[order], self.threat, index=index[order], key=Key(2))
        kept = same_bits(mixed, whole[order])
        self.subject.keeps("order", kept, lambda: f"gives other points in another order, {gap(whole[order], mixed)}")
        for row in (0, 3, 7):
            one = slice(row, row + 1)
            alone = self.call("one image", model, x[one], y[one], self.threat, index=index[one], key=Key(2))
            kept, apart = same_bits(alone, whole[one]), gap(whole[one], alone)
            self.subject.keeps("batch", kept, f"gives image {row} another point alone than among 8, {apart}")

    def sizes(self) -> None:
        """No images, no radius, two classes."""
        model, x, y = self.samples()
        self.call("an empty batch", model, x[:0], y[:0], self.threat)
        still = self.call("a radius of zero", model, x, y, self.threat.at(0.0))
        self.subject.keeps("zero", torch.equal(still, x), f"moves images at a radius of zero, {gap(x, still)}")
        if self.model is None:
            two, x, y = self.samples(classes=2)
            x_adv = self.call("two classes", two, x, y, self.threat)
            self._inside(x_adv, x, self.threat)

    def finds(self) -> None:
        """The attack breaks all samples of a linear model whose boundary lies within the radius."""
        blind = getattr(self.attack, "black_box", False)
        part = self.boundary or (GRADIENT if not blind else BLIND_L2 if self.norm == "l2" else BLIND)
        threat = ThreatModel(norm=self.norm, eps=REACH[self.norm])
        dual = {"linf": 1.0, "l2": 2.0, "l1": math.inf}[self.norm]
        line = Straight(self.shape, part * threat.eps, dual)
        y = torch.zeros(len(line.images), dtype=torch.int64)
        x_adv = self.call("a linear model", line, line.images, y, threat, key=Key(7))
        self._inside(x_adv, line.images, threat)
        with torch.no_grad():
            broken = int((line(x_adv).argmax(dim=1) != y).sum())
        text = (
            f"breaks {broken} of {len(y)} samples of a linear model whose boundary is {part:.0%} of the radius away; "
            "expected all"
        )
        self.subject.keeps("finds", broken == len(y), text)

    def account(self) -> None:
        """``run`` gives the same images, the true number of passes, and the true successes."""
        model, x, y = self.samples()
        counting = Counting(model)
        with self.subject.runs("in run() on 8 images"):
            found = self.attack.run(counting, x, y, self.threat, key=Key(5))
        alike = same_bits(self.call("8 images", model, x, y, self.threat, key=Key(5)), found.x_adv)
        self.subject.keeps("run", alike, "gives other points in run() than when it is called")
        for what, told, seen in (
            ("forwards", found.forwards, counting.forwards),
            ("backwards", found.backwards, counting.backwards),
        ):
            text = f"counts {int(told.sum())} {what} of samples, and the model saw {seen}"
            self.subject.keeps("passes", int(told.sum()) == seen, text)
        asked = not (getattr(self.attack, "black_box", False) and counting.backwards)
        text = f"says that it is a black box, and asked for {counting.backwards} gradients"
        self.subject.keeps("black_box", asked, text)
        if getattr(self.attack, "keep", "best") != "last":  # the last image need not be one that broke the sample
            with untouched(model), torch.no_grad():
                broken = logits_of(model, found.x_adv).argmax(dim=1) != y
            false = int((found.success & ~broken).sum())
            text = f"claims {int(found.success.sum())} successes of 8, and on {false} of them the model is right"
            self.subject.keeps("success", not false, text)
            text = f"claims no success, and the model is wrong on {int(broken.sum())} of 8 samples"
            self.subject.keeps("success", found.success.any() or not broken.any(), text)
        known = (found.distance is not None) == bool(getattr(self.attack, "minimum_norm", False))
        text = "gives `distance` without `minimum_norm`, or `minimum_norm` without `distance`; expected both or none"
        self.subject.keeps("distances", known, text)


class Counting(nn.Module):
    """A model that counts the samples that go through it, and the gradients that come back."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.forwards, self.backwards = model, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += len(x)
        if x.requires_grad:
            x.register_hook(lambda _: self._back(len(x)))  # type: ignore[no-untyped-call]
        logits: Tensor = self.model(x)
        return logits

    def _back(self, count: int) -> None:
        self.backwards += count
