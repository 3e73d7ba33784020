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

    a, p and n are features: what enters the last layer. a belongs to x*. p belongs to a clean image of the same
    class. n belongs to a clean image of another class: the one nearest to a by d. a^2, p^2 and n^2 are means over the
    features.

    d is the `distance`: "cosine" 1 - cos, "absolute" 1 - |cos|, or "euclidean" the length of the difference. The
    released code has "absolute", but finds n by cos. `positive` "class" takes p from a random other image of the class,
    or from the clean x if there is none. "own" takes the clean x. "both" takes the mean of the two terms. The head's
    margin is in the cross-entropy alone.

    The images for p and n come from a pool: the clean images of the last `pool` batches, this one included. Images of
    earlier batches keep their augmentation. The pool is saved in checkpoints. The choice uses the current weights in
    eval mode. It costs a forward of the whole pool, and no backward. Weight perturbation makes the choice again at its
    own weights. Two forwards in train mode move batch norm: x*, and then the images for p and n as one batch.

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
        """Raise unless the features of the model can be read. This runs before the training."""
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
            """Add this batch to the pool. It replaces as many of the oldest images, so a short batch removes few."""
            n = len(batch.x)
            batch.carry.update(pool.newest(max((self.pool - 1) * n, len(pool.x) - n)))

        return Outcome(loss=losses.mean(), logits=logits.detach(), x_adv=x_adv, after=after)

    def triplet(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        """The hinge and the squares of each triplet."""
        hinge = (apart(a, p, self.distance) - apart(a, n, self.distance) + self.alpha).clamp_min(0)
        return hinge + self.norm_weight * (a.square() + p.square() + n.square()).mean(dim=1)


@dataclasses.dataclass(frozen=True)
class Pool:
    """Clean images to choose from: those of the batch, then those of earlier batches, the newest first."""

    x: Tensor
    y: Tensor
    index: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Pool:
        rows = {"x": batch.x.detach(), "y": batch.y, "index": batch.index}
        past = {name: batch.carry.get(f"pool_{name}", new[:0]).to(new) for name, new in rows.items()}
        return cls(**{name: torch.cat((new, past[name])) for name, new in rows.items()})

    def newest(self, rows: int) -> dict[str, Tensor]:
        """The first `rows` images, as `Batch.carry` holds them."""
        return {f"pool_{name}": getattr(self, name)[:rows].contiguous() for name in ("x", "y", "index")}

    def same_class(self, batch: Batch, key: Key) -> Tensor:
        """For each sample, the place of a random other image of its class, or its own place if there is none."""
        fits = (batch.y[:, None] == self.y) & (batch.index[:, None] != self.index)
        count = fits.sum(dim=1)
        draw = key.uniform(batch.index, (1,), torch.float64)[:, 0].to(count.device)
        wanted = (draw * count).long() + 1  # at most `count`, because the draw is below 1
        found = (fits & (fits.cumsum(dim=1) == wanted[:, None])).long().argmax(dim=1)
        return torch.where(count > 0, found, torch.arange(len(found), device=found.device))

    def most_similar(self, batch: Batch, x_adv: Tensor, distance: Distance) -> Tensor:
        """For each adversarial image, the place of the clean image of another class with the nearest features."""
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
    """d between row i of `one` and row i of `other`, for each i.

    >>> a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[-3.0, -4.0]])
    >>> [round(float(apart(a, b, d)), 4) for d in ("cosine", "absolute", "euclidean")]
    [2.0, 0.0, 10.0]
    """
    if distance == "euclidean":
        return torch.linalg.vector_norm(one - other, dim=1)  # type: ignore[no-any-return]
    cos = F.cosine_similarity(one, other, dim=1)
    return 1 - (cos.abs() if distance == "absolute" else cos)


def as_rows(z: Tensor) -> Tensor:
    """Features as one row per sample, in float32 at least: half precision would round the distances."""
    z = z.flatten(1)
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
