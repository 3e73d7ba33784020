"""Threat models: a norm, a radius and the valid range of pixels.

Projection is exact: it gives the nearest point of the ball and the box together. A projection onto the ball, followed
by a clip to the box, would cost an l1 attack a large part of its radius (Croce and Hein, 2021, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from steelman.errors import UserError
from steelman.rng import Key
from steelman.settings import Number, SettingsError, settings

Norm = Literal["linf", "l2", "l1"]
ORDER: dict[str, float] = {"linf": math.inf, "l2": 2.0, "l1": 1.0}


def norms(delta: Tensor, p: float) -> Tensor:
    """The p-norm of each sample's perturbation, computed in float64."""
    flat = delta.flatten(1).to(torch.float64)
    if flat.shape[1] == 0 or flat.shape[0] == 0:
        return flat.new_zeros(flat.shape[0])
    return torch.linalg.vector_norm(flat, ord=p, dim=1)  # type: ignore[no-any-return]


def steepest(u: Tensor, p: float) -> Tensor:
    """U_p(u) = argmax over ||v||_p <= 1 of u.v, for each sample; u.U_p(u) is the dual norm ||u||_q.

    U_inf(u) = sign(u), and U_2(u) = u / ||u||_2. U_1(u) is the sign of u at its largest coordinate, and zero elsewhere.
    For other p, U_p(u)_i = sign(u_i) |u_i|^(q-1) / ||u||_q^(q-1), with 1/p + 1/q = 1. A zero gradient gives zero.

    Pang et al. (2020), "Boosting Adversarial Training with Hypersphere Embedding", Eq. (7) and Lemma 1.

    >>> steepest(torch.tensor([[3.0, -4.0]]), 2.0)
    tensor([[ 0.6000, -0.8000]])
    """
    if not p >= 1:
        raise UserError(f"expected a norm order p >= 1, got {p}")
    flat = u.flatten(1)
    if flat.numel() == 0:
        return u.clone()
    if p == math.inf:
        return u.sign()
    size = flat.abs()
    largest = size.amax(dim=1, keepdim=True)
    if p == 1:
        top = size.argmax(dim=1, keepdim=True)
        return (torch.zeros_like(flat).scatter(1, top, 1.0) * flat.sign()).reshape(u.shape)
    # Without this division the powers of tiny gradients would round to zero.
    scaled = size / torch.where(largest > 0, largest, torch.ones_like(largest))
    q = p / (p - 1)
    powered = scaled ** (q - 1)
    dual = (scaled**q).sum(dim=1, keepdim=True) ** ((q - 1) / q)
    return (flat.sign() * powered / torch.where(dual > 0, dual, torch.ones_like(dual))).reshape(u.shape)


def _shrink_l2(a: Tensor, room: Tensor, eps: float) -> Tensor:
    """Magnitudes min(s a, room), with the scale s that puts them on the l2 sphere.

    Newton's iteration finds s from below. Each round fixes the coordinates that have reached their bounds, and solves
    for s: a square root. A larger s may bring more coordinates to their bounds. When it brings none, s is exact. This
    takes a few rounds, and less time than sorting the bounds.
    """
    a = a / a.amax(dim=1, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    squares, bounds = a.square(), room.square()
    scale = eps / squares.sum(dim=1, keepdim=True).sqrt().clamp_min(torch.finfo(a.dtype).tiny)
    while True:
        met = scale * a >= room
        held = torch.where(met, bounds, 0.0).sum(dim=1, keepdim=True)
        free = torch.where(met, 0.0, squares).sum(dim=1, keepdim=True)
        risen = ((eps**2 - held).clamp_min(0) / free.clamp_min(torch.finfo(a.dtype).tiny)).sqrt()
        if not (risen > scale).any():
            return torch.minimum(scale * a, room)
        scale = torch.maximum(risen, scale)


def _shrink_l1(a: Tensor, room: Tensor, eps: float) -> Tensor:
    """Magnitudes clip(a - t, 0, room), with the threshold t that puts them on the l1 sphere.

    The sum of the magnitudes is piecewise linear in t. Sorting the points where its slope changes gives t exactly.
    """
    start = (a - room).clamp_min(0)
    points, order = torch.cat((start, a), dim=1).sort(dim=1)
    change = torch.cat((-torch.ones_like(a), torch.ones_like(a)), dim=1).gather(1, order)
    points = torch.nn.functional.pad(points, (1, 0))
    slope = torch.nn.functional.pad(change.cumsum(dim=1), (1, 0))
    total = torch.minimum(a, room).sum(dim=1, keepdim=True)
    falls = torch.nn.functional.pad((slope[:, :-1] * points.diff(dim=1)).cumsum(dim=1), (1, 0))
    values = total + falls
    last = ((values >= eps).sum(dim=1, keepdim=True) - 1).clamp_min(0)
    rate = (-slope.gather(1, last)).clamp_min(1.0)
    threshold = points.gather(1, last) + (values.gather(1, last) - eps).clamp_min(0) / rate
    return torch.minimum((a - threshold).clamp_min(0), room)


@settings
class ThreatModel:
    """The set S(x) = {x' : ||x' - x||_p <= eps and low <= x' <= high}.

    >>> threat = ThreatModel(norm="linf", eps=8 / 255)
    >>> x = torch.full((1, 1, 2, 2), 0.5)
    >>> bool(threat.contains(threat.project(x + 1, x), x).all())
    True
    """

    norm: Norm = "linf"
    eps: Annotated[Number, Field(ge=0)]
    low: Number = 0.0
    high: Number = 1.0

    @model_validator(mode="after")
    def _possible(self) -> ThreatModel:
        if not self.low < self.high:
            raise UserError(f"expected low < high, got low {self.low} and high {self.high}")
        # In l2 and l1 the largest possible distance depends on the size of the images, which is unknown here.
        if self.norm == "linf" and (problem := self.too_wide(())):
            raise SettingsError([(("eps",), problem)])
        return self

    @property
    def p(self) -> float:
        """The order of the norm."""
        return ORDER[self.norm]

    def at(self, eps: float) -> ThreatModel:
        """The same threat with another radius. A radius above the range is allowed: the end of a curve needs one."""
        if not 0 <= eps < math.inf:
            raise UserError(f"eps: expected a radius of at least 0, got {eps}")
        other = ThreatModel(norm=self.norm, eps=0, low=self.low, high=self.high)
        object.__setattr__(other, "eps", float(eps))  # the constructor would refuse a radius above the range
        return other

    def widest(self, shape: Sequence[int]) -> float:
        """The largest distance between two images of this shape, (C, H, W).

        >>> ThreatModel(norm="l2", eps=0.5).widest((1, 2, 2))
        2.0
        """
        return (self.high - self.low) * float(max(1, math.prod(shape)) ** (1 / self.p))

    def too_wide(self, shape: Sequence[int]) -> str | None:
        """A sentence if no image of this shape can be as far away as the radius, else None."""
        widest = self.widest(shape)
        if self.eps <= widest * (1 + 1e-9):  # without this allowance, 0.7 would be too wide for a range of 0.9 - 0.2
            return None
        of = "" if self.norm == "linf" else f" for images of shape {tuple(shape)} in {self.norm}"
        scaled = self.eps / 255 * (self.high - self.low)
        hint = f"; did you mean {self.eps:g}/255?" if (self.low, self.high) == (0, 1) and scaled <= widest else ""
        return (
            f"expected a radius of at most {widest:g} in a range of {self.low:g} .. {self.high:g}{of}, "
            f"got {self.eps:g}{hint}"
        )

    def project(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """The point of S(x) nearest to `x_adv` in l2."""
        if self.norm == "linf":
            return torch.minimum(torch.maximum(x_adv, x - self.eps), x + self.eps).clamp(self.low, self.high)
        delta = (x_adv - x).flatten(1).to(torch.float64)
        flat = x.flatten(1).to(torch.float64)
        room = torch.where(delta >= 0, self.high - flat, flat - self.low).clamp_min(0)
        size = torch.minimum(delta.abs(), room)
        outside = norms(size, self.p) > self.eps
        if outside.any():
            shrink = _shrink_l2 if self.norm == "l2" else _shrink_l1
            shrunk = shrink(delta[outside].abs(), room[outside], self.eps)
            # For a point far away, rounding can leave the result outside the ball. This brings it back.
            over = norms(shrunk, self.p).clamp_min(self.eps)[:, None]
            size[outside] = shrunk * torch.where(over > 0, self.eps / over, 0.0)
        moved = (flat + delta.sign() * size).to(x.dtype).reshape(x.shape)
        return moved.clamp(self.low, self.high)

    def random_start(self, x: Tensor, index: Tensor, key: Key, box: bool = True) -> Tensor:
        """A uniform draw from the ball around each sample, projected into the box if `box`.

        The draw depends on the key and the sample's index alone.
        """
        shape = tuple(x.shape[1:])
        count = math.prod(shape)
        if self.norm == "linf":
            drawn = x + self.eps * (2 * key.uniform(index, shape, x.dtype) - 1)
            return self.project(drawn, x) if box else drawn
        # A point on the sphere from independent Gaussians (l2) or signed exponentials (l1), at radius u^(1/d).
        draws = key.fold("direction")
        if self.norm == "l2":
            direction = draws.normal(index, (count,), torch.float64)
        else:
            u = 2 * draws.uniform(index, (count,), torch.float64) - 1
            direction = -u.sign() * torch.log1p(-u.abs().clamp_max(1 - 2.0**-25))
        radius = key.fold("radius").uniform(index, (1,), torch.float64) ** (1 / max(count, 1))
        unit = direction / norms(direction, self.p)[:, None].clamp_min(1e-300)
        drawn = x + (self.eps * radius * unit).to(x.dtype).reshape(x.shape)
        return self.project(drawn, x) if box else drawn

    def steepest(self, gradient: Tensor, x_adv: Tensor, length: float = 1.0) -> Tensor:
        """The step of this length along which the loss grows fastest.

        In l2 and l1, a pixel at its bound gets no part of the length. In linf it would take nothing from the others. In
        l1, the pixels share the length in the order of their gradients. Each pixel takes what its bound allows.
        """
        if self.norm == "linf":
            return length * steepest(gradient, self.p)
        if self.norm == "l2":
            blocked = ((gradient > 0) & (x_adv >= self.high)) | ((gradient < 0) & (x_adv <= self.low))
            return length * steepest(torch.where(blocked, 0, gradient), self.p)
        flat = gradient.flatten(1)
        room = torch.where(gradient > 0, self.high - x_adv, x_adv - self.low).flatten(1).clamp(0, length)
        order = flat.abs().argsort(dim=1, descending=True, stable=True)
        take = room.where(flat != 0, torch.zeros_like(room)).gather(1, order)
        take = torch.minimum(take, (length - (take.cumsum(dim=1) - take)).clamp_min(0))
        return (torch.zeros_like(flat).scatter(1, order, take) * flat.sign()).reshape(gradient.shape)

    def tolerance(self, x: Tensor) -> float:
        """How far beyond eps a stored x' may lie: 2 d^(1/p) ulp/2 of the largest value, one rounding for each pixel.

        About 1.2e-7 for linf in float32, 6.6e-6 for l2 on 32x32x3 images, 3.7e-4 for l1 on them.
        """
        rounding = torch.finfo(x.dtype).eps / 2 * max(abs(self.low), abs(self.high))
        return float(2 * rounding * max(1, math.prod(x.shape[1:])) ** (1 / self.p))

    def contains(self, x_adv: Tensor, x: Tensor) -> Tensor:
        """Whether each sample lies in S(x): finite, inside the box exactly, inside the ball within `tolerance`."""
        if x_adv.shape != x.shape:
            raise UserError(f"expected adversarial images of shape {tuple(x.shape)}, got {tuple(x_adv.shape)}")
        flat = x_adv.flatten(1)
        boxed = ((flat >= self.low) & (flat <= self.high)).all(dim=1)  # False for NaN
        distance = norms(x_adv.to(torch.float64) - x.to(torch.float64), self.p)
        return boxed & (distance <= self.eps + self.tolerance(x))
