"""What all checks share: their error, snapshots of a model and of the global generators, and small models."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steelman.errors import UserError, shown
from steelman.rng import Key

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class ContractBrokenError(AssertionError):
    """A broken promise. The message describes it with numbers, and `promise` is one word for it."""

    def __init__(self, promise: str, text: str) -> None:
        self.promise = promise
        super().__init__(text)


class Interrupt(KeyboardInterrupt):
    """An error that a model raises to test its caller. It is no `Exception`: `except Exception` does not catch it."""


class Subject:
    """The name of the checked attack, objective or head. All messages begin with it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def keeps(self, promise: str, kept: object, text: str | Callable[[], str]) -> None:
        """Raise unless `kept`. `text` is a sentence without its subject."""
        if not kept:
            raise ContractBrokenError(promise, f"{self.name} {text if isinstance(text, str) else text()}")

    @contextlib.contextmanager
    def runs(self, what: str) -> Iterator[None]:
        """Inside, any error is a broken promise. `what` describes what must work."""
        try:
            yield
        except ContractBrokenError:
            raise
        except Exception as error:
            text = f"{self.name} fails {what}: {type(error).__name__}: {error}"
            raise ContractBrokenError("runs", text) from error


def made(ingredient: Any) -> Any:
    """The ingredient itself or, if it can be called without arguments, what the call gives."""
    try:
        inspect.signature(ingredient).bind()
    except (TypeError, ValueError):
        return ingredient
    return ingredient()


def check_ingredient(name: str, value: object, expected: str) -> None:
    """Refuse what is no ingredient at all, such as the name of one."""
    if not callable(value):
        raise UserError(f"{name}: expected {expected}, got {shown(value)}")


def name_of(ingredient: Any) -> str:
    """The name of an ingredient's class or function."""
    if isinstance(ingredient, partial):
        return name_of(ingredient.func)
    return str(getattr(ingredient, "__name__", type(ingredient).__name__))


@contextlib.contextmanager
def global_noise(seed: int) -> Iterator[None]:
    """Inside, the generators of torch, Python and NumPy start at `seed`. Afterwards they are as before."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch uses one thread. With more threads, an attack may run on copies of its model, one for each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Snapshot:
    """The current state of a model and of the global generators."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.before = model, _state(model)

    def check(self, subject: Subject, when: str, *, but: tuple[str, ...] = ()) -> None:
        """Raise if something has changed. `when` ends the sentence. `but` names what may change."""
        after = _state(self.model)
        for what, (promise, text) in CHANGES.items():
            old, new = self.before[what], after[what]
            if what in but or _alike(old, new):
                continue
            differing = [name for name in old if name not in new or not _alike(old[name], new[name])]
            named = f" (such as {differing[0]!r})" if differing and differing[0] else ""
            count = f"{len(differing)} of {len(old)} " if what != "generators" else ""
            subject.keeps(promise, False, f"{text.format(count=count)}{named} {when}")


# For each part of a snapshot: the promise about the part, and the words of the error if the part has changed.
CHANGES = {
    "modes": ("modes", "leaves {count}modules in another mode"),
    "requires_grad": ("requires_grad", "leaves {count}weights with another requires_grad"),
    "weights": ("weights", "changes {count}weights of the model"),
    "buffers": ("buffers", "changes {count}buffers of the model"),
    "gradients": ("gradients", "leaves other gradients on {count}weights"),
    "hooks": ("hooks", "leaves hooks on {count}modules"),
    "generators": ("generator", "moves a global random generator"),
}


def _state(model: nn.Module) -> dict[str, dict[str, Any]]:
    modules, weights = dict(model.named_modules()), dict(model.named_parameters())
    numpy_state: Any = np.random.get_state()
    return {
        "modes": {name: module.training for name, module in modules.items()},
        "requires_grad": {name: weight.requires_grad for name, weight in weights.items()},
        "weights": {name: (weight.data_ptr(), weight.detach().clone()) for name, weight in weights.items()},
        "buffers": {name: (buffer.data_ptr(), buffer.clone()) for name, buffer in model.named_buffers()},
        "gradients": {name: None if w.grad is None else w.grad.clone() for name, w in weights.items()},
        "hooks": {name: sum(len(getattr(module, kind)) for kind in HOOKS) for name, module in modules.items()},
        "generators": {
            "torch": torch.get_rng_state(),
            "random": random.getstate(),
            "numpy.random": (numpy_state[1].tolist(), numpy_state[2]),
        },
    }


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and bool(one == other)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit. Equal NaNs count as equal."""
    same_kind = one.shape == other.shape and one.dtype == other.dtype
    return same_kind and one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


def gap(one: Tensor, other: Tensor) -> str:
    """The largest difference of two tensors, for a message."""
    if one.shape != other.shape:
        return f"shape {tuple(other.shape)} instead of {tuple(one.shape)}"
    return f"by up to {float((one.detach().double() - other.detach().double()).abs().max()):.3g}"


def noise(name: str, *shape: int, normal: bool = False) -> Tensor:
    """Fixed random numbers in float64, the same everywhere."""
    key, index = Key(0).fold("testing", name), torch.arange(shape[0])
    draw = key.normal if normal else key.uniform
    return draw(index, tuple(shape[1:]), torch.float64)


class Curved(nn.Module):
    """b tanh(a x), without a matrix product: the rounding of a matrix product depends on the size of the batch."""

    def __init__(self, classes: int, pixels: int) -> None:
        super().__init__()
        self.a = nn.Parameter(2 * noise("a", 10, pixels, normal=True))
        self.b = nn.Parameter(noise("b", classes, 10, normal=True))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh((x.flatten(1)[:, None, :] * self.a.to(x)).sum(dim=-1))
        return (h[:, None, :] * self.b.to(x)).sum(dim=-1)


class Straight(nn.Module):
    """A linear model of two classes. Its `images` have class 0, and each lies at `distance` from the boundary.

    z_1 - z_0 = w . (x - 1/2) - distance, where w has length 1 in the dual norm. Pixels are near the middle of [0, 1],
    so the range of pixels limits no attack.
    """

    def __init__(self, shape: tuple[int, ...], distance: float, dual: float, count: int = 4) -> None:
        super().__init__()
        x = 0.45 + 0.1 * noise("straight", count, *shape).flatten(1)
        w, own = noise("w", 2, x.shape[1], normal=True)
        w = w / torch.linalg.vector_norm(w, ord=dual)
        # This move along w gives each image the same distance from the boundary.
        x = x - ((x - 0.5) @ w / w.square().sum())[:, None] * w
        self.weight = nn.Parameter(torch.stack((own, own + w)))
        self.images, self.behind = x.reshape(count, *shape), distance

    def forward(self, x: Tensor) -> Tensor:
        z = ((x.flatten(1) - 0.5)[:, None, :] * self.weight.to(x)).sum(dim=-1)
        # Some attacks divide by the length of the logits, so the logits must be far from zero.
        return z + torch.tensor([3 + self.behind, 3.0]).to(x)


def trapped(classes: int, shape: tuple[int, ...]) -> nn.Sequential:
    """A network with all states that an attack could change.

    It has batch norm, dropout, mixed modes, a frozen layer, and gradients on its weights.
    """
    with global_noise(0):
        net = nn.Sequential(
            nn.Conv2d(shape[0], 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Conv2d(4, 2, 1),
            nn.BatchNorm2d(2),
            nn.Flatten(),
            nn.Linear(2 * shape[1] * shape[2], classes),
        )
        torch.autograd.backward(net(torch.rand(4, *shape)).sum())
    net[1].eval()
    for parameter in net[4].parameters():
        parameter.requires_grad_(False)
    return net
