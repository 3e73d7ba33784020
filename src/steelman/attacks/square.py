"""Square attack: random search with squares. It asks the model for logits only."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.errors import UserError
from steelman.losses import adversarial_loss
from steelman.rng import Key
from steelman.settings import Count, Number, settings
from steelman.threat import Norm, ThreatModel

# A square covers the share p of the image. p is halved after these numbers of 10,000 squares (section 3.2).
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
CHUNK = 64  # steps whose noise is drawn at once: more take memory, fewer take more calls
PACE, SLACK = 4, 5.0  # chunks from one look at a sample's pace to the next, and how many times quicker it may become
# Early squares often help, so most queries ahead of them would be wasted. Late squares seldom help. So after each 32
# steps, a search asks about one more square at once.
EARLY = 32
Shape = tuple[int, int, int]


@settings
class Square(Search):
    """Random search: x' <- x' with a square moved to a random corner of the ball, kept if max_k!=y z_k - z_y grows.

    Arguments:
        queries: the most queries for each sample in a restart, the start included.
        p: the share of the image that the first squares cover. It is halved as the search goes on.
        rescale: True stretches the schedule of p from 10,000 queries to `queries`, as in the paper. AutoAttack does
            not.
        whole: True lets an l2 bump take the whole radius before the rest is scaled down. ART does so in effect. In the
            paper, a bump takes what its windows had. With few queries, True can break more samples.
        ahead: the most squares that are asked about at once. Each is asked about as if those before it did not help. If
            one helps, those after it are asked about again. The search is the same, in fewer and larger batches. It is
            quicker for a few samples, and costs more queries.
        resign: True stops hopeless samples early. After each 256 squares the search looks at the gain of each sample
            over them. A sample leaves if even 5 times this gain, kept up to the end, would not break it.

    Towards a target, the loss is the cross-entropy of the target, as in AutoAttack, and `resign` has no effect.

    Each sample has its own squares. A linf square that would change nothing is drawn once more, as in the paper's code.
    AutoAttack does not do so. With one channel and small squares, half of its queries then ask what is known. Squares
    reach the last row and column, as in the paper; neither code does so. The l2 windows share out the norm in each
    channel (Algorithm 3). AutoAttack shares it out over all channels at once.

    Andriushchenko et al. (2020), "Square Attack: a query-efficient black-box adversarial attack via random search",
    Algorithms 1 to 3.

    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> x, threat = torch.full((2, 1, 4, 4), 0.5), ThreatModel(norm="linf", eps=0.1)
    >>> found = Square(queries=20).run(net, x, torch.tensor([0, 1]), threat)
    >>> bool(threat.contains(found.x_adv, x).all()), int(found.backwards.sum())
    (True, 0)
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")
    black_box: ClassVar[bool] = True
    warm: ClassVar[bool] = True

    queries: Count = 5000
    p: Annotated[Number, Field(gt=0, le=1)] = 0.8
    restarts: Count = 1
    rescale: bool = False
    whole: bool = False
    ahead: Annotated[int, Field(ge=1, le=CHUNK)] = 1
    resign: bool = False

    @property
    def copies(self) -> int:
        return self.ahead

    def search(self, problem: Problem) -> None:
        begin = stripes if problem.threat.norm == "linf" else bumps
        for restart in range(self.restarts):
            rows, key = problem.remaining(), problem.key.fold("square", restart)
            if len(rows) == 0:
                return
            if problem.start is not None and restart == 0:
                start = problem.start[rows]
            else:
                start = begin(problem.x[rows], problem.threat, problem.index[rows], key.fold("start"))
            squares(problem, rows, start, key, self)


def squares(problem: Problem, rows: Tensor, start: Tensor, key: Key, how: Square) -> None:
    """Do the random search for the samples `rows`, from any points `start` of the threat model.

    A sample leaves at its first success. A sample's search depends on its own noise and its own loss alone.
    """
    size, threat, queries = tuple(problem.x.shape[1:]), problem.threat, how.queries
    shape, (side, move) = image_shape(size), MOVES["l2, whole" if how.whole and threat.norm == "l2" else threat.norm]
    x, best = (image.reshape(len(rows), shape[0], shape[1] * shape[2]) for image in (problem.x[rows], start.clone()))
    lowest = torch.full((len(rows),), -math.inf, dtype=torch.float64, device=x.device)
    walk = _Walk(problem, rows, x, best, lowest, lowest.clone())
    walk.ask(best)
    step, draws, sides = 1, None, list[int]()
    while step < queries:
        chunk, at = divmod(step - 1, CHUNK)
        stay = ~problem.success[walk.rows]
        if how.resign and problem.target is None and at == 0 and chunk % PACE == 0:
            stay &= walk.hopeful((queries - step) / (PACE * CHUNK))
        if not stay.all():
            walk = walk.only(stay)
            draws = None if draws is None else _Draws(*(drawn[:, stay] for drawn in draws))
        if len(walk.rows) == 0:
            return
        if draws is None or at == 0:
            covered = (
                share(chunk * CHUNK + place, how.p, queries if how.rescale else 10_000) for place in range(CHUNK)
            )
            sides = [side(part, shape) for part in covered]
            draws = _draw(key.fold("steps", chunk), problem.index[walk.rows], sides, shape, x.dtype)
        ahead = min(how.ahead, 1 + step // EARLY)
        count = 1 if ahead == 1 else _alike(sides, at, min(CHUNK - at, queries - step))
        propose = functools.partial(move, threat=threat, shape=shape, s=sides[at])
        walk.go(propose, _Draws(*(drawn[at : at + count] for drawn in draws)), ahead)
        step += count


def _alike(sides: list[int], at: int, most: int) -> int:
    """How many squares from number `at` on have the same size, up to `most`."""
    return next((count for count in range(1, most) if sides[at + count : at + count + 1] != [sides[at]]), most)


@dataclasses.dataclass
class _Walk:
    """The samples that are still in the search.

    `rows` are their places in the problem, `x` their images, and `best` their best points. `value` is the loss at the
    best point. `earlier` is what it was at the last call of ``hopeful``.
    """

    problem: Problem
    rows: Tensor
    x: Tensor
    best: Tensor
    value: Tensor
    earlier: Tensor

    def only(self, stay: Tensor) -> _Walk:
        return _Walk(self.problem, *(part[stay] for part in (self.rows, self.x, self.best, self.value, self.earlier)))

    def hopeful(self, times: float) -> Tensor:
        """Whether each sample may still be broken by the end.

        The rest of the search is `times` as long as the time since the last call. It may gain SLACK times as fast.
        """
        gain, self.earlier = self.value - self.earlier, self.value.clone()
        return self.value + SLACK * gain * times > 0

    def go(self, propose: Callable[..., Tensor], draws: _Draws, ahead: int) -> None:
        """Ask about the next squares of each sample, up to `ahead` at once.

        Each is asked about as if those before it had been refused. The squares after one that helps are asked about
        again.
        """
        count = len(draws.corner)
        if count == 1:
            self.ask(propose(self.best, self.x, draws=_Draws(*(drawn[0] for drawn in draws))))
            return
        squares = torch.arange(count, device=self.rows.device)
        past = torch.zeros_like(self.rows)[:, None]  # how many of them are done, for each sample
        while True:
            who, which = ((past <= squares) & (squares < past + ahead)).nonzero(as_tuple=True)
            if len(who) == 0:
                return
            drawn = _Draws(*(drawn[which, who] for drawn in draws))
            helped = self.ask(propose(self.best[who], self.x[who], draws=drawn), who)
            past += ahead
            if len(helped):
                past[who[helped], 0] = which[helped] + 1
                past[self.problem.success[self.rows]] = count

    def ask(self, candidate: Tensor, who: Tensor | None = None) -> Tensor:
        """Ask about the candidates, and keep those that help. Return their places.

        If several for one sample help, only the first is kept.
        """
        problem, rows = self.problem, self.rows if who is None else self.rows[who]
        size = problem.x.shape[1:]
        with torch.no_grad():
            logits = problem.logits(candidate.view(-1, *size), rows)
            losses = climbed(problem, logits, rows)
        value = self.value if who is None else self.value[who]
        # Most squares do not help, and are not given to the problem.
        helped = (_may_break(problem, logits, rows) | (losses > value)).nonzero()[:, 0]
        if who is not None and len(helped):
            fresh = torch.ones_like(helped, dtype=torch.bool)
            fresh[1:] = who[helped][1:] != who[helped][:-1]
            helped = helped[fresh]
        if len(helped):
            at, points = helped if who is None else who[helped], candidate[helped]
            self.best[at], self.value[at] = points, losses[helped].double()
            problem.keep(points.view(-1, *size), logits[helped], losses[helped], rows[helped])
        return helped


def climbed(problem: Problem, logits: Tensor, rows: Tensor) -> Tensor:
    """max over k != y of z_k - z_y. Towards a target: minus its cross-entropy."""
    if problem.target is None:
        return adversarial_loss("margin", logits, problem.y[rows])
    return adversarial_loss("cross-entropy", logits, problem.y[rows], target=problem.target[rows])


def _may_break(problem: Problem, logits: Tensor, rows: Tensor) -> Tensor:
    """Whether each sample may be broken, by the class of its highest logit. The problem makes the final decision."""
    top = logits.argmax(dim=1)
    return top != problem.y[rows] if problem.target is None else top == problem.target[rows]


def share(step: int, p: float, queries: int) -> float:
    """The share of the image that square number `step` covers: p, halved ever more rarely.

    >>> [share(step, 0.8, 10_000) for step in (0, 10, 11, 51)]
    [0.8, 0.8, 0.4, 0.2]
    """
    return p / 2.0 ** sum(step * 10_000 // queries > halving for halving in HALVINGS)


def image_shape(size: tuple[int, ...]) -> Shape:
    """Channels, height and width. A vector counts as an image of one row."""
    if not 1 <= len(size) <= 3:
        raise UserError(f"Square draws squares on images of shape (channels, height, width), got {size}")
    channels, height, width = (*[1] * (3 - len(size)), *size)
    return channels, height, width


def stripes(x: Tensor, threat: ThreatModel, index: Tensor, key: Key) -> Tensor:
    """The linf start: x +- eps, one sign for each column of each channel."""
    channels, height, width = image_shape(tuple(x.shape[1:]))
    sign = 1 - 2 * (key.uniform(index, (channels, 1, width), x.dtype) < 0.5).to(x.dtype)
    return threat.project(x + (threat.eps * sign).expand(-1, -1, height, -1).reshape(x.shape), x)


def bumps(x: Tensor, threat: ThreatModel, index: Tensor, key: Key) -> Tensor:
    """The l2 start: about five by five bumps that fill the image, each with its own signs and orientation."""
    channels, height, width = image_shape(tuple(x.shape[1:]))
    s = max(min(height, width) // 5, 1)
    down, across = height // s, width // s
    u = key.uniform(index, (channels + 1, down, across, 1, 1), x.dtype)
    tiles = torch.where(u[:, :1] < 0.5, bump(s, x), bump(s, x).T) * (1 - 2 * (u[:, 1:] < 0.5).to(x.dtype))
    delta = tiles.transpose(3, 4).reshape(len(x), channels, down * s, across * s)
    top, left = (height - down * s) // 2, (width - across * s) // 2
    delta = F.pad(delta, (left, width - across * s - left, top, height - down * s - top))
    return _on_sphere(delta.flatten(2), x.reshape(len(x), channels, height * width), threat).view(x.shape)


def bump(s: int, like: Tensor) -> Tensor:
    """The s by s pattern of the l2 attack: a peak over a trough, of norm 1, with the type and device of `like`."""
    return _bump(s, like.dtype, like.device)


@functools.lru_cache(maxsize=64)
def _bump(s: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    pattern = torch.cat((_peak(s // 2, s), -_peak(s - s // 2, s)))
    return (pattern / pattern.square().sum().sqrt()).to(device, dtype)


def _peak(height: int, width: int) -> Tensor:
    """Nested centred squares of side 2k + 1 and height 1 / (k + 1)^2, summed, of norm 1."""
    ring = torch.maximum(
        (torch.arange(height) - height // 2).abs()[:, None], (torch.arange(width) - width // 2).abs()[None, :]
    )
    heights = 1.0 / torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** 2
    peak = heights.flip(0).cumsum(0).flip(0)[ring]
    return peak / peak.square().sum().sqrt()


class _Draws(NamedTuple):
    """The random numbers of squares: a row for each sample. For a chunk of steps, the first dimension is the step."""

    corner: Tensor
    other: Tensor
    sign: Tensor
    again: Tensor
    turned: Tensor


def _draw(key: Key, index: Tensor, sides: list[int], shape: Shape, dtype: torch.dtype) -> _Draws:
    """Draw the corners and the signs of the next steps' squares, whose sides are `sides`.

    Corners come from all places where the square fits. The second signs differ from the first in at least one channel.
    """
    channels, height, width = shape
    u = key.uniform(index, (len(sides), 5 + 2 * channels), torch.float64).transpose(0, 1)
    s = torch.tensor(sides, device=index.device)[:, None]
    corners = (u[..., 0:4:2] * (height - s + 1)[..., None]).long() * width
    corners += (u[..., 1:4:2] * (width - s + 1)[..., None]).long()
    minus, flip = u[..., 5 : 5 + channels] < 0.5, u[..., 5 + channels :] < 0.5
    flip |= ~flip.any(dim=-1, keepdim=True)
    sign, again = (1 - 2 * either.to(dtype) for either in (minus, minus ^ flip))
    return _Draws(corners[..., 0], corners[..., 1], sign[..., None], again[..., None], u[..., 4] < 0.5)


def square_side(part: float, shape: Shape) -> int:
    """The side of a linf square on this share of the image."""
    return min(max(round(math.sqrt(part * shape[1] * shape[2])), 1), *shape[1:])


def window_side(part: float, shape: Shape) -> int:
    """The side of an l2 window: odd and at least 3, where the image has room for it."""
    s = max(round(math.sqrt(part * shape[1] * shape[2])), 3)
    return min(s + 1 - s % 2, *shape[1:])


def _square(best: Tensor, x: Tensor, threat: ThreatModel, shape: Shape, s: int, draws: _Draws) -> Tensor:
    """x' with one square at x + eps or x - eps, with a sign for each channel.

    If that changes nothing, the square has the second signs.
    """
    at = _pixels(draws.corner, s, shape)
    clean = x.gather(2, at)
    new = torch.add(clean, draws.sign, alpha=threat.eps).clamp_(threat.low, threat.high)
    same = (new == best.gather(2, at)).all(dim=2, keepdim=True).all(dim=1, keepdim=True)
    sign = torch.where(same, draws.again, draws.sign)
    return best.scatter(2, at, torch.add(clean, sign, alpha=threat.eps).clamp_(threat.low, threat.high))


def _windows(
    best: Tensor, x: Tensor, threat: ThreatModel, shape: Shape, s: int, draws: _Draws, *, whole: bool = False
) -> Tensor:
    """x' with a new bump on the first window. The bump gets the norm of both windows and a share of the unused eps.

    With `whole`, the bump gets the norm eps. The second window becomes zero, except where the first covers it.
    """
    first, second = _pixels(draws.corner, s, shape), _pixels(draws.other, s, shape)
    delta = best - x
    unused = (threat.eps**2 - delta.square().sum(dim=(1, 2), keepdim=True)).clamp_min(0)
    old = delta.gather(2, first)
    delta.scatter_(2, first, 0.0)
    freed = old.square().sum(dim=2, keepdim=True) + delta.gather(2, second).square().sum(dim=2, keepdim=True)
    delta.scatter_(2, second, 0.0)
    pattern = torch.where(draws.turned[:, None], bump(s, x).flatten(), bump(s, x).T.flatten())[:, None, :]
    size = threat.eps if whole else (freed + unused / shape[0]).sqrt()
    new = _unit(draws.sign * pattern + _unit(old)) * size
    return _on_sphere(delta.scatter_(2, first, new), x, threat)


def _unit(v: Tensor) -> Tensor:
    return v / v.square().sum(dim=2, keepdim=True).sqrt().clamp_min(1e-12)


def _on_sphere(delta: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
    """x + eps delta / ||delta||_2, clipped to the box.

    The length is a few roundings below eps, so that it is never above eps.
    """
    size = delta.square().sum(dim=(1, 2), keepdim=True).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    ratio = threat.eps * (1 - 8 * torch.finfo(x.dtype).eps) / size
    return torch.addcmul(x, delta, ratio).clamp_(threat.low, threat.high)


def _pixels(corner: Tensor, s: int, shape: Shape) -> Tensor:
    """The places of the pixels of the s by s squares with these corners. Places count along the rows of an image."""
    at = corner[:, None, None] + _offsets(s, shape[2], corner.device)
    return at.expand(-1, shape[0], -1)


@functools.lru_cache(maxsize=64)
def _offsets(s: int, width: int, device: torch.device) -> Tensor:
    side = torch.arange(s, device=device)
    return (side[:, None] * width + side).flatten()


MOVES: dict[str, tuple[Callable[[float, Shape], int], Callable[..., Tensor]]] = {
    "linf": (square_side, _square),
    "l2": (window_side, _windows),
    "l2, whole": (window_side, functools.partial(_windows, whole=True)),
}
