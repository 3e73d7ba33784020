"""Answers found another way: closed forms, SciPy solvers and naive loops in float64; and the checks made of them.

Nothing here calls the code it judges, except through the ``check_*`` functions, which raise AssertionError when it is
wrong. The mutation tests break the code on purpose and expect these same functions to notice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from steelman import threat as threat_module
from steelman.attacks import ATTACKS
from steelman.rng import Key
from steelman.threat import ThreatModel

Array = npt.NDArray[np.float64]
ORDERS = {"linf": math.inf, "l2": 2.0, "l1": 1.0}
DUALS = {"linf": 1.0, "l2": 2.0, "l1": math.inf}


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class LinearClassifier(nn.Module):
    """W x + b, written so that a sample's logits do not depend on its batch in the last bit."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1)[:, None, :] * self.weight).sum(dim=-1) + self.bias


@dataclasses.dataclass(frozen=True)
class LinearProblem:
    """A linear classifier and samples that it gets right, each with one class near and the others far away."""

    model: LinearClassifier
    x: Tensor
    y: Tensor

    def distances(self, norm: str) -> Array:
        """min over k of (z_y - z_k) / ||w_k - w_y||_q: the distance to the nearest boundary, no box in the way."""
        weight, bias = _numpy(self.model.weight), _numpy(self.model.bias)
        found = []
        for x, y in zip(_numpy(self.x.flatten(1)), self.y.tolist()):
            z = weight @ x + bias
            others = [k for k in range(len(z)) if k != y]
            sizes = [float(np.linalg.norm(weight[k] - weight[y], ord=DUALS[norm])) for k in others]
            found.append(min((z[y] - z[k]) / size for k, size in zip(others, sizes) if size > 0))
        return np.array(found)

    def distances_in_box(self, norm: str, low: float, high: float) -> Array:
        """The same with the box: a linear program for linf and l1, a bisection on the multiplier for l2."""
        weight, bias = _numpy(self.model.weight), _numpy(self.model.bias)
        found = []
        for x, y in zip(_numpy(self.x.flatten(1)), self.y.tolist()):
            z = weight @ x + bias
            others = [k for k in range(len(z)) if k != y]
            found.append(min(_reach(weight[k] - weight[y], z[y] - z[k], low - x, high - x, norm) for k in others))
        return np.array(found)


def linear_problem(classes: int, *, seed: int = 0, n: int = 6, corners: bool = False) -> LinearProblem:
    """Two-by-six images, each 7% further from the boundary than the one before.

    One rival class is near; the rest have nearly the true class's weights and far lower logits, so that climbing any
    loss is climbing towards the rival, and the closed form is what an attack must reach.

    With `corners` pixels come from all of [0, 1], many of them at its ends, and distances fall as they may.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    near = draw(2, 12)
    far = near[0] + 0.02 * draw(classes - 2, 12)
    across = near[1] - near[0]
    x = 0.5 + (0.4 if corners else 0.1) * draw(n, 12)
    if corners:
        x = x.clamp(0, 1)
        lead = 0.5 + float((x @ across).max())
    else:
        lead = 0.0
        gap = 1.07 ** torch.arange(n, dtype=torch.float64)
        x -= ((x @ across + gap) / across.square().sum())[:, None] * across
    bias = torch.tensor([lead, 0.0, *[-60.0] * (classes - 2)], dtype=torch.float64)
    model = LinearClassifier(torch.cat((near, far)), bias)
    return LinearProblem(model, x.reshape(n, 1, 2, 6), torch.zeros(n, dtype=torch.int64))


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().numpy().astype(np.float64)


def _reach(w: Array, gap: float, low: Array, high: Array, norm: str) -> float:
    """The least ||v||_p with w.v >= gap and low <= v <= high; infinity where there is none."""
    d = len(w)
    best = float(np.where(w > 0, w * high, w * low).sum())
    if best < gap:
        return math.inf
    if norm == "l2":
        at, to = 0.0, 1e9
        for _ in range(200):
            middle = (at + to) / 2
            at, to = (middle, to) if w @ np.clip(middle * w, low, high) < gap else (at, middle)
        return float(np.linalg.norm(np.clip(to * w, low, high)))
    if norm == "linf":  # variables v, r: minimise r with |v_i| <= r
        ones = np.ones((d, 1))
        rows = np.block([[np.eye(d), -ones], [-np.eye(d), -ones], [-w[None, :], np.zeros((1, 1))]])
        cost, bounds = np.r_[np.zeros(d), 1.0], [*zip(low, high), (0, None)]
        limit = np.r_[np.zeros(2 * d), -gap]
    else:  # v = up - down with both parts at least 0: minimise their sum
        rows, limit = np.block([[-w[None, :], w[None, :]]]), np.array([-gap])
        cost, bounds = np.ones(2 * d), [*((0.0, h) for h in high), *((0.0, -b) for b in low)]
    found = linprog(cost, A_ub=rows, b_ub=limit, bounds=bounds, method="highs")
    assert found.status == 0, found.message
    return float(found.fun)


def nearest(delta: Array, x: Array, norm: str, eps: float, low: float, high: float) -> Array:
    """The point of ball and box nearest to x + delta, as a perturbation: a bisection on the multiplier."""
    bottom, top = low - x, high - x
    if norm == "linf":
        return np.asarray(np.clip(np.clip(delta, -eps, eps), bottom, top))

    def at(multiplier: float) -> Array:
        if norm == "l2":
            return np.clip(delta / (1 + multiplier), bottom, top)
        shrunk: Array = np.sign(delta) * np.maximum(np.abs(delta) - multiplier, 0)
        return shrunk.clip(bottom, top)

    def size(v: Array) -> float:
        return float(np.linalg.norm(v, ord=ORDERS[norm]))

    if size(at(0.0)) <= eps:
        return at(0.0)
    less, more = 0.0, 1.0
    while size(at(more)) > eps:
        more *= 2
        if more > 1e30:
            return np.zeros_like(delta)
    for _ in range(200):
        middle = (less + more) / 2
        less, more = (middle, more) if size(at(middle)) > eps else (less, middle)
    return at(more)


def naive_losses(z: Array, y: int, target: int, reference: Array) -> dict[str, float]:
    """Every loss of the library for one sample, with loops and logarithms written out."""
    shares = [math.exp(v - max(z)) for v in z]
    p = [s / sum(shares) for s in shares]
    q = [math.exp(v - max(reference)) for v in reference]
    q = [s / sum(q) for s in q]
    ranked = sorted(z, reverse=True)
    wrong = max(v for k, v in enumerate(z) if k != y) - z[y]
    towards = float(z[target] - z[y])
    spread = math.sqrt(sum((v - sum(z) / len(z)) ** 2 for v in z) / len(z))
    even = [v / spread for v in z]
    share = [math.exp(v) / sum(map(math.exp, even)) for v in even]
    return {
        "cross-entropy": -math.log(p[y]),
        "margin": float(wrong),
        "dlr": float(wrong) if len(z) < 3 else float(wrong / (ranked[0] - ranked[2])),
        "targeted-margin": towards,
        "targeted-dlr": towards if len(z) < 4 else towards / (ranked[0] - (ranked[2] + ranked[3]) / 2),
        "kl": sum(a * (math.log(a) - math.log(b)) for a, b in zip(q, p)),
        "scale-invariant-cross-entropy": math.log(sum(math.exp(v - even[y]) for v in even)),
        "probability-margin": max(v for k, v in enumerate(share) if k != y) - share[y],
    }


def sizes(delta: Tensor, norm: str) -> Array:
    """Perturbation norms, by NumPy."""
    flat = _numpy(delta.flatten(1).double())
    return np.array([np.linalg.norm(row, ord=ORDERS[norm]) for row in flat])


def check_linear(name: str, norm: str, loss: str, classes: int, slack: float = 0.03, **options: Any) -> None:
    """On a linear model an attack succeeds where the closed form says it can, and only there."""
    problem = linear_problem(classes, seed=classes)
    attack = ATTACKS[name](loss=loss, **options)
    distances = problem.distances(norm)
    for eps in (distances[0] * (1 - slack), distances[3] * (1 + slack)):
        threat = ThreatModel(norm=norm, eps=eps, low=-100.0, high=100.0)  # type: ignore[arg-type]
        _judge(problem, attack, threat, distances, slack)


def check_linear_in_box(name: str, norm: str, slack: float = 0.05, **options: Any) -> None:
    """The same with pixels that start at the ends of [0, 1] or run into them."""
    problem = linear_problem(3, seed=3, corners=True)
    attack = ATTACKS[name](loss="margin", **options)
    distances = problem.distances_in_box(norm, 0.0, 1.0)
    assert np.isfinite(distances).all()
    assert (distances > 1.02 * problem.distances(norm)).any(), "the box is meant to be in the way"
    for eps in (np.sort(distances)[1::2] * (1 + slack)).tolist():
        threat = ThreatModel(norm=norm, eps=eps)  # type: ignore[arg-type]
        _judge(problem, attack, threat, distances, slack)


def _judge(problem: LinearProblem, attack: Any, threat: ThreatModel, distances: Array, slack: float) -> None:
    x_adv = attack(problem.model, problem.x, problem.y, threat, key=Key(7))
    z = x_adv.flatten(1) @ problem.model.weight.detach().T + problem.model.bias.detach()
    fooled = (z.argmax(dim=1) != problem.y).numpy()
    possible, certain = threat.eps > distances * (1 - 1e-9), threat.eps > distances * (1 + 0.99 * slack)
    assert not (fooled & ~possible).any(), f"{attack}: fooled below the least distance at eps {threat.eps}"
    assert not (certain & ~fooled).any(), f"{attack}: missed what lies inside eps {threat.eps}"


def random_problem(classes: int, *, seed: int = 0, n: int = 6, pixels: int = 12) -> LinearProblem:
    """A random linear classifier, no class favoured, and random images with the labels it gives them."""
    model = LinearClassifier(randn(classes, pixels, seed=seed), 0.3 * randn(classes, seed=seed + 1))
    x = rand(n, 1, 2, pixels // 2, seed=seed + 2)
    return LinearProblem(model, x, model(x).argmax(dim=1))


def check_budget(attack: Any, norm: str, classes: int, slack: float = 0.03) -> None:
    """An attack succeeds on a random linear model where the closed form says it can, and only there."""
    problem = random_problem(classes, seed=classes)
    distances = problem.distances(norm)
    for place in (0, 2, 4):
        for ratio in (1 - slack, 1 + slack):
            eps = float(np.sort(distances)[place] * ratio)
            threat = ThreatModel(norm=norm, eps=eps, low=-100.0, high=100.0)  # type: ignore[arg-type]
            _judge(problem, attack, threat, distances, slack)


def check_budget_in_box(attack: Any, norm: str, slack: float = 0.05) -> None:
    """The same with pixels at the ends of [0, 1] or running into them, against a linear program or a bisection."""
    problem = linear_problem(3, seed=3, corners=True)
    distances = problem.distances_in_box(norm, 0.0, 1.0)
    for eps in (np.sort(distances)[1::2] * (1 + slack)).tolist():
        _judge(problem, attack, ThreatModel(norm=norm, eps=eps), distances, slack)  # type: ignore[arg-type]


def check_distances(attack: Any, norm: str, classes: int, factor: float = 1.02) -> None:
    """A minimum-norm attack's distances are the closed form's, within its factor, and its points are adversarial."""
    problem = random_problem(classes, seed=classes)
    threat = ThreatModel(norm=norm, eps=0.1, low=-100.0, high=100.0)  # type: ignore[arg-type]
    _judge_distances(problem, attack, threat, problem.distances(norm), factor)


def check_distances_in_box(attack: Any, norm: str, factor: float = 1.05) -> None:
    """The same with the box in the way."""
    problem = linear_problem(3, seed=3, corners=True)
    threat = ThreatModel(norm=norm, eps=0.1)  # type: ignore[arg-type]
    _judge_distances(problem, attack, threat, problem.distances_in_box(norm, 0.0, 1.0), factor)


def _judge_distances(problem: LinearProblem, attack: Any, threat: ThreatModel, distances: Array, factor: float) -> None:
    found = attack.run(problem.model, problem.x, problem.y, threat, key=Key(7), distances=True)
    z = found.nearest.flatten(1) @ problem.model.weight.detach().T + problem.model.bias.detach()
    assert (z.argmax(dim=1) != problem.y).all(), f"{attack}: its nearest points are not adversarial"
    assert float(found.nearest.min()) >= threat.low
    assert float(found.nearest.max()) <= threat.high
    np.testing.assert_allclose(_numpy(found.distance), sizes(found.nearest - problem.x, threat.norm), rtol=1e-6)
    ratio = _numpy(found.distance) / distances
    assert (ratio > 1 - 1e-6).all(), f"{attack}: nearer than the nearest boundary: {ratio}"
    assert (ratio < factor).all(), f"{attack}: expected within {factor} of the distance, got {ratio}"


def check_inside(name: str, norm: str, **options: Any) -> None:
    """An attack's points stay within radius and box, measured without the threat model's own judgement."""
    problem = linear_problem(3, seed=3, corners=True)
    for dtype, slack in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        x, model = problem.x.to(dtype), LinearClassifier(problem.model.weight.to(dtype), problem.model.bias.to(dtype))
        for eps in (0.02, 0.3, 1.0):
            threat = ThreatModel(norm=norm, eps=eps)  # type: ignore[arg-type]
            x_adv = ATTACKS[name](**options)(model, x, problem.y, threat, key=Key(1))
            assert x_adv.dtype == dtype
            assert x_adv.shape == x.shape
            assert float(x_adv.min()) >= 0
            assert float(x_adv.max()) <= 1
            assert (sizes(x_adv.double() - x.double(), norm) <= eps + slack).all()


def check_projection(norm: str, low: float = 0.0, high: float = 1.0) -> None:
    """The projection is the nearest point, for points near and far, with and without the box in the way."""
    g = torch.Generator().manual_seed(5)
    for spread in (0.1, 1.0, 30.0):
        for eps in (0.05, 0.5, 2.0):
            x = (torch.rand(6, 1, 2, 3, generator=g, dtype=torch.float64) * 1.5 - 0.25).clamp(0, 1)
            far = x + spread * torch.randn(x.shape, generator=g, dtype=torch.float64)
            threat = ThreatModel(norm=norm, eps=0, low=low, high=high).at(eps)  # type: ignore[arg-type]
            got = threat.project(far, x)
            for row in range(len(x)):
                start, wanted = _numpy(x[row].flatten()), _numpy((far - x)[row].flatten())
                expected = nearest(wanted, start, norm, eps, low, high)
                np.testing.assert_allclose(_numpy((got - x)[row].flatten()), expected, atol=1e-9)


def check_unit_step(p: float, u: Tensor) -> None:
    """U_p(u) has p-norm 1 and meets u in its dual norm; of zero it is zero."""
    q = math.inf if p == 1 else (1.0 if p == math.inf else p / (p - 1))
    step = threat_module.steepest(u, p)
    for row, v in zip(_numpy(u.flatten(1).double()), _numpy(step.flatten(1).double())):
        largest = float(np.abs(row).max())
        if largest == 0:
            assert (v == 0).all()
            continue
        assert abs(float(np.linalg.norm(v, ord=p)) - 1) < 1e-5
        dual = float(np.linalg.norm(row / largest, ord=q))
        assert abs(float(row / largest @ v) - dual) < 1e-5 * dual


def red(check: Callable[[], None]) -> bool:
    """Whether a check notices that something is wrong."""
    try:
        check()
    except AssertionError:
        return True
    return False
