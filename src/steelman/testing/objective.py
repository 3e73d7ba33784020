"""The promises of an objective."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from steelman.errors import UserError
from steelman.heads import HEADS, head_of
from steelman.models.batchnorm import split_norms
from steelman.objectives import Objective
from steelman.objectives.awp import AWP
from steelman.objectives.criterion import Criterion
from steelman.testing.promises import (
    Interrupt,
    Snapshot,
    Subject,
    check_ingredient,
    gap,
    global_noise,
    made,
    name_of,
    one_thread,
    same_bits,
)
from steelman.testing.trial import SAMPLES, STEPS, STOPPED, Trial, Waves, moves, sgd
from steelman.threat import ThreatModel

SHAPE, CLASSES = (1, 4, 4), 3
WHEN = "when its loss was computed"


def check_objective(
    objective: Objective | Callable[[], Objective],
    *,
    model: Callable[[], nn.Module] | None = None,
    shape: tuple[int, int, int] = SHAPE,
    classes: int = CLASSES,
    helper: nn.Module | None = None,
    heads: Iterable[str] | None = None,
) -> None:
    """Raise `ContractBrokenError` unless an objective keeps its promises.

    The promises:
    - Its loss is one finite number, with gradients for every weight. This holds in linf and l2, with each head, with
      two classes, and at a radius of zero.
    - The loss includes the head's margin and the label smoothing.
    - The same seed gives the same loss to the bit. If there is noise, each step has other noise.
    - Its adversarial images lie in the threat model.
    - It changes no image and no weight, also after an exception.
    - Only its declared `forwards` move batch norm.
    - It carries only tensors. A training resumed from a saved state ends with the same weights to the bit.
    - It works with weight perturbation, unless `single_pass` says why not.

    Arguments:
        objective: the objective with small settings, or a function that makes it.
        model: a function that makes a new model for images of `shape`. Its last layer is linear. It has no dropout.
        shape, classes: the image shape and the number of classes of that model.
        helper: the other model that an objective with `helped` learns from.
        heads: the names of the heads to try; by default all of steelman's.

    >>> from steelman.objectives import PGDAT
    >>> check_objective(PGDAT(), heads=["he"])
    """
    given = made(objective)
    check_ingredient("objective", given, "an objective, such as PGDAT()")
    subject = Subject(name_of(given))
    text = f"is a {type(given).__name__}, expected a subclass of steelman.objectives.Objective"
    subject.keeps("kind", isinstance(given, Objective), text)
    with one_thread(), global_noise(0):
        names = list(HEADS if heads is None else heads)
        _Check(subject, given, model, shape, classes, helper, names).all()


@dataclasses.dataclass
class _Check(Trial):
    """The promises, one method each."""

    heads: list[str]

    def all(self) -> None:
        self.trace()
        self.norms()
        self.noise()
        self.label()
        self.combinations()
        self.no_radius()
        self.interrupted()
        self.carried()
        self.resumed()
        if not self.objective.single_pass:
            self.perturbed()

    def trace(self) -> None:
        """The loss changes no image, weight, mode or generator. The outcome has the right shapes."""
        net, (x, y) = self.net(), self.batch()
        images, labels, before = x.clone(), y.clone(), Snapshot(net)
        criterion = self.criterion(net)
        self.loss("on a batch", criterion, x, y)
        untold = same_bits(x, images) and torch.equal(y, labels)
        self.subject.keeps("input", untold, "changes the images or labels of its batch")
        before.check(self.subject, WHEN, but=("buffers",))
        self.subject.keeps("carry", not criterion.carry, "changes `carry` before the backward pass; use `after`")
        logits, x_adv = criterion.outcome.logits, criterion.outcome.x_adv
        expected = (SAMPLES, self.classes)
        text = f"gives logits of shape {tuple(logits.shape)} in its outcome, expected {expected}"
        self.subject.keeps("logits", logits.shape == expected, text)
        self.subject.keeps("logits", not logits.requires_grad, "gives logits that require a gradient: detach them")
        if x_adv is not None:
            text = f"gives x_adv of shape {tuple(x_adv.shape)} for images of shape {tuple(x.shape)}"
            self.subject.keeps("ball", x_adv.shape == x.shape, text)
            far = float((x_adv - x).abs().max())
            text = f"gives x_adv outside the threat model: up to {far:.4g} away, with a radius of 0.1"
            self.subject.keeps("ball", criterion.threat.contains(x_adv, x).all(), text)

    def norms(self) -> None:
        """The forwards that move batch norm have the declared kinds and number."""
        declared = self.objective.forwards
        net, (x, y) = self.net(), self.batch()
        if not moves(net):
            return
        criterion = self.criterion(net)
        self.backward("on a batch", criterion, x, y)
        criterion.finish()
        moved = max(moves(net).values())
        text = f"declares {len(declared)} forwards ({', '.join(declared)}), and batch norm moved {moved} times"
        self.subject.keeps("forwards", moved == len(declared), text)
        if len(set(declared)) == 2:
            net = split_norms(self.net())
            self.loss("with auxiliary batch norms", self.criterion(net), x, y)
            for branch in ("clean", "adversarial"):
                seen = max(count for name, count in moves(net).items() if name.endswith(branch))
                wanted = declared.count(branch)
                text = f"declares {wanted} {branch} forwards, and {branch} batch norm moved {seen} times"
                self.subject.keeps("forwards", seen == wanted, text)

    def noise(self) -> None:
        """The seed alone decides the loss. If there is noise, each step has other noise."""
        x, y = self.batch()

        def seen(seed: int, world: int, steps: int = 1) -> list[tuple[Tensor, Tensor]]:
            """The losses and adversarial images of some steps, with the same weights and statistics in each."""
            net = self.net()
            state, criterion, found = copy.deepcopy(net.state_dict()), self.criterion(net, seed=seed), []
            with global_noise(world):
                for _ in range(steps):
                    net.load_state_dict(state)
                    loss = self.loss("on a batch", criterion, x, y)
                    x_adv = criterion.outcome.x_adv
                    found.append((loss.detach(), x if x_adv is None else x_adv.detach()))
            return found

        def differ(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
            return not all(map(same_bits, one, other))

        (one,), (again,) = seen(5, 1), seen(5, 2)
        text = f"gives another loss for the same seed, {gap(one[0], again[0])}: its noise must come from `batch.key`"
        self.subject.keeps("seed", not differ(one, again), text)
        (other,) = seen(6, 1)
        if differ(one, other) and self.objective.repeats == 1:
            first, second = seen(5, 1, steps=2)
            text = "draws the same noise in the next step: loss and images are equal to the bit"
            self.subject.keeps("noise", differ(first, second), text)

    def label(self) -> None:
        """The loss includes the head's margin and the label smoothing."""
        x, y = self.batch()
        losses = []
        for margin, smoothing in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.3)):
            net = self.net()
            head = head_of(net)
            assert head is not None  # embed has put it there
            head.margin = margin
            losses.append(float(self.loss("on a batch", self.criterion(net, label_smoothing=smoothing), x, y).detach()))
        for what, hint, value in (
            ("margin", "the head's margin: its loss is {0:.6g} with margin 0 and 0.5", losses[1]),
            ("smoothing", "the label smoothing: its loss is {0:.6g} with 0 and 0.3", losses[2]),
        ):
            text = f"forgets {hint.format(losses[0])}; use batch.cross_entropy(logits)"
            self.subject.keeps(what, value != losses[0], text)

    def combinations(self) -> None:
        """Every head, another norm, two classes."""
        x, y = self.batch()
        for head in self.heads:
            self.backward(f"with the head {head!r}", self.criterion(self.net(head)), x, y)
        wide = ThreatModel(norm="l2", eps=0.5)
        criterion = self.criterion(self.net(), threat=wide)
        self.backward("in l2", criterion, x, y)
        x_adv = criterion.outcome.x_adv
        inside = x_adv is None or bool(wide.contains(x_adv, x).all())
        self.subject.keeps("ball", inside, "gives x_adv outside the threat model in l2")
        if self.model is None:
            net, (x, y) = self.net(classes=2), self.batch(2)
            helper = Waves(2) if self.helper is None else self.helper
            twin = dataclasses.replace(self, classes=2, helper=helper)
            criterion = twin.criterion(net)
            with contextlib.suppress(UserError):  # an objective may refuse two classes
                self.objective.check(net, x)
                twin.backward("with two classes", criterion, x, y)

    def no_radius(self) -> None:
        """A radius of zero, where a schedule may begin."""
        x, y = self.batch()
        criterion = self.criterion(self.net())
        self.backward("at a radius of zero", criterion, x, y, eps=0.0)
        x_adv = criterion.outcome.x_adv
        if x_adv is not None:
            self.subject.keeps("zero", torch.equal(x_adv, x), f"moves images at a radius of zero, {gap(x, x_adv)}")

    def interrupted(self) -> None:
        """After an exception in its second forward, everything is as before."""
        net, (x, y) = self.net(), self.batch()
        calls = 0

        def stop(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Interrupt

        handle = net.register_forward_pre_hook(stop)
        before = Snapshot(net)
        try:
            self.criterion(net)(x, y)
        except Interrupt:
            before.check(self.subject, "when forward 2 of the model raised an error", but=("buffers",))
        else:
            self.subject.keeps("errors", calls < 2, "hides that forward 2 of the model was interrupted")
        finally:
            handle.remove()

    def trained(self, criterion: Criterion, optimizer: torch.optim.Optimizer, batches: range) -> None:
        """Train on some batches, each as many times in a row as the objective needs."""
        for number in batches:
            x, y = self.batch(name=f"batch {number}")
            for _ in range(self.objective.repeats):
                self.loss("in training", criterion, x, y)
                optimizer.zero_grad()
                torch.autograd.backward(criterion.outcome.loss)
                optimizer.step()

    def carried(self) -> None:
        """The objective carries only tensors from batch to batch, because a checkpoint holds nothing else."""
        net = self.net()
        criterion = self.criterion(net, steps=STEPS * self.objective.repeats)
        self.trained(criterion, sgd(net), range(STOPPED))
        for name, value in criterion.state_dict()["carry"].items():
            text = f"carries {name!r} as {type(value).__name__}; a checkpoint holds only tensors"
            self.subject.keeps("carry", isinstance(value, Tensor), text)
            text = f"carries {name!r} with its graph: detach it"
            self.subject.keeps("carry", not value.requires_grad, text)

    def resumed(self) -> None:
        """A training resumed by new objects ends with the same weights."""
        net = self.net()
        steps = STEPS * self.objective.repeats
        criterion, optimizer = self.criterion(net, steps=steps), sgd(net)
        self.trained(criterion, optimizer, range(STOPPED))
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), criterion.state_dict()))
        self.trained(criterion, optimizer, range(STOPPED, STEPS))
        twin = self.net()
        again, second = self.criterion(twin, steps=steps), sgd(twin)
        twin.load_state_dict(saved[0])
        second.load_state_dict(saved[1])
        again.load_state_dict(saved[2])
        self.trained(again, second, range(STOPPED, STEPS))
        criterion.finish()
        again.finish()
        for name, value in net.state_dict().items():
            other = twin.state_dict()[name]
            text = f"does not resume from a saved state: {name} differs {gap(value, other)}; keep state in batch.carry"
            self.subject.keeps("resume", same_bits(value, other), text)

    def perturbed(self) -> None:
        """Weight perturbation computes the loss twice on the same images, and moves the weights back."""
        x, y = self.batch()
        plain = self.criterion(self.net())
        self.loss("on a batch", plain, x, y)
        net = self.net()
        before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        optimizer = sgd(net, lr=0.0)
        criterion = self.criterion(net, awp=AWP(gamma=0.05), optimizer=optimizer)
        self.backward("with weight perturbation", criterion, x, y)
        one, other = plain.outcome.x_adv, criterion.outcome.x_adv
        if one is not None and other is not None:
            text = f"makes new images although weight perturbation gives it `batch.x_adv`, {gap(one, other)}"
            self.subject.keeps("awp", same_bits(one, other), text)
        optimizer.step()
        for name, weight in net.named_parameters():
            text = f"changes {name} with weight perturbation, {gap(before[name], weight.detach())}"
            self.subject.keeps("awp", torch.allclose(weight.detach(), before[name], rtol=0, atol=1e-6), text)
        moved = max(moves(net).values(), default=0)
        wanted = len(self.objective.forwards) if moves(net) else 0
        text = f"moves batch norm {moved} times with weight perturbation, and declares {wanted} forwards"
        self.subject.keeps("awp", moved == wanted, text)
