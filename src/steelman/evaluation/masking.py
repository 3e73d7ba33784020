"""Signs of gradient masking: a model that hides its gradient looks robust to whoever climbs it.

Each sign is a figure measured on a few samples, a limit, and what follows when the limit is passed (Athalye et al.,
2018, section 3; Carlini et al., 2019, "On Evaluating Adversarial Robustness", section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS
from steelman.attacks.base import input_gradient, logits_of, untouched
from steelman.errors import UserError
from steelman.evaluation.result import Flag, Trust
from steelman.losses import adversarial_loss
from steelman.rng import Key
from steelman.threat import ThreatModel

STEPS, STARTS, QUERIES = 20, 3, 200
TINY = 1e-12  # a slope below this is none


def signs(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, *, index: Tensor, key: Key) -> list[Flag]:
    """The flags of a model on a few samples that it gets right."""
    if len(x) == 0:
        return []

    def broken(name: str, **options: object) -> Tensor:
        attack = ATTACKS[name](**options)
        return attack.run(model, x, y, threat, index=index, key=key.fold("signs")).success

    slopes = _slopes(model, x, y)
    flat = _share(slopes < TINY) if slopes is not None else 1.0
    flags = [
        flag(
            "zero gradients",
            flat,
            0.05,
            "suspect",
            f"for {flat:.0%} of the samples tried the gradient with respect to the input is zero, so a gradient"
            " attack has nothing to climb",
        )
    ]
    if slopes is not None:
        loss = "scale-invariant-cross-entropy"
        iterated = ATTACKS["bim"](steps=STEPS, step_size=2.5 * threat.eps / STEPS, loss=loss)
        found = iterated.run(model, x, y, threat, index=index, key=key.fold("signs"))
        many, stuck = found.success, _share(_stuck(model, x, found.x_adv, y, loss) & ~found.success)
        flags.append(
            flag(
                "loss does not rise",
                stuck,
                0.05 + 1 / len(x),
                "suspect",
                f"for {stuck:.0%} of the samples tried {STEPS} steps found no point with a higher loss than the image "
                "itself",
            )
        )
        one = broken("fgsm", loss=loss)
        jump = _share(one & ~many)
        flags.append(
            flag(
                "one step stronger",
                jump,
                0.02 + 1 / len(x),
                "suspect",
                f"one step breaks {jump:.0%} of the samples tried that {STEPS} steps do not: the loss is too rough to "
                "climb in small steps",
            )
        )
        outcomes = torch.stack(
            [
                ATTACKS["pgd"](steps=STEPS, loss=loss)
                .run(model, x, y, threat, index=index, key=key.fold("starts", start))
                .success
                for start in range(STARTS)
            ]
        )
        white = many | one | outcomes.any(dim=0)
        differ = _share(outcomes.any(dim=0) & ~outcomes.all(dim=0))
        flags.append(
            flag(
                "starts disagree",
                differ,
                0.2 + 1 / len(x),
                "suspect",
                f"for {differ:.0%} of the samples tried it depends on the random start whether the attack succeeds: "
                "more starts would break more",
            )
        )
    else:
        white = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    if threat.norm in ATTACKS["square"]().norms:
        blind = broken("square", queries=QUERIES)
        ahead = _share(blind & ~white)
        flags.append(
            flag(
                "black box stronger",
                ahead,
                0.05 + 1 / len(x),
                "suspect",
                f"{QUERIES} random guesses without a gradient break {ahead:.0%} of the samples tried that gradient "
                "attacks do not: the gradients mislead",
            )
        )
    return flags


def flag(name: str, figure: float, limit: float, trust: Trust, text: str) -> Flag:
    """A flag, raised when its figure is over the limit."""
    return Flag(name=name, figure=figure, limit=limit, raised=figure > limit, trust=trust, text=text)


def _slopes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
    """The largest entry of each sample's gradient of the margin; None if the model gives no gradient."""
    with untouched(model), torch.enable_grad():
        points = x.detach().clone().requires_grad_(True)
        losses = adversarial_loss("margin", logits_of(model, points), y)
        try:
            gradient = input_gradient(losses, points)
        except UserError:
            return None
    return gradient.flatten(1).abs().amax(dim=1)


def _stuck(model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, loss: str) -> Tensor:
    """Where the loss at x' is not above that at x."""
    with untouched(model), torch.no_grad():
        before, after = (adversarial_loss(loss, logits_of(model, points), y) for points in (x, x_adv))
    return ~(after > before)


def _share(which: Tensor) -> float:
    return float(which.double().mean())
