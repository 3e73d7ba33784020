"""Expectation over transformation: any attack, on what a random model answers on average."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator, model_validator
from torch import Tensor, nn

from steelman.attacks.base import Mode, logits_of, reseed
from steelman.attacks.engine import Found, Problem, Search
from steelman.attacks.feature import FeatureAttack
from steelman.attacks.fn import FNAttack
from steelman.attacks.pgd import PGD
from steelman.errors import UserError
from steelman.rng import Key
from steelman.settings import Count, named, settings
from steelman.threat import Norm, ThreatModel

Average = Literal["logits", "probabilities"]


def _attack(value: object) -> object:
    from steelman.attacks import ATTACKS  # the registry holds this attack too, so it is read when it is needed

    if not isinstance(value, (Search, str, Mapping)):
        raise UserError(
            f"expected an attack, its name or a mapping with a name and options, got {type(value).__name__}; "
            f"choices: {', '.join(sorted(ATTACKS))}"
        )
    return named("attack", ATTACKS).func(value)  # type: ignore[call-arg]


class Averaged(nn.Module):
    """The mean answer of a random model over `draws` forwards: mean_i z_i(x), or log mean_i softmax(z_i(x)).

    >>> noisy = nn.Sequential(nn.Dropout(0.5), nn.Flatten())
    >>> Averaged(noisy, 1000, "logits")(torch.ones(1, 3)).round()
    tensor([[1., 1., 1.]])
    """

    def __init__(self, model: nn.Module, draws: int, average: Average) -> None:
        super().__init__()
        self.model, self.draws, self.average = model, draws, average
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        # One forward a draw, not one of repeated inputs: many random models draw once a forward, for the whole batch.
        if self.average == "logits":
            mean = logits_of(self.model, x)
            for draw in range(1, self.draws):  # as a running mean, equal answers average to exactly themselves
                mean = mean + (logits_of(self.model, x) - mean) / (draw + 1)
            return mean
        answers = [F.log_softmax(logits_of(self.model, x), dim=1) for _ in range(self.draws)]
        return torch.stack(answers).logsumexp(dim=0) - math.log(self.draws)


@settings
class EOT(Search):
    """Any attack on the mean answer of a random model: it climbs L(mean_i z_i(x')) over draws i of the randomness.

    Arguments: `attack` is an attack, its registry name or a mapping with its name and options; `draws` is how many
    forwards make one answer (each counts as a pass); `average` is what the mean is taken of: logits, or probabilities,
    whose logarithms are then the answer.

    The gradient of the mean loss, mean_i grad L(z_i), is what this climbs where L is linear in the logits: exactly
    for the targeted margin, and for the margin while its rival class stays the same. Of cross-entropy it climbs
    -log mean_i p_i(y) with "probabilities", the loss of the answer that a random model is judged by, and with "logits"
    that of their normalised geometric mean. Neither exceeds the mean loss (Jensen), and neither is led astray by a few
    draws with a huge loss.

    The random layers are the model's own: those that draw in eval mode. Dropout is not switched on. They draw from
    torch's global generator, seeded here from the key, and left as it was. A sample's draws depend on its batch.
    Success is that of the mean answer over one set of draws, and among many points some succeed by luck: judge the
    points by fresh draws.

    Athalye et al. (2018), "Synthesizing Robust Adversarial Examples", section 2.1, and "Obfuscated Gradients Give a
    False Sense of Security", section 4.2.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> attack = EOT(attack={"name": "pgd", "steps": 5}, draws=10)
    >>> found = attack.run(net, x, y, ThreatModel(norm="linf", eps=0.01))
    >>> bool((found.forwards % 10 == 0).all())
    True
    """

    attack: Annotated[Search, BeforeValidator(_attack)] = PGD()
    draws: Count = 20
    average: Average = "logits"

    @model_validator(mode="after")
    def _sensible(self) -> EOT:
        if isinstance(self.attack, EOT):
            raise UserError(
                f"eot inside eot averages twice: give the inner attack itself, and {self.draws * self.attack.draws} "
                "draws for as many"
            )
        if isinstance(self.attack, (FeatureAttack, FNAttack)):
            raise UserError(
                f"eot averages answers, and {type(self.attack).__name__} reads the features of one forward: expected "
                "another attack"
            )
        return self

    @property
    def norms(self) -> tuple[Norm, ...]:  # type: ignore[override]
        """Those of the attack."""
        return self.attack.norms

    @property
    def minimum_norm(self) -> bool:  # type: ignore[override]
        """That of the attack."""
        return self.attack.minimum_norm

    @property
    def black_box(self) -> bool:  # type: ignore[override]
        """That of the attack."""
        return self.attack.black_box

    @property
    def mode(self) -> Mode:
        """That of the attack."""
        return getattr(self.attack, "mode", "eval")

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        index: Tensor | None = None,
        key: Key = Key(0),  # noqa: B008 - a Key is frozen
        **rest: Any,
    ) -> Found:
        # The first sample's index keeps one batch's draws from being another's.
        first = int(index[0]) if index is not None and len(index) else 0
        seed = key.fold("eot", first).integer()
        devices = sorted({parameter.get_device() for parameter in model.parameters() if parameter.is_cuda})
        with torch.random.fork_rng(devices=devices):
            reseed(model, seed)
            return super().run(model, x, y, threat, index=index, key=key, **rest)

    def search(self, problem: Problem) -> None:
        problem.model = Averaged(problem.model, self.draws, self.average)
        self.attack.search(problem)
        problem.forwards *= self.draws
        problem.backwards *= self.draws
