"""TLA: triplet loss adversarial training."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from steelman.attacks import PGD, Attack
from steelman.attacks.base import untouched
from steelman.errors import UserError
from steelman.models.batchnorm import Branch, routed
from steelman.models.features import check_features, check_readable, features_of, last_layer
from steelman.objectives.base import Batch, Objective, Outcome, inner
from steelman.rng import Key
from steelman.settings import Count, Number, settings

Distance = Literal["cosine", "absolute", "euclidean"]


@settings
class TLA(Objective):
    """mean [ CE(f(x*), y) + weight * (max(0, d(a, p) - d(a, n) + alpha) + norm_weight * (a^2 + p^2 + n^2)) ].

    a, p and n are what enters the last layer: features of x* and of two clean images, p of the same class, n the most
    similar to a of another class. d is the `distance`: 1 - cos, or "absolute" 1 - |cos|, as in the released code (where
    n is still picked by cos), or "euclidean" the length of the difference; n is the nearest by the same d. Squares are
    means over features. `positive` "class" is another image of the class at random
    (the clean x where there is none), "own" the clean x, "both" the mean of the two triplets' terms. The margin of a
    head is in the cross-entropy alone.

    Images are chosen among `pool` batches: this one and the clean images of the last ones, which are carried (and saved
    in checkpoints) as they were augmented then. The choice is made with the weights of the moment in eval mode, at the
    cost of a forward of the whole pool and no backward; weight perturbation makes it again at its own weights. Two
    forwards in train mode move batch norm: x*, and then positives and negatives as one batch.

    Mao et al. (2019), "Metric Learning for Adversarial Robustness".
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("adversarial", "clean")
    eager: ClassVar[str] = "reads features as the model runs, which compiled models do not show"
    alpha: Annotated[Number, Field(ge=0)] = 0.03
    weight: Annotated[Number, Field(ge=0)] = 2.0
    norm_weight: Annotated[Number, Field(ge=0)] = 1e-3
    distance: Distance = "cosine"
    positive: Literal["class", "own", "both"] = "class"
    pool: Count = 10
    attack: Annotated[Attack, inner()] = PGD(steps=7, keep="last")

    def check(self, net: nn.Module, x: Tensor) -> None:
        """Raise, before anything is trained, unless the model has features to read."""
        check_readable(net, x)

    def __call__(self, batch: Batch) -> Outcome:
        x_adv = batch.attacked(self.attack)
        pool = Pool.of(batch)
        own = torch.arange(len(batch.x), device=batch.x.device)
        another = pool.same_class(batch, batch.key.fold("positive"))
        positives = {"class": [another], "own": [own], "both": [another, own]}[self.positive]
        negatives = pool.most_similar(batch, x_adv, self.distance)
        with features_of(batch.net) as seen:
            logits = batch.adversarial(x_adv)
            batch.model(pool.x[torch.cat([*positives, negatives])])
        check_features(last_layer(batch.net), seen, logits, 2)
        a, chosen = map(as_rows, seen)
        *near, n = torch.split(chosen, len(a))
        triplets = torch.stack([self.triplet(a, p, n) for p in near]).mean(dim=0)
        losses = batch.cross_entropy(logits) + self.weight * triplets

        def after() -> None:
            """Remember this batch. The oldest images make room, as many as came: a short batch leaves the pool full."""
            n = len(batch.x)
            batch.carry.update(pool.newest(max((self.pool - 1) * n, len(pool.x) - n)))

        return Outcome(loss=losses.mean(), logits=logits.detach(), x_adv=x_adv, after=after)

    def triplet(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        """The hinge and the squares of each triplet."""
        hinge = (apart(a, p, self.distance) - apart(a, n, self.distance) + self.alpha).clamp_min(0)
        return hinge + self.norm_weight * (a.square() + p.square() + n.square()).mean(dim=1)


@dataclasses.dataclass(frozen=True)
class Pool:
    """Clean images to choose from: first those of the batch, then the remembered ones, newest first."""

    x: Tensor
    y: Tensor
    index: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Pool:
        rows = {"x": batch.x.detach(), "y": batch.y, "index": batch.index}
        past = {name: batch.carry.get(f"pool_{name}", new[:0]).to(new) for name, new in rows.items()}
        return cls(**{name: torch.cat((new, past[name])) for name, new in rows.items()})

    def newest(self, rows: int) -> dict[str, Tensor]:
        """What is carried on."""
        return {f"pool_{name}": getattr(self, name)[:rows].contiguous() for name in ("x", "y", "index")}

    def same_class(self, batch: Batch, key: Key) -> Tensor:
        """For each sample one of the images of its class other than itself, at random; itself where there is none."""
        fits = (batch.y[:, None] == self.y) & (batch.index[:, None] != self.index)
        count = fits.sum(dim=1)
        draw = key.uniform(batch.index, (1,), torch.float64)[:, 0].to(count.device)
        wanted = (draw * count).long() + 1  # the draw is below 1
        found = (fits & (fits.cumsum(dim=1) == wanted[:, None])).long().argmax(dim=1)
        return torch.where(count > 0, found, torch.arange(len(found), device=found.device))

    def most_similar(self, batch: Batch, x_adv: Tensor, distance: Distance) -> Tensor:
        """For each adversarial image the clean one of another class whose features are most like its own."""
        if not (others := batch.y[:, None] != self.y).any(dim=1).all():
            raise UserError(
                f"TLA compares each image with one of another class: expected at least two classes among the "
                f"{len(self.y)} images of the batch and of the pool, got one; use larger batches"
            )
        net = batch.net
        with torch.no_grad(), untouched(net), features_of(net) as seen:
            with routed(net, "adversarial"):
                net(x_adv)
            for part in torch.split(self.x, len(x_adv)):
                with routed(net, "clean"):
                    net(part)
        a, *parts = map(as_rows, seen)
        with torch.autocast(a.device.type, enabled=False):
            if distance == "euclidean":
                alike = -torch.cdist(a, torch.cat(parts))
            else:
                alike = F.normalize(a, dim=1) @ F.normalize(torch.cat(parts), dim=1).T
        alike = alike.abs() if distance == "absolute" else alike
        return alike.masked_fill(~others, float("-inf")).argmax(dim=1)


def apart(one: Tensor, other: Tensor, distance: Distance) -> Tensor:
    """d of each two rows.

    >>> a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[-3.0, -4.0]])
    >>> [round(float(apart(a, b, d)), 4) for d in ("cosine", "absolute", "euclidean")]
    [2.0, 0.0, 10.0]
    """
    if distance == "euclidean":
        return torch.linalg.vector_norm(one - other, dim=1)  # type: ignore[no-any-return]
    cos = F.cosine_similarity(one, other, dim=1)
    return 1 - (cos.abs() if distance == "absolute" else cos)


def as_rows(z: Tensor) -> Tensor:
    """Features as one row a sample, in full precision even where the model ran in half."""
    z = z.flatten(1)
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
