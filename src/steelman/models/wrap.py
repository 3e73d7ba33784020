"""Models with another interface: other answers than a tensor, normalised images, or images of one size."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.attacks.base import Mode, untouched
from steelman.errors import UserError, shown

Numbers = float | Sequence[float]
Size = int | tuple[int, int]
Place = str | int | Callable[[object], Tensor]


class Wrapped(nn.Module):
    """logits = place(model((resize(x) - mean) / std)), for images in [0, 1]. `wrap` makes it."""

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        *,
        mean: Numbers | None = None,
        std: Numbers | None = None,
        size: Size | None = None,
        logits: Place | None = None,
        answers: tuple[type, ...] = (),
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise UserError(f"wrap: expected a torch.nn.Module, got {type(model).__name__}")
        if logits is not None and (isinstance(logits, bool) or not (isinstance(logits, str | int) or callable(logits))):
            raise UserError(f"logits: expected a key, an index, an attribute's name or a function, got {shown(logits)}")
        self.model = model
        self.training = model.training  # a new module is in train mode, and a model in eval mode would seem not to be
        self.size = _pair(size)
        self.logits = logits
        # Only answers of these types are read. In another type, the logits could be at another place.
        self.answers = answers
        centre = _values("mean", 0.0 if mean is None else mean)
        scale = _values("std", 1.0 if std is None else std)
        if min(scale) <= 0:
            raise UserError(f"std: expected numbers above 0, got {scale}")
        if len(centre) > 1 and len(scale) > 1 and len(centre) != len(scale):
            raise UserError(f"mean and std: expected as many of each, got {len(centre)} and {len(scale)}")
        normalised = mean is not None or std is not None
        self.channels = max(len(centre), len(scale))
        place = _like(model)
        for name, values in (("mean", centre), ("std", scale)):
            made = torch.tensor(values, device=place.device, dtype=torch.promote_types(place.dtype, torch.float32))
            self.register_buffer(name, made.view(1, -1, 1, 1) if normalised else None)

    def forward(self, x: Tensor) -> Tensor:
        answer = self.model(self.prepared(x))
        if self.answers and not isinstance(answer, self.answers):
            names = " or ".join(kind.__name__ for kind in self.answers)
            raise UserError(
                f"the model answered with {names} at first and with "
                f"{type(answer).__name__} now; expected one kind of answer"
            )
        return _read(answer, self.logits)

    def prepared(self, x: Tensor) -> Tensor:
        """The images for the inner model: resized and normalised."""
        if (self.size is not None or self.mean is not None) and x.ndim != 4:
            raise UserError(f"expected images of shape (N, C, H, W), got {tuple(x.shape)}")
        if self.size is not None and tuple(x.shape[-2:]) != self.size:
            x = F.interpolate(x, size=self.size, mode="bilinear", antialias=True)
        if self.mean is None or self.std is None:
            return x
        if self.channels not in (1, x.shape[1]):
            raise UserError(f"mean and std: expected 1 or {x.shape[1]} values, one per channel, got {self.channels}")
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={value}"
            for name, value in (
                ("mean", None if self.mean is None else self.mean.flatten().tolist()),
                ("std", None if self.std is None else self.std.flatten().tolist()),
                ("size", self.size),
                ("logits", self.logits),
            )
            if value is not None
        )

    if TYPE_CHECKING:  # PyTorch types the call of a module as Any

        def __call__(self, x: Tensor) -> Tensor: ...


def wrap(
    model: nn.Module,
    *,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    size: Size | None = None,
    logits: Place | None = None,
) -> Wrapped:
    """Turn any model into one that takes images in [0, 1] and gives logits.

    logits = place(model((resize(x) - mean) / std))

    Arguments:
        model: the model to wrap. It stays inside as ``.model``, with its own weights.
        mean, std: one number, or one for each channel.
        size: the height and width that the model needs. Other images are resized, bilinear with antialias, and
            gradients pass through.
        logits: where the logits are in the model's answer: a key, an index, an attribute's name, or a function of the
            answer. By default they are the answer itself, its ``.logits``, its key "logits", or the first 2-D tensor of
            a tuple or list.

    With a function as `logits`, an attack on a CPU uses one thread. More threads would need copies of the function.

    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.last = nn.Linear(16, 3)
    ...     def forward(self, x):
    ...         return {"scores": self.last(x.flatten(1))}
    >>> wrap(Net(), mean=0.5, std=0.25, size=4, logits="scores")(torch.rand(2, 1, 8, 8)).shape
    torch.Size([2, 3])
    """
    return Wrapped(model, mean=mean, std=std, size=size, logits=logits)


class Detected(NamedTuple):
    """A model that gives logits, and a sentence on what was changed: "" if nothing was."""

    model: nn.Module
    sentence: str


def detected(model: nn.Module, x: Tensor) -> Detected:
    """The model, wrapped if its answer to images such as `x` is no tensor, or if it needs images of another size.

    The model gets the first two images in eval mode and in train mode. It is not changed. A model that gives a tensor
    in both modes is returned unwrapped. So is a model that cannot take such images: the checks of an evaluation explain
    that error better. The required size is that of ``config.image_size``, which Hugging Face's models have.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> detected(net, torch.rand(2, 1, 2, 2)).model is net
    True
    """
    if not isinstance(model, nn.Module) or not isinstance(x, Tensor) or x.ndim != 4 or len(x) == 0:
        return Detected(model, "")
    inner = getattr(model, "_orig_mod", model)  # a compiled model would be compiled again for a batch of two images
    place, size = _like(inner), None
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(place.device.type, enabled=False):
        images = x[:2].clone().to(place.device, place.dtype)
        answer = _asked(inner, images, "eval")
        needed = _image_size(inner)
        if answer is None and needed is not None and needed != tuple(x.shape[-2:]):
            images = Wrapped(inner, size=needed).prepared(images)
            answer, size = _asked(inner, images, "eval"), needed
        if answer is None:
            return Detected(model, "")
        trained = _asked(inner, images, "train")
    said = []
    if not isinstance(answer, Tensor):
        said.append(f"the model answers with {type(answer).__name__}: its {_found(answer)[0]} used")
    elif trained is not None and not isinstance(trained, Tensor):
        with contextlib.suppress(UserError):  # an evaluation needs no answer in train mode
            where = _found(trained)[0]
            said.append(f"in train mode the model answers with {type(trained).__name__}: its {where} used")
    if size is not None:
        said.append(f"it needs images of {size[0]}x{size[1]}: those of {x.shape[-2]}x{x.shape[-1]} are resized")
    if not said:
        return Detected(model, "")
    if hasattr(inner, "config"):  # a Hugging Face model: its processor normalises images, the model itself does not
        said.append("pixels reach it as they are: steelman.wrap takes mean and std")
    kinds = tuple(dict.fromkeys(type(one) for one in (answer, trained) if one is not None))
    return Detected(Wrapped(model, size=size, answers=kinds), "; ".join(said))


def _asked(model: nn.Module, images: Tensor, mode: Mode) -> object | None:
    """The model's answer, or None if the model raises an error."""
    try:
        with untouched(model, mode):
            answer: object = model(images.clone())
    except Exception:  # a user's model may raise any error; the checks of an evaluation show it
        return None
    return answer


def _image_size(model: nn.Module) -> tuple[int, int] | None:
    """The size of images in the configuration of a Hugging Face model, or of one inside another model."""
    for module in model.modules():
        size = getattr(getattr(module, "config", None), "image_size", None)
        try:
            found = None if size is None else _pair(size)
        except UserError:
            continue
        if found is not None:
            return found
    return None


def _found(answer: object) -> tuple[str, Tensor]:
    """The place of the logits in an answer, in words that end with "are" or "is", and the logits."""
    if isinstance(answer, Tensor):
        return "values are", _logits(answer, "the model's answer")
    if isinstance(getattr(answer, "logits", None), Tensor):
        return ".logits are", _logits(answer.logits, ".logits")  # type: ignore[attr-defined]
    if isinstance(answer, Mapping) and "logits" in answer:
        return "['logits'] are", _logits(answer["logits"], "['logits']")
    if isinstance(answer, tuple | list):
        for index, part in enumerate(answer):
            if isinstance(part, Tensor) and part.ndim == 2:
                return f"[{index}], of {part.shape[1]} classes, is", part
    raise UserError(
        f"the model answers with {type(answer).__name__}, and no logits are found in it; name their place with "
        f"wrap(model, logits=...); {_choices(answer)}"
    )


def _read(answer: object, place: Place | None) -> Tensor:
    """The logits at `place` in the model's answer."""
    if place is None:
        return _found(answer)[1]
    if not isinstance(place, str | int):
        return _logits(place(answer), "what the function logits gives")
    missing = UserError(f"logits: the model's {type(answer).__name__} has no {place!r}; {_choices(answer)}")
    if isinstance(answer, Tensor):  # an index would pick one image's logits
        raise missing
    if isinstance(place, str) and not (isinstance(answer, Mapping) and place in answer):
        if not hasattr(answer, place):
            raise missing
        return _logits(getattr(answer, place), f".{place}")
    try:
        found = answer[place]  # type: ignore[index]
    except (LookupError, TypeError):
        raise missing from None
    return _logits(found, f"[{place!r}]")


def _logits(value: object, where: str) -> Tensor:
    if isinstance(value, Tensor) and value.ndim == 2:
        return value
    got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    raise UserError(f"logits: expected a tensor of shape (N, classes) in {where}, got {got}")


def _choices(answer: object) -> str:
    """The places in an answer that hold a tensor of two dimensions, as text for an error."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(answer, Mapping):
        parts = answer.items()
    elif isinstance(answer, tuple | list):
        parts = enumerate(answer)
    elif not isinstance(answer, Tensor):
        parts = getattr(answer, "__dict__", {}).items()
    found = [repr(name) for name, part in parts if isinstance(part, Tensor) and part.ndim == 2]
    return f"choices: {', '.join(found) or 'none, because it holds no tensor of shape (N, classes)'}"


def _like(model: nn.Module) -> Tensor:
    """A tensor with the device and the type that the model's images need."""
    return next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(0))


def _pair(size: object) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(pair) != 2 or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in pair):
        raise UserError(f"size: expected a whole number of at least 1, or two of them (H, W), got {shown(size)}")
    return pair[0], pair[1]


def _values(name: str, given: Any) -> list[float]:
    plain = given.tolist() if hasattr(given, "tolist") else given  # tensors and arrays
    values = list(plain) if isinstance(plain, tuple | list) else [plain]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(f"{name}: expected a number, or one for each channel, got {shown(given)}")
    if not values:
        raise UserError(f"{name}: expected a number, or one for each channel, got none")
    return [float(value) for value in values]
