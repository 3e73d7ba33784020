"""Expectation over transformation: any attack, on the mean answer of a model with random layers."""

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
    from steelman.attacks import ATTACKS  # here, because the registry imports this file

    if not isinstance(value, (Search, str, Mapping)):
        raise UserError(
            f"expected an attack, its name or a mapping with a name and options, got {type(value).__name__}; "
            f"choices: {', '.join(sorted(ATTACKS))}"
        )
    return named("attack", ATTACKS).func(value)  # type: ignore[call-arg]


class Averaged(nn.Module):
    """The mean answer of a random model over `draws` forward passes: mean_i z_i(x), or log mean_i softmax(z_i(x)).

    >>> noisy = nn.Sequential(nn.Dropout(0.5), nn.Flatten())
    >>> Averaged(noisy, 1000, "logits")(torch.ones(1, 3)).round()
    tensor([[1., 1., 1.]])
    """

    def __init__(self, model: nn.Module, draws: int, average: Average) -> None:
        super().__init__()
        self.model, self.draws, self.average = model, draws, average
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        # Each draw is a forward pass of its own. In one pass of repeated images, many models would draw only once.
        if self.average == "logits":
            mean = logits_of(self.model, x)
            for draw in range(1, self.draws):  # a running mean of equal answers is exactly that answer
                mean = mean + (logits_of(self.model, x) - mean) / (draw + 1)
            return mean
        answers = [F.log_softmax(logits_of(self.model, x), dim=1) for _ in range(self.draws)]
        return torch.stack(answers).logsumexp(dim=0) - math.log(self.draws)


@settings
class EOT(Search):
    """Any attack on the mean answer of a random model: it climbs L(mean_i z_i(x')) over draws i of the randomness.

    Arguments:
        attack: an attack, its name in the registry, or a mapping with its name and options.
        draws: the number of forward passes that make one answer. Each of them is counted.
        average: "logits" or "probabilities". The answer is the mean logits, or the logarithm of the mean probabilities.

    The mean loss has the gradient mean_i grad L(z_i). If L is linear in the logits, the attack climbs this gradient
    exactly. The targeted margin is linear. The margin is linear while its rival class stays the same. With
    cross-entropy and "probabilities", the attack climbs -log mean_i p_i(y): the loss of the answer by which a random
    model is judged. With "logits", it climbs the loss of the normalised geometric mean of the probabilities. Both are
    at most the mean loss (Jensen). A few draws with a huge loss do not mislead the attack.

    The random layers are those that draw in eval mode. Dropout is not switched on. The layers draw from torch's global
    generator. The attack seeds it from the key, and restores it afterwards. A sample's draws depend on its batch. The
    mean answer over one set of draws decides success. Among many points, some succeed by luck. So judge the points by
    new draws.

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
        """The norms of the inner attack."""
        return self.attack.norms

    @property
    def minimum_norm(self) -> bool:  # type: ignore[override]
        """Whether the inner attack looks for the nearest point."""
        return self.attack.minimum_norm

    @property
    def black_box(self) -> bool:  # type: ignore[override]
        """Whether the inner attack asks for logits only."""
        return self.attack.black_box

    @property
    def mode(self) -> Mode:
        """The mode of the model during the inner attack."""
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
        # Without the first sample's index in the seed, all batches would have the same draws.
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
