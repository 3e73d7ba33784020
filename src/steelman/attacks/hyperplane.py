"""Linearised boundaries: the nearest one to a point, and the shortest step onto it that stays in the box.

DeepFool and FAB use both. Around a point, each wrong class k has the boundary f_k + w_k.r = 0. Here f_k is z_k - z_y,
and w_k is the gradient of f_k.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from steelman.attacks.engine import Problem
from steelman.threat import ThreatModel


def step_onto(points: Tensor, normals: Tensor, gaps: Tensor, threat: ThreatModel) -> Tensor:
    """The shortest r in the p-norm with w.r = gap and low <= x + r <= high.

    If there is none, r goes as near as the box allows. Each pixel has some room a_i up to its bound, in the direction
    of the step. In linf, |r_i| = min(t, a_i). In l2, |r_i| = min(t |w_i|, a_i). In l1, the pixels are filled up to
    their bounds, in the order of |w_i|. All three are exact. t solves a concave, piecewise linear equation: Newton's
    steps climb to the solution and end there. The order in l1 is a sort.

    Arguments:
        points: images in the box.
        normals: the w of each boundary.
        gaps: the gap of each boundary, of either sign.

    >>> r = step_onto(torch.tensor([[0.5, 0.9]]), torch.tensor([[1.0, 1.0]]), torch.tensor([0.4]), ThreatModel(eps=1))
    >>> [round(value, 4) for value in r[0].tolist()]  # the second pixel meets its bound, the first takes over
    [0.3, 0.1]

    Croce and Hein (2020), "Minimally distorted adversarial examples with a fast adaptive boundary attack", Eq. (5).
    """
    x, w = points.flatten(1), normals.flatten(1)
    if w.shape[1] == 0:
        return torch.zeros_like(points)
    # Only the direction of w and gap / |w| matter. With the largest |w_i| at 1, no product overflows.
    size = w.abs().amax(dim=1, keepdim=True)
    scale = torch.where(size > 0, size, torch.ones_like(size))
    w = w / scale * gaps.sign()[:, None].to(w.dtype)
    gap = (gaps[:, None] / scale).abs().to(w.dtype)
    room = torch.where(w > 0, threat.high - x, x - threat.low).clamp_min(0)
    weight = w.abs()
    room = room.where(weight > 0, torch.zeros_like(room))
    moved = _fill(weight, room, gap) if threat.p == 1 else _level(weight, room, gap, threat.p)
    return (moved * w.sign()).reshape(points.shape)


def _level(weight: Tensor, room: Tensor, gap: Tensor, p: float) -> Tensor:
    """The min(t v, room) with sum(weight min(t v, room)) = gap. v is 1 for linf, and the weight for l2."""
    v = torch.ones_like(weight) if p == math.inf else weight
    slopes, full = weight * v, weight * room
    level, none = torch.zeros_like(gap), torch.zeros_like(weight)
    while True:
        free = level * v < room  # False also for NaN, from infinity times zero
        rate = torch.where(free, slopes, none).sum(dim=1, keepdim=True)
        left = gap - torch.where(free, none, full).sum(dim=1, keepdim=True)
        risen = torch.maximum(level, torch.where(rate > 0, left / rate, math.inf))
        if torch.equal(risen, level):  # no row has changed, so all rows are at their solutions
            return torch.where(free, level * v, room)
        level = risen


def _fill(weight: Tensor, room: Tensor, gap: Tensor) -> Tensor:
    """Fill the pixels in the order of their weights, until sum(weight filled) = gap."""
    weight, order = weight.sort(dim=1, descending=True, stable=True)
    room = room.gather(1, order)
    full = weight * room
    left = (gap - (full.cumsum(dim=1) - full)).clamp_min(0)
    taken = torch.where(left < full, left / weight.clamp_min(torch.finfo(weight.dtype).tiny), room)
    return torch.zeros_like(room).scatter(1, order, taken)


def lengths(step: Tensor, p: float) -> Tensor:
    """The p-norm of each sample's step, computed in the step's own precision."""
    flat = step.flatten(1)
    if flat.numel() == 0:
        return flat.new_zeros(len(flat))
    return torch.linalg.vector_norm(flat, ord=p, dim=1)  # type: ignore[no-any-return]


def top_rivals(problem: Problem, logits: Tensor, rows: Tensor, count: int | None) -> Tensor:
    """The `count` wrong classes of highest logit, highest first. None means all."""
    wrong = logits.detach().scatter(1, problem.y[rows][:, None], -math.inf)
    most = logits.shape[1] - 1
    order = wrong.argsort(dim=1, descending=True, stable=True)
    return order[:, : most if count is None else min(count, most)]


def margins(problem: Problem, logits: Tensor, rows: Tensor) -> Tensor:
    """The margin in logits of what the attack looks for. It is positive at an adversarial point.

    It is max over k != y of z_k - z_y. With a target t it is z_t - max over k != t of z_k.
    """
    label = (problem.y if problem.target is None else problem.target)[rows][:, None]
    lead = (logits.gather(1, label) - logits.scatter(1, label, -math.inf).amax(dim=1, keepdim=True))[:, 0]
    return -lead if problem.target is None else lead


def leads(problem: Problem, logits: Tensor, rows: Tensor, rivals: Tensor) -> Tensor:
    """f_k = z_k - z_y for each rival k. With a target there is only one boundary: its margin."""
    if problem.target is not None:
        return margins(problem, logits, rows)[:, None]
    return logits.gather(1, rivals) - logits.gather(1, problem.y[rows][:, None])


def boundaries(
    problem: Problem, leads: Tensor, points: Tensor, rows: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each lead f_k in turn: f_k, its gradient w_k, and the distance |f_k| / ||w_k||_q. Each costs a backward pass.

    `leads` are those of the samples `rows`, with their graph.
    """
    p = problem.threat.p
    q = 1.0 if p == math.inf else (2.0 if p == 2 else math.inf)
    columns = leads.unbind(dim=1)
    for place, lead in enumerate(columns):
        normal = problem.gradient(lead, points, rows, retain=place + 1 < len(columns))
        far = lead.detach().abs() / lengths(normal, q)
        yield lead.detach(), normal, torch.where(far.isnan(), math.inf, far)  # 0 / 0: no gradient to follow


def nearest_boundary(problem: Problem, leads: Tensor, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The lead and the gradient of the nearest boundary."""
    found = boundaries(problem, leads, points, rows)
    best_lead, best_normal, least = next(found)
    for lead, normal, far in found:
        nearer = far < least
        best_lead, least = torch.where(nearer, lead, best_lead), torch.where(nearer, far, least)
        best_normal = torch.where(column(nearer, normal), normal, best_normal)
    return best_lead, best_normal


def nearest_first(problem: Problem, rivals: Tensor) -> Tensor:
    """The `rivals` of each sample, sorted by the distance of their boundaries from its image."""
    rows = torch.arange(len(problem.x), device=problem.x.device)
    points = problem.x.clone().requires_grad_(True)
    between = leads(problem, problem.logits(points, rows), rows, rivals)
    far = torch.stack([far for _, _, far in boundaries(problem, between, points, rows)], dim=1)
    return rivals.gather(1, far.argsort(dim=1, stable=True))


def column(values: Tensor, like: Tensor) -> Tensor:
    """One value for each sample, in a shape that broadcasts over its image."""
    return values.view(-1, *[1] * (like.dim() - 1))
