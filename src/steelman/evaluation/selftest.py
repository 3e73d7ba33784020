"""Before a verdict, the attacks prove themselves: on a linear model whose answer is known, and on the user's own model
with a weakness planted in it. A suite that misses either says nothing of a model, and refuses."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from steelman.attacks import Search
from steelman.data.source import Source
from steelman.evaluation.checks import ContractError, as_model
from steelman.evaluation.suites import Suite
from steelman.rng import Key
from steelman.threat import ThreatModel

# How much of the radius each kind of attack is given to spare. Random search needs far more than a gradient.
SPARE_WHITE, SPARE_BLACK = 0.9, 0.4
PLANTS = 4  # samples, for a random search may be unlucky with one


class Line(nn.Module):
    """Two classes, or more that never win: z_1 - z_0 = (w . (x - centre)) / ||w||_q - distance.

    From the centre the boundary is exactly `distance` away in the norm p.
    """

    def __init__(self, centre: Tensor, distance: float, classes: int, p: float) -> None:
        super().__init__()
        self.weight: Tensor
        self.centre: Tensor
        signs = 2.0 * (Key(0).fold("line").uniform(torch.zeros(1), (centre.numel(),))[0] < 0.5) - 1
        q = 1.0 if p == math.inf else 2.0 if p == 2 else math.inf
        self.register_buffer("weight", (signs / torch.linalg.vector_norm(signs, ord=q)).to(centre))
        self.register_buffer("centre", centre.flatten())
        self.distance, self.classes = distance, classes

    def forward(self, x: Tensor) -> Tensor:
        ahead = (x.flatten(1) - self.centre) @ self.weight / self.distance - 1
        rest = ahead[:, None].expand(-1, self.classes - 2) - 3
        return torch.cat((torch.zeros_like(ahead)[:, None], ahead[:, None], rest), dim=1)


class Planted(nn.Module):
    """A model with a weakness: towards `direction`, a wrong class of `seed` overtakes all others half way to eps."""

    def __init__(self, model: nn.Module, seed: Tensor, label: int, threat: ThreatModel) -> None:
        super().__init__()
        self.model, self.seed = model, seed
        middle = (threat.low + threat.high) / 2
        self.direction = torch.where(seed < middle, 1.0, -1.0).to(seed)  # where there is room to go
        q = 1.0 if threat.p == math.inf else 2.0 if threat.p == 2 else math.inf
        self.reach = reach(threat, seed.numel()) * float(torch.linalg.vector_norm(self.direction.flatten(), ord=q))
        with torch.no_grad():
            logits = model(seed[None])[0]
        self.other = (label + 1) % len(logits)
        self.gain = 4 * float(logits.max() - logits.min()) + 1

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        along = ((x - self.seed) * self.direction).flatten(1).sum(dim=1) / self.reach
        boost = torch.zeros_like(logits)
        boost[:, self.other] = 1
        out: Tensor = logits + self.gain * boost * along[:, None]
        return out


def reach(threat: ThreatModel, pixels: int) -> float:
    """The radius that is left to an image in the middle of the box."""
    half = (threat.high - threat.low) / 2 * pixels ** (1 / threat.p)
    return float(min(threat.eps, half))


def self_test(
    suite: Suite, model: nn.Module, source: Source, threat: ThreatModel, classes: int, device: torch.device
) -> None:
    """Refuse a suite whose attacks miss what is there, or find what is not."""
    first = as_model(model, source.images(torch.tensor([0])), device)
    centre = torch.full_like(first[0], (threat.low + threat.high) / 2)
    x, y = centre.repeat(PLANTS, 1, 1, 1), torch.zeros(PLANTS, dtype=torch.int64, device=device)
    whole = reach(threat, centre.numel())
    seen: list[Search] = []
    for stage in suite.stages:
        attack = stage.attack
        if not isinstance(attack, Search) or attack in seen:
            continue
        seen.append(attack)
        spare = SPARE_BLACK if attack.black_box else SPARE_WHITE
        line = Line(centre, spare * whole, classes, threat.p)
        if not bool(attack.run(line, x, y, threat).success.any()):
            raise ContractError(
                "self-test",
                f"{stage.name} misses a linear model whose boundary is at {spare:.0%} of the radius; nothing that it "
                "says of another model can be believed",
            )
    if isinstance(seen[0], Search) and not seen[0].black_box:
        _planted(seen[0], model, first[0], threat)


def _planted(attack: Search, model: nn.Module, seed: Tensor, threat: ThreatModel) -> None:
    """The first attack on a copy of the model with a weakness near one image."""
    modes = [module.training for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            label = int(model(seed[None]).argmax())
        weak = Planted(model, seed, label, threat)
        found = attack.run(weak, seed[None], torch.tensor([label], device=seed.device), threat)
    finally:
        for module, training in zip(model.modules(), modes, strict=True):
            module.training = training
    if not bool(found.success.all()):
        raise ContractError(
            "self-test",
            "a weakness planted in a copy of the model was not found; the model, the range or the radius keeps the "
            "attacks from working",
        )
