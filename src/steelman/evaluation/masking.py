"""Signs of gradient masking: a model that hides its gradient looks robust to a gradient attack.

This file measures the figure of each sign on a few samples. ``signs.py`` has their limits and their words.

Athalye et al. (2018), section 3; Carlini et al. (2019), "On Evaluating Adversarial Robustness", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS, Found
from steelman.attacks.base import input_gradient, logits_of, untouched
from steelman.errors import UserError
from steelman.evaluation.checks import coarse
from steelman.evaluation.manners import Witness, otherwise
from steelman.evaluation.signs import QUERIES, SHAPED, STEPS
from steelman.losses import adversarial_loss, margin, spread
from steelman.rng import Key
from steelman.settings import settings
from steelman.threat import ThreatModel

STARTS, HALVINGS = 3, 10
TINY = 1e-6  # a gradient counts as zero below this share of the logits' spread; see `_slopes`


class Seen:
    """Counts of a model's answers. A deep copy is the same object, so the threads of a search share the counts."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int, int]] = []

    def __deepcopy__(self, memo: dict[int, object]) -> Seen:
        return self

    def totals(self) -> tuple[int, int, int]:
        """How many answers there were, how many were undefined, and how many were lost in rounding."""
        total, undefined, lost = (sum(counts) for counts in zip((0, 0, 0), *self.counts, strict=True))
        return total, undefined, lost


class Watched(nn.Module):
    """A model that counts its undefined answers, and those lost in rounding. Attacks skip such points silently."""

    def __init__(self, model: nn.Module, seen: Seen) -> None:
        super().__init__()
        self.model, self.seen = model, seen

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        fixed = logits.detach()
        finite = fixed.isfinite().all(dim=1)
        self.seen.counts.append((len(x), int((~finite).sum()), int((coarse(fixed) & finite).sum())))
        return logits


def measure(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    *,
    index: Tensor,
    key: Key,
    surrogates: Sequence[nn.Module] = (),
    witness: Witness | None = None,
    grain: float = 0.0,
    batch_size: int = 256,
    keep: Callable[[Tensor, Found], None] | None = None,
) -> dict[str, Tensor]:
    """Measure each sign of masking on a few samples that the model gets right.

    Most signs get one value for each sample or point. "undefined answers" and "coarse answers" get a count. The number
    of points behind the count is under the sign's name with ", of" added.

    Arguments: `surrogates` are other models, whose adversarial points are tried on this model too. `witness` is a copy
    of the model from before the first question, and `grain` is the model's grain (see `Manners`). No batch is larger
    than `batch_size`. `keep` receives the samples of each attack, and what the attack found.
    """
    watched = Watched(model, Seen())
    everyone = torch.arange(len(x), device=x.device)

    def attacked(
        name: str, on: nn.Module = watched, who: Tensor = everyone, starts: int = 1, **options: object
    ) -> tuple[Tensor, Tensor]:
        attack, rows = ATTACKS[name](**options), who.repeat(starts)
        # Without the added number, all starts of a sample would draw the same noise.
        places = index[rows] + torch.arange(starts, device=x.device).repeat_interleave(len(who))
        parts = (torch.split(part, max(batch_size // attack.copies, 1)) for part in (rows, places))
        found = []
        for part, at in zip(*parts, strict=True):
            found.append(attack.run(on, x[part], y[part], threat, index=at, key=key.fold("signs")))
            if keep is not None and on is watched:
                keep(part, found[-1])
        return torch.cat([part.success for part in found]), torch.cat([part.x_adv for part in found])

    slopes = _slopes(model, x, y, threat, batch_size)
    white = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    seen = {"zero gradients": ~white if slopes is None else slopes < TINY}
    reached = x
    if slopes is not None:
        # The margin rises along its own gradient. A standardised loss may not: its divisor, the spread of the logits,
        # can rise too. With two classes, it is even constant.
        loss = "margin"
        many, reached = attacked("bim", steps=STEPS, step_size=2.5 * threat.eps / STEPS, loss=loss)
        seen["loss does not rise"] = _stuck(model, x, reached, y, loss, batch_size) & ~many
        one, _ = attacked("fgsm", loss=loss)
        seen["one step stronger"] = one & ~many
        broken = attacked("pgd", starts=STARTS, steps=STEPS, loss=loss)[0].view(STARTS, len(x))
        some, every = broken.any(dim=0), broken.all(dim=0)
        white = many | one | some
        seen["starts disagree"] = some & ~every
    # Square does not work in l1. SPSA works in every norm, and also needs no gradient.
    square = threat.norm in ATTACKS["square"]().norms
    guesses: dict[str, Any] = {"queries": QUERIES, "ahead": 4} if square else {"steps": 10, "pairs": QUERIES // 20}
    blind = torch.zeros_like(white)
    blind[~white], _ = attacked("square" if square else "spsa", who=everyone[~white], **guesses)
    seen["black box stronger"] = blind
    if surrogates:
        carried = torch.zeros_like(white)
        for surrogate in surrogates:
            _, points = attacked("pgd", on=surrogate, steps=STEPS, loss="margin", keep="last")
            broken = _wrong(model, points, y, batch_size) & threat.contains(points, x)
            carried |= broken
            if keep is not None:
                none = torch.zeros_like(y)
                keep(everyone, Found(x_adv=points, success=broken, forwards=none, backwards=none))
        seen["transfer stronger"] = carried & ~white
    tried = [x, reached]
    if slopes is not None:
        for shape, sign in SHAPED.items():
            # Samples that are broken already could not raise the flag, so they are left out.
            rows = everyone[~white]
            hit, points = attacked("shaped", who=rows, shape=shape, steps=STEPS)
            seen[sign] = torch.zeros_like(white)
            seen[sign][rows] = hit
            tried.append(points)
    seen["random answers"], edges = _random(watched, x, reached, y, batch_size)
    # The model itself: these questions are no points of an attack, and are not counted as such.
    seen |= _manners(model, witness, torch.cat((*tried, *edges)), grain, batch_size)
    total, undefined, lost = watched.seen.totals()
    for name, count in (("undefined answers", undefined), ("coarse answers", lost)):
        seen[name], seen[f"{name}, of"] = torch.tensor([count]), torch.tensor([total])
    return seen


def _random(
    model: nn.Module, x: Tensor, reached: Tensor, y: Tensor, batch_size: int
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which points get different logits when the model is asked twice, and the points on both sides of the boundary.

    The points are the images `x`, the points `reached`, and one point on each side of the boundary between them.
    """
    right, wrong = x, reached
    for _ in range(HALVINGS):  # bisect towards the boundary, where a little noise changes the answer
        middle = (right + wrong) / 2
        beyond = _wrong(model, middle, y, batch_size)[:, None, None, None]
        right, wrong = torch.where(beyond, right, middle), torch.where(beyond, middle, wrong)
    points = torch.cat((x, reached, right, wrong))
    with untouched(model), torch.no_grad():
        first, second = (
            torch.cat([logits_of(model, part) for part in torch.split(points, batch_size)]) for _ in range(2)
        )
    return (first != second).any(dim=1), (right, wrong)


def _manners(
    model: nn.Module, witness: Witness | None, points: Tensor, grain: float, batch_size: int
) -> dict[str, Tensor]:
    """Which points get another answer in another batch, with a gradient, or from a fresh copy of the model."""
    found = otherwise(model, points, grain, batch_size)
    seen = {"company answers": found["company"], "gradient answers": found["gradient"]}
    other = None if witness is None else witness.contradicts(points, _logits(model, points, batch_size), grain)
    return seen if other is None else {**seen, "remembered answers": other}


def _slopes(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, batch_size: int) -> Tensor | None:
    """||g||_1 (high - low) / spread for each sample, with g the gradient of the margin. None if there is no gradient.

    It is the linear change of the margin from one end of the box to the other. The division by the logits' spread makes
    it independent of the scale of the logits.
    """
    found = []
    for part, label in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True):
        with untouched(model), torch.enable_grad():
            points = part.detach().clone().requires_grad_(True)
            logits = logits_of(model, points)
            apart = spread(logits.detach())
            try:
                gradient = input_gradient(margin(logits, label), points)
            except UserError:
                return None
        size = gradient.flatten(1).double().abs().sum(dim=1) * (threat.high - threat.low)
        found.append(torch.where(size > 0, size / apart.double(), 0))
    return torch.cat(found)


def _stuck(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, loss: str, batch_size: int) -> Tensor:
    """Whether the loss of each sample at x' is not above its loss at x."""
    before, after = (adversarial_loss(loss, _logits(model, points, batch_size), y) for points in (x, x_adv))
    return ~(after > before)


def _wrong(model: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> Tensor:
    return _logits(model, x, batch_size).argmax(dim=1) != y


def _logits(model: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    with untouched(model), torch.no_grad():
        return torch.cat([logits_of(model, part) for part in torch.split(x, batch_size)])


class Finds:
    """The point of each sample from several attacks, and the passes of all of them.

    It is the first adversarial point that any attack found. Without one, it is the point of the first attack.
    """

    def __init__(self, x: Tensor) -> None:
        self.x_adv = x.clone()
        self.success, self.tried = (torch.zeros(len(x), dtype=torch.bool, device=x.device) for _ in range(2))
        self.counts = torch.zeros(2, len(x), dtype=torch.int64, device=x.device)

    def keep(self, rows: Tensor, found: Found) -> None:
        """Add what an attack found for the samples `rows`. A row may occur several times."""
        rows = rows.to(self.x_adv.device)
        self.counts.index_add_(1, rows, torch.stack((found.forwards, found.backwards)))
        news = torch.where(self.tried[rows], found.success & ~self.success[rows], True)
        # If a row occurs several times, its first adversarial point is kept, or else its first point.
        order = (news.long() + found.success.long()).argsort(descending=True, stable=True)[: int(news.sum())]
        firsts = {int(row): int(at) for row, at in zip(rows[order].flip(0), order.flip(0), strict=True)}
        at, places = (torch.tensor(list(part), dtype=torch.int64) for part in (firsts, firsts.values()))
        self.x_adv[at], self.success[at] = found.x_adv[places], found.success[places]
        self.tried[at] = True


@settings
class Pilot:
    """The attacks behind the flags, as one attack."""

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
        if target is not None:
            raise UserError("a pilot looks for any wrong class, and knows no target")
        finds, index = Finds(x), torch.arange(len(x), device=x.device) if index is None else index
        if len(x):
            measure(model, x, y, threat, index=index, key=key, keep=finds.keep)
        return finds.x_adv
