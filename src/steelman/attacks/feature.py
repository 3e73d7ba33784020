"""The feature attack: draw an image's features to those of images of other classes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from steelman.attacks.engine import Problem, Search
from steelman.attacks.pgd import ascend
from steelman.errors import UserError
from steelman.heads import Head
from steelman.losses import adversarial_loss
from steelman.models.features import check_features, features_of, last_layer
from steelman.settings import Count, Number, settings


class Reader:
    """A model's logits and features from one forward, and the layer between them: logits = W features + b.

    A model without any linear layer is read as its logits under the identity.
    """

    def __init__(self, problem: Problem, layer: Head | nn.Linear | None, seen: list[Tensor]) -> None:
        self.problem, self.layer, self.seen = problem, layer, seen

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features at points of the samples `rows`, one forward each."""
        self.seen.clear()
        logits = self.problem.logits(points, rows)
        if self.layer is None:
            return logits, logits
        check_features(self.layer, self.seen, logits, 1)
        features = self.seen.pop()
        if features.dim() != 2:
            raise UserError(f"expected one row of features a sample, got features of shape {tuple(features.shape)}")
        return logits, features.to(logits.dtype)

    def weight(self, logits: Tensor) -> Tensor:
        """W, a row a class, in the type of the logits; without a layer, the identity over their classes."""
        if self.layer is None:
            return torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
        weight = self.layer.scale * self.layer.direction() if isinstance(self.layer, Head) else self.layer.weight
        return weight.detach().to(logits.dtype)


@contextlib.contextmanager
def reading(problem: Problem) -> Iterator[Reader]:
    """Inside, the problem's model can be read."""
    if not any(isinstance(module, Head | nn.Linear) for module in problem.model.modules()):
        yield Reader(problem, None, [])
        return
    with features_of(problem.model) as seen:
        yield Reader(problem, last_layer(problem.model), seen)


@functools.lru_cache(maxsize=1)
def training_images(name: str, count: int) -> Tensor:
    """`count` images spread evenly over the dataset's training images."""
    from steelman.data import load  # an attack needs no data unless it is asked to

    train = load(name).train
    return train.images(torch.linspace(0, len(train) - 1, min(count, len(train))).long())


@settings
class FeatureAttack(Search):
    """Maximise cos(f(x'), f(g)), f the features that enter the last layer, for each guide image g of another class.

    A sample is drawn to its guides in a random order of its own, and is done as soon as one copy of it is misclassified
    (with a target, classified as that; its guides are then those of the target class).

    Arguments: `steps` for each guide; `step_size` None means eps / 8, the published 1/255 at eps 8/255; `targets` is
    how many guides a sample is drawn to at most, `copies` how many of them at a time. Give `guides`, images of the
    samples' kind, or `data`, the name of a dataset whose training images are taken. Without either, a class's weights
    in the last layer, which are the features it responds to most, are taken for an image of it.

    Deviations: a guide's class is the model's prediction, not its label, as a guide that is itself taken for the true
    class leads nowhere; a sample none of whose guides is of another class is drawn to the classes' weights. Reading the
    guides counts for no sample. A model without a linear layer is attacked through its logits.

    >>> from steelman.threat import Norm, ThreatModel
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> found = FeatureAttack(steps=5, guides=torch.rand(20, 1, 2, 2)).run(net, x, y, ThreatModel(eps=0.1))
    >>> found.success.shape
    torch.Size([2])

    Sabour et al. (2016), "Adversarial Manipulation of Deep Representations", for one guide; as an attack over many
    guides, github.com/Line290/FeatureAttack, as in Pang et al. (2020), Table 2.
    """

    steps: Count = 50
    step_size: Annotated[Number, Field(gt=0)] | None = None
    targets: Count = 500
    copies: Count = 10
    # Beside the settings proper: a tensor can be neither compared nor shown.
    guides: Tensor | None = dataclasses.field(default=None, repr=False, compare=False)
    data: str | None = None

    @model_validator(mode="after")
    def _one_kind_of_guide(self) -> FeatureAttack:
        if self.guides is not None and self.data is not None:
            raise UserError(f"expected guides or data, got both: {len(self.guides)} guides and data {self.data!r}")
        if self.guides is not None and (self.guides.dim() < 2 or len(self.guides) == 0):
            raise UserError(f"expected guides as a batch of images, got shape {tuple(self.guides.shape)}")
        return self

    def search(self, problem: Problem) -> None:
        with reading(problem) as read:
            features, labels, images = self._guides(problem, read)
            count, order = self._order(problem, labels, images)
            for first in range(0, int(count.max()), self.copies):
                rows = problem.remaining()
                rows = rows[count[rows] > first]
                if len(rows) == 0:
                    return
                # A sample with fewer guides left than copies takes some of its guides twice, from two starts.
                at = torch.arange(first, first + self.copies, device=rows.device) % count[rows, None]
                self._draw(problem, read, rows, features[order[rows].gather(1, at)], first)

    def _guides(self, problem: Problem, read: Reader) -> tuple[Tensor, Tensor, int]:
        """The guides' features and classes, those of images first, and how many images there are."""
        x = problem.x
        images = self.guides if self.data is None else training_images(self.data, self.targets)
        nobody, everybody = x.new_zeros(0, dtype=torch.int64), torch.arange(len(x), device=x.device)
        with torch.no_grad():
            if images is None:
                # Without a layer to look at, it takes a forward to learn how many classes there are.
                weight = read.weight(x if read.layer is not None else read(x, everybody)[0])
                return weight, torch.arange(len(weight), device=x.device), 0
            if images.shape[1:] != x.shape[1:]:
                raise UserError(f"expected guides of shape {tuple(x.shape[1:])}, got {tuple(images.shape[1:])}")
            parts = [read(images[at : at + 256].to(x), nobody) for at in range(0, len(images), 256)]
            logits, features = (torch.cat(both) for both in zip(*parts, strict=True))
            weight = read.weight(logits)
        labels = torch.cat((logits.argmax(dim=1), torch.arange(len(weight), device=x.device)))
        return torch.cat((features, weight)), labels, len(images)

    def _order(self, problem: Problem, labels: Tensor, images: int) -> tuple[Tensor, Tensor]:
        """How many guides each sample has, and their numbers in the order it is drawn to them."""
        wanted = labels != problem.y[:, None] if problem.target is None else labels == problem.target[:, None]
        # The classes' weights, after the images, are for samples that no image suits.
        suited = wanted[:, :images].any(dim=1)
        wanted[:, images:] &= ~suited[:, None]
        drawn = problem.key.fold("order").uniform(problem.index, (len(labels),), torch.float64)
        order = torch.where(wanted, drawn, 2.0).argsort(dim=1, stable=True)
        return wanted.sum(dim=1).clamp_max(self.targets), order

    def _draw(self, problem: Problem, read: Reader, rows: Tensor, features: Tensor, first: int) -> None:
        """All steps for some guides a sample; `features` has a row a sample and a guide, in that order."""
        threat, k, shape = problem.threat, self.copies, problem.x.shape[1:]
        eta = threat.eps / 8 if self.step_size is None else self.step_size
        starts = [
            threat.random_start(problem.x[rows], problem.index[rows], problem.key.fold("start", first + copy))
            for copy in range(k)
        ]
        points = torch.stack(starts, dim=1)
        for step in range(self.steps + 1):
            last, n, every = step == self.steps, len(rows), rows.repeat_interleave(k)
            points = points.reshape(n * k, *shape).detach().requires_grad_(not last)
            with torch.set_grad_enabled(not last):
                logits, seen = read(points, every)
                closeness = F.cosine_similarity(seen, features.flatten(0, 1), dim=1)
            # Closeness to different guides does not compare; how nearly each copy is misclassified does.
            target = None if problem.target is None else problem.target[every]
            lead = adversarial_loss("margin", logits.detach(), problem.y[every], target=target)
            best = lead.view(n, k).argmax(dim=1) + k * torch.arange(n, device=rows.device)
            stay = ~problem.keep(points[best], logits[best], lead[best], rows)
            if last or not stay.any():
                return
            gradient = problem.gradient(closeness, points, every)
            points = points.detach()
            if not stay.all():
                some = stay.repeat_interleave(k)
                rows, every, features = rows[stay], every[some], features[stay]
                points, gradient = points[some], gradient[some]
            points = ascend(points, gradient, problem.x[every], threat, eta)
