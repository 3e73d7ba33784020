"""The feature attack: it moves an image's features towards those of images of other classes."""

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
    """Reads a model's logits and features in one forward pass, and the layer between them: logits = W features + b.

    Without a linear layer, the logits count as features, and W is the identity.
    """

    def __init__(self, problem: Problem, layer: Head | nn.Linear | None, seen: list[Tensor]) -> None:
        self.problem, self.layer, self.seen = problem, layer, seen

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features at points of the samples `rows`. Each point costs a forward pass."""
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
        """W with a row for each class, in the type of the logits. Without a layer, the identity."""
        if self.layer is None:
            return torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
        weight = self.layer.scale * self.layer.direction() if isinstance(self.layer, Head) else self.layer.weight
        return weight.detach().to(logits.dtype)


@contextlib.contextmanager
def reading(problem: Problem) -> Iterator[Reader]:
    """Inside, the yielded reader can read the problem's model."""
    if not any(isinstance(module, Head | nn.Linear) for module in problem.model.modules()):
        yield Reader(problem, None, [])
        return
    with features_of(problem.model) as seen:
        yield Reader(problem, last_layer(problem.model), seen)


@functools.lru_cache(maxsize=1)
def training_images(name: str, count: int) -> Tensor:
    """`count` images spread evenly over the dataset's training images."""
    from steelman.data import load  # here, because most attacks need no data

    train = load(name).train
    return train.images(torch.linspace(0, len(train) - 1, min(count, len(train))).long())


@settings
class FeatureAttack(Search):
    """Maximise cos(f(x'), f(g)) for each guide image g of another class. f(x) is what enters the last layer.

    Each sample has its guides in a random order. It leaves as soon as one of its copies is misclassified. With a
    target, all guides are of the target class, and a copy must be classified as that class.

    Arguments:
        steps: the steps for each guide.
        step_size: None means eps / 8, the published 1/255 at eps 8/255.
        targets: the most guides for a sample.
        copies: how many guides a sample has at a time. There is a copy of the sample for each of them.
        guides: images of the same shape as the samples.
        data: the name of a dataset, whose training images are then the guides.

    Without `guides` and `data`, the rows of the last layer's weights are the guides. The row of a class holds the
    features to which the class responds most.

    Deviations: A guide's class is the model's prediction, not its label. A guide that the model takes for the true
    class would not help. A sample without a guide of another class gets the classes' weights as guides. The passes that
    read the guide images are counted for no sample. A model without a linear layer is attacked through its logits.

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
    # Not compared and not shown: a comparison of two tensors gives a tensor, and a text of one is long.
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
                # A sample with fewer guides left than copies gets some of its guides twice, from different starts.
                at = torch.arange(first, first + self.copies, device=rows.device) % count[rows, None]
                self._draw(problem, read, rows, features[order[rows].gather(1, at)], first)

    def _guides(self, problem: Problem, read: Reader) -> tuple[Tensor, Tensor, int]:
        """The features and classes of all guides, and the number of guide images. Images come first, then weights."""
        x = problem.x
        images = self.guides if self.data is None else training_images(self.data, self.targets)
        nobody, everybody = x.new_zeros(0, dtype=torch.int64), torch.arange(len(x), device=x.device)
        with torch.no_grad():
            if images is None:
                # Without a layer, only a forward pass tells the number of classes.
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
        """How many guides each sample has, and the numbers of the guides in the order of their use."""
        wanted = labels != problem.y[:, None] if problem.target is None else labels == problem.target[:, None]
        # The classes' weights come after the images. Only a sample without a suitable image uses them.
        suited = wanted[:, :images].any(dim=1)
        wanted[:, images:] &= ~suited[:, None]
        drawn = problem.key.fold("order").uniform(problem.index, (len(labels),), torch.float64)
        order = torch.where(wanted, drawn, 2.0).argsort(dim=1, stable=True)
        return wanted.sum(dim=1).clamp_max(self.targets), order

    def _draw(self, problem: Problem, read: Reader, rows: Tensor, features: Tensor, first: int) -> None:
        """Do all steps for some guides of each sample. `features` has the shape (samples, guides, features)."""
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
            # Cosines to different guides cannot be compared. So the margin says which copy is nearest to success.
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
