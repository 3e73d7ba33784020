"""The self-test: attacks must break two models with a known weakness before they judge a model.

One is a linear model with a known boundary. The other is the user's model with a weakness planted in it. If an attack
misses its test, a robust model could not be told from a failed attack. So the evaluation is refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from steelman.attacks import Attack
from steelman.attacks.base import logits_of, untouched
from steelman.data.source import Source
from steelman.evaluation.checks import ContractError, as_model
from steelman.evaluation.stages import Suite
from steelman.rng import Key
from steelman.threat import ThreatModel

# How far the boundary of the linear model is, as a share of the radius. Random search finds only a nearer boundary than
# a gradient attack. In l2 it must be the nearest, because one guess moves few pixels, but far.
SPARE_WHITE, SPARE_BLACK, SPARE_BLACK_L2 = 0.9, 0.4, 0.1
PLANTS = 4  # samples in a test: chance may let an attack miss one of them
LINES = 4  # the most classes of the linear model: all that any loss needs. More would make targeted attacks slower.


class Line(nn.Module):
    """A linear model: z_0 = 0, z_1 = w . (x - centre) / distance - 1, and z_k = z_1 - 3 for all other classes.

    ||w||_q = 1, so the boundary is exactly `distance` away from the centre in the norm p. All weights have the same
    size. Their signs are random. With `plain` all signs are positive: a random search of a few hundred guesses cannot
    learn thousands of signs.
    """

    def __init__(self, centre: Tensor, distance: float, classes: int, p: float, *, plain: bool = False) -> None:
        super().__init__()
        self.weight: Tensor
        self.centre: Tensor
        drawn = Key(0).fold("line").uniform(torch.zeros(1), (centre.numel(),))[0]
        signs = torch.where((drawn < 0.5) & (not plain), -1.0, 1.0)
        self.register_buffer("weight", (signs / torch.linalg.vector_norm(signs, ord=_dual(p))).to(centre))
        self.register_buffer("centre", centre.flatten())
        self.distance, self.classes = distance, classes

    def forward(self, x: Tensor) -> Tensor:
        ahead = (x.flatten(1) - self.centre) @ self.weight / self.distance - 1
        rest = ahead[:, None].expand(-1, self.classes - 2) - 3
        return torch.cat((torch.zeros_like(ahead)[:, None], ahead[:, None], rest), dim=1)


class Planted(nn.Module):
    """A model with a planted weakness near the image `seed`.

    On the way from `seed` along `direction`, a wrong class gets the largest logit well before eps.
    """

    def __init__(self, model: nn.Module, seed: Tensor, label: int, threat: ThreatModel) -> None:
        super().__init__()
        self.model, self.seed = model, seed
        middle = (threat.low + threat.high) / 2
        self.direction = torch.where(seed < middle, 1.0, -1.0).to(seed)  # away from the nearer end of the range
        size = float(torch.linalg.vector_norm(self.direction.flatten(), ord=_dual(threat.p)))
        self.reach = reach(threat, seed.numel()) * size
        # The gain must exceed the spread of the logits everywhere on the way, and not only at the image.
        way = torch.linspace(0, 1, 5, device=seed.device, dtype=seed.dtype).view(-1, 1, 1, 1)
        there = threat.project((seed + reach(threat, seed.numel()) * self.direction)[None], seed[None])
        with untouched(model), torch.no_grad():
            logits = logits_of(model, seed + way * (there - seed))
        if not torch.isfinite(logits).all():
            raise ContractError("logits", "the model gives NaN or infinite logits at points inside the threat model")
        self.other = (label + 1) % logits.shape[1]
        self.gain = 4 * float((logits.amax(dim=1) - logits.amin(dim=1)).max()) + 1

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        along = ((x - self.seed) * self.direction).flatten(1).sum(dim=1) / self.reach
        boost = torch.zeros_like(logits)
        boost[:, self.other] = 1
        out: Tensor = logits + self.gain * boost * along[:, None]
        return out


def reach(threat: ThreatModel, pixels: int) -> float:
    """The radius that the box leaves to an image in its middle: at most eps."""
    half = (threat.high - threat.low) / 2 * pixels ** (1 / threat.p)
    return float(min(threat.eps, half))


def self_test(
    suite: Suite, model: nn.Module, source: Source, threat: ThreatModel, classes: int, device: torch.device
) -> None:
    """Refuse a suite if an attack misses the linear model, or if its first gradient attack misses the weakness."""
    first = as_model(model, source.images(torch.arange(min(PLANTS, len(source)))), device)
    centre = torch.full_like(first[0], (threat.low + threat.high) / 2)
    x, y = centre.repeat(PLANTS, 1, 1, 1), torch.zeros(PLANTS, dtype=torch.int64, device=device)
    whole = reach(threat, centre.numel())
    tested: list[Attack] = []
    for stage in suite.stages:
        if stage.role == "pilot" or stage.attack in tested:
            continue
        tested.append(stage.attack)
        blind = _blind(stage.attack)
        spare = SPARE_WHITE if not blind else SPARE_BLACK_L2 if threat.norm == "l2" else SPARE_BLACK
        line = Line(centre, spare * whole, min(classes, LINES), threat.p, plain=blind)
        if not bool(_breaks(stage.attack, line, x, y, threat).any()):
            raise ContractError(
                "self-test",
                f"{stage.name} misses a linear model whose boundary is at {spare:.0%} of the radius; nothing that it "
                "says of another model can be believed",
            )
    climbing = [attack for attack in tested if not _blind(attack)]
    if climbing:
        _check_gradient(model, first)
        _planted(climbing[0], model, first, threat)


def _planted(attack: Attack, model: nn.Module, seeds: Tensor, threat: ThreatModel) -> None:
    """Refuse an attack that finds no planted weakness in any of a few models, one for each image in `seeds`.

    One found weakness is enough. On a rough model, a working attack may miss one, but hardly all of them.
    """
    for seed in seeds:
        with untouched(model), torch.no_grad():
            label = logits_of(model, seed[None]).argmax(dim=1)
        weak = Planted(model, seed, int(label), threat)
        if bool(_breaks(attack, weak, seed[None], label, threat).all()):
            return
    raise ContractError(
        "self-test",
        "a weakness planted in a copy of the model was not found; the model, the range or the radius keeps the "
        "attacks from working",
    )


def _check_gradient(model: nn.Module, x: Tensor) -> None:
    with untouched(model), torch.enable_grad():
        logits = logits_of(model, x.clone().requires_grad_(True))
    if not logits.requires_grad:
        raise ContractError(
            "gradient",
            "the model gives no gradient with respect to its input, and these attacks climb one; let it through, or "
            "ask for black-box attacks alone, such as square",
        )


def _breaks(attack: Attack, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel) -> Tensor:
    """Which samples the attack breaks, by a point inside the threat model that the model gets wrong."""
    x_adv = attack(model, x.clone(), y.clone(), threat)
    if x_adv.shape != x.shape:
        return torch.zeros(len(x), dtype=torch.bool)
    with untouched(model), torch.no_grad():
        return threat.contains(x_adv, x) & (logits_of(model, x_adv).argmax(dim=1) != y)


def _blind(attack: Attack) -> bool:
    return bool(getattr(attack, "black_box", False))


def _dual(p: float) -> float:
    return {math.inf: 1.0, 2.0: 2.0, 1.0: math.inf}[p]
