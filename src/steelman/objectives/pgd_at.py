"""PGD adversarial training."""

from __future__ import annotations

from torch import nn

from steelman.attacks import PGD
from steelman.heads import with_margin
from steelman.losses import cross_entropy
from steelman.objectives.base import Batch, InnerAttack, Outcome
from steelman.settings import settings


@settings
class PGDAT:
    """Cross-entropy on the adversary's images: mean CE(f(x*), y), where x* climbs CE(f(x'), y) inside the ball.

    The attack sees the head's scaled logits without the margin, in the mode it names ("eval" by default, in which batch
    norm uses its running statistics); the one forward in train mode, on x*, is what moves batch-norm statistics.

    Madry et al. (2018), "Towards Deep Learning Models Resistant to Adversarial Attacks", Eq. (1).
    """

    attack: InnerAttack = PGD(steps=10, keep="last")

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        # At ratio 0, where a warm-up of the radius starts, there is no step to scale: the attack returns x.
        attack = self.attack.at(batch.ratio) if isinstance(self.attack, PGD) and batch.ratio > 0 else self.attack
        x_adv = attack(batch.net, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
        logits = model(x_adv)
        return Outcome(cross_entropy(with_margin(model, logits, batch.y), batch.y).mean(), logits.detach())
