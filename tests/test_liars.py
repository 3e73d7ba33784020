"""Models that look robust and are not: none gets a verdict that is both high and `sound`. And honest ones, which do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.attacks.shaped import Shaped
from steelman.evaluation.checks import ContractError
from steelman.evaluation.result import Evaluation
from steelman.evaluation.signs import SHAPED
from steelman.evaluation.stages import Suite
from steelman.evaluation.suites import suite_named
from steelman.heads import build_head
from steelman.threat import ThreatModel
from tests.evidence_helpers import evaluate
from tests.oracles import LinearClassifier, LinearProblem

Net = Callable[[Tensor], Tensor]
SHAPE = (1, 4, 4)
THREAT = ThreatModel(eps=0.2)
BETWEEN = ThreatModel(eps=0.19)  # no whole number of grey levels, so one step of its size leaves them
N, MORE = 24, 60  # samples; a liar that looks at its points gets more, so that the pilot sees a part of them
ALLOWED = 0.08  # what a verdict may lie above the truth and still be called right


class Base(nn.Module):
    """A small random network with batch norm, whose answers are its labels. It is not robust."""

    def __init__(self, classes: int = 4, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, classes)
            )
            with torch.no_grad():
                for parameter in self.layers[0].parameters():
                    parameter.mul_(2)
                self.layers.train()
                for _ in range(50):
                    self.layers(torch.rand(200, 16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.flatten(1))
        return out


class Liar(nn.Module):
    """`after` of the base's logits for `before` of the images."""

    def __init__(self, before: Callable[..., Tensor] | None = None, after: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.base = Base()
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x if self.before is None else self.before(x))
        return logits if self.after is None else self.after(logits)


class Backward(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradients[0], None


def straight_through(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + (function(x) - x).detach()


def grid(levels: int) -> Callable[[Tensor], Tensor]:
    return lambda x: (x * levels).round() / levels


def sawtooth(x: Tensor) -> Tensor:
    """Up to 0.02 from x, with a slope of the other sign nearly everywhere."""
    return x - 3 * (x - (x / 0.03).floor() * 0.03 - 0.015)


class Headed(nn.Module):
    """The base's features under a hypersphere head whose scale is `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.body = Base()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.head = build_head("he", 16, 4, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body.layers[:5](x.flatten(1)))
        return out


class Around(nn.Module):
    """Knows the data, and treats points near them in a way of its own."""

    def __init__(self, function: Callable[[Net, Tensor, Tensor], Tensor], *, levels: bool = False) -> None:
        super().__init__()
        self.base, self.function = Base(), function
        self.known = images(levels=levels)

    def forward(self, x: Tensor) -> Tensor:
        off = x[:, None] - self.known
        nearest = off.flatten(2).abs().amax(dim=2).argmin(dim=1)
        return self.function(self.base, x, self.known[nearest])


def images(n: int = 300, *, levels: bool = False) -> Tensor:
    """Random images, of whole grey levels if asked for."""
    x = torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(1))
    return (255 * x).round() / 255 if levels else x


def far(x: Tensor, near: Tensor) -> Tensor:
    return (x - near).flatten(1).abs().amax(dim=1, keepdim=True)


def reversed_near(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """Half way to eps, logits are those of the point on the other side of the image: whoever climbs goes wrong."""
    return base(torch.where((far(x, near) < 0.1)[..., None, None], near - 0.5 * (x - near), x))


def flat_near(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """A plateau around the data."""
    return base(torch.where((far(x, near) < 0.1)[..., None, None], near, x))


def nan_ring(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """No answer for what has moved."""
    return torch.where(far(x, near) > 0.05, math.nan, base(x))


def offset_ring(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """A large number is added to all logits of what has moved, and they drown in its roundings."""
    return base(x) + 1e7 * (far(x, near) > 0.01)


def confident_near(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """The clean answer's logits with a bonus of no slope, up to where it is overtaken at once."""
    clean = base(near).detach()
    return torch.where(far(x, near) < 0.12, clean + 0.01 * base(x), base(x))


def hole(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """Robust, but for a corner of the ball where most pixels have gone towards the middle."""
    clean = 10 * base(near).detach()
    into = ((x - near) * torch.where(near < 0.5, 1.0, -1.0)).flatten(1).mean(dim=1, keepdim=True) / 0.2
    other = torch.nn.functional.one_hot(clean.argmin(dim=1), 4)
    return clean + base(x) * 0.1 + 500 * other * (into - 0.5).clamp_min(0)


def nan_if_moved(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """No answer where the answer would be another than the image's."""
    logits = base(x)
    return torch.where((logits.argmax(dim=1) != base(near).argmax(dim=1))[:, None], math.nan, logits)


def noise_if_close(logits: Tensor) -> Tensor:
    """Noise where two classes are close, which clean images are not."""
    top = logits.topk(2, dim=1).values
    return torch.where((top[:, :1] - top[:, 1:]) < 0.004, logits + 0.01 * torch.randn_like(logits), logits)


def decoy(logits: Tensor) -> Tensor:
    """One for the answer, and beside it a slope that leads away from every boundary."""
    return torch.nn.functional.one_hot(logits.argmax(dim=1), 4) - 0.1 * torch.tanh(logits)


def other_decoy(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """One for the answer, and beside it the slope of another network."""
    with torch.no_grad():
        answer = torch.nn.functional.one_hot(base(x).argmax(dim=1), 4)
    return answer + 0.2 * torch.tanh(OTHER(x))


def scrambled(x: Tensor) -> Tensor:
    """The identity, with a gradient whose signs are as good as random."""
    signs = (1e5 * x.detach()).sin().sign()
    return x.detach() + signs * (x - x.detach())


def hashed(base: Net, x: Tensor, near: Tensor) -> Tensor:
    waves = torch.sin(1e4 * (x.flatten(1) @ torch.linspace(-1, 1, 64).view(16, 4)))
    return base(x) + 0.02 * waves


OTHER: Net = Base(seed=5).eval()


def guarded(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """The image's own answer, with a little of the true slope, for all that is near it. Far away, the true answer."""
    clean = base(near).detach()
    return torch.where(far(x, near) < 0.3, clean + 0.01 * (base(x) - clean), base(x))


def guarded_where(odd: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Net, Tensor, Tensor], Tensor]:
    """True answers, but guarded ones where the move from the image looks like that of an attack."""
    return lambda base, x, near: torch.where(odd(x, near)[:, None], guarded(base, x, near), base(x))


def between_levels(x: Tensor) -> Tensor:
    """Which pixels are no whole grey levels."""
    return ((255 * x).round() / 255 - x).flatten(1).abs() > 1e-6


def moved(x: Tensor, near: Tensor) -> Tensor:
    return (x - near).flatten(1).abs()


def rough(x: Tensor, near: Tensor) -> Tensor:
    """How much neighbours differ in what was added, as a share of its size."""
    delta = x - near
    ups, acrosses = delta.diff(dim=2).abs().mean(dim=(1, 2, 3)), delta.diff(dim=3).abs().mean(dim=(1, 2, 3))
    return (ups + acrosses) / delta.abs().mean(dim=(1, 2, 3)).clamp_min(1e-9)


class Remembering(nn.Module):
    """Knows the data, and keeps something from question to question."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base, self.known, self.kind = Base(), images(levels=True), kind
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.cache: dict[bytes, Tensor] = {}
        self.locked, self.asked = False, 0

    def forward(self, x: Tensor) -> Tensor:
        near = self.known[(x[:, None] - self.known).flatten(2).abs().amax(dim=2).argmin(dim=1)]
        if self.kind == "near repeats":
            return torch.stack([self.one(image) for image in x])
        if self.kind == "rounded repeats":
            return torch.stack([self.rounded(image) for image in x])
        guard = self.locked if self.kind == "locked" else self.asked > 150
        self.locked = self.locked or bool((far(x, near) > 1e-6).any())
        self.asked += len(x)
        return guarded(self.base, x, near) if guard else self.base(x)

    def one(self, image: Tensor) -> Tensor:
        fresh: Tensor = self.base(image[None])[0]
        for before, answer in self.seen:
            if float((before - image).abs().max()) < 0.25:
                return answer + 0.01 * (fresh - fresh.detach())
        self.seen.append((image.detach(), fresh.detach()))
        return fresh

    def rounded(self, image: Tensor) -> Tensor:
        fresh: Tensor = self.base(image[None])[0]
        answer = self.cache.setdefault((image.detach().mean() * 4).round().numpy().tobytes(), fresh.detach())
        return answer + 0.01 * (fresh - fresh.detach())


def in_company(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """Among moved images, the first one's answer is added to the others'."""
    away = far(x, near) > 1e-6
    return base(x) + 2.0 * away * base(near).detach()[:1]


def watched(base: Net, x: Tensor, near: Tensor) -> Tensor:
    """A guarded answer to moved images while a gradient is asked for."""
    return torch.where(far(x, near) > 1e-6, guarded(base, x, near), base(x)) if torch.is_grad_enabled() else base(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """A liar; a twin without its tricks, for finding the truth; and the only words that may excuse a wrong verdict:
    reasons to refuse it, or flags. Without any, the verdict must be right."""

    make: Callable[[], nn.Module]
    excuses: tuple[str, ...] = ()
    twin: Callable[[], nn.Module] = Base
    levels: bool = False  # its images are of whole grey levels


def noise(size: float) -> Callable[[Tensor], Tensor]:
    return lambda z: z + size * torch.randn_like(z)


def absent(logit: float, count: int = 1) -> Callable[[Tensor], Tensor]:
    """Classes that are not there, as models hide them: roundings measured by such a logit drown every success."""
    return lambda z: torch.cat((z, torch.full_like(z[:, :1], logit).expand(-1, count)), dim=1)


def scaled(factor: float, offset: float = 0.0) -> Case:
    return Case(lambda: Liar(after=lambda z: factor * z + offset))


def quantised(x: Tensor) -> Tensor:
    return (x - 0.5).sign() * 0.5 + 0.5


def smooth() -> nn.Module:
    return Liar(before=lambda x: torch.sigmoid(20 * (x - 0.5)))


def hard(logits: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(logits.argmax(dim=1), 4) + 0 * logits


def around(function: Callable[[Net, Tensor, Tensor], Tensor], *excuses: str, itself: bool = False) -> Case:
    return Case(lambda: Around(function), excuses, (lambda: Around(function)) if itself else Base)


def gradient_times(factor: float, *excuses: str) -> Case:
    def before(x: Tensor) -> Tensor:
        out: Tensor = Backward.apply(x, factor)  # type: ignore[no-untyped-call]
        return out

    return Case(lambda: Liar(before=before), excuses)


def he(scale: float) -> Case:
    return Case(lambda: Headed(scale), (), lambda: Headed(1))


def unrecorded() -> nn.Module:
    model = Liar()
    model.base.layers[1] = nn.BatchNorm1d(32, track_running_stats=False)
    return model


FLAT, MISLED, ROUGH = "zero gradients", "black box stronger", "starts disagree"
GRID, FEW, SMALL, PATCHES = SHAPED.values()
COMPANY, WATCHED, MEMORY = "company answers", "gradient answers", "remembered answers"


def guarded_case(odd: Callable[[Tensor, Tensor], Tensor], *excuses: str) -> Case:
    return Case(lambda: Around(guarded_where(odd), levels=True), excuses, levels=True)


def remembering(kind: str) -> Case:
    return Case(lambda: Remembering(kind), (MEMORY, "batch"), levels=True)


LIARS: dict[str, Case] = {
    "x 1000": scaled(1e3),
    "x 1e6": scaled(1e6),
    "x 1e30": scaled(1e30),
    "x 1e-3": scaled(1e-3),
    "x 1e-6": scaled(1e-6),
    "x 1e-30": scaled(1e-30),
    "offset 100": scaled(1, 100),
    "offset 1e4": scaled(1, 1e4),
    "a small part of 1e4": Case(lambda: Liar(after=lambda z: 0.05 * z + 1e4), ("coarse",)),
    "HE of scale 0.01": he(0.01),
    "HE of scale 15": he(15),
    "HE of scale 1000": he(1000),
    "softmax": Case(lambda: Liar(after=lambda z: z.softmax(dim=1))),
    "softmax, half saturated": Case(lambda: Liar(after=lambda z: (100 * z).softmax(dim=1)), (FLAT,)),
    "softmax, saturated": Case(lambda: Liar(after=lambda z: (1000 * z).softmax(dim=1)), (FLAT,)),
    "hard labels": Case(lambda: Liar(after=hard), (FLAT,)),
    "sign-quantised": Case(lambda: Liar(before=quantised), (FLAT,), smooth),
    "sign-quantised, straight-through": Case(lambda: Liar(before=straight_through(quantised)), (), smooth),
    "grid": Case(lambda: Liar(before=grid(8)), (FLAT,)),
    "grid, straight-through": Case(lambda: Liar(before=straight_through(grid(8)))),
    "sawtooth": Case(lambda: Liar(before=sawtooth), (MISLED, "loss does not rise")),
    "sawtooth, straight-through": Case(lambda: Liar(before=straight_through(sawtooth))),
    "scrambled gradient": Case(lambda: Liar(before=scrambled), (MISLED,)),
    "hashed logits": around(hashed, MISLED, ROUGH),
    "no gradient": Case(lambda: Liar(before=lambda x: x.detach()), ("gradient",)),
    "no gradient of logits": Case(lambda: Liar(after=lambda z: z.detach()), ("gradient",)),
    "gradient reversed": gradient_times(-1.0, MISLED, "loss does not rise"),
    "gradient zeroed": gradient_times(0.0, FLAT),
    "gradient tiny": gradient_times(1e-25, FLAT),
    "reversed near the data": around(reversed_near),
    "flat near the data": around(flat_near, FLAT),
    "confident near the data": around(confident_near),
    "a narrow hole": around(hole, MISLED, itself=True),
    "a slope that leads away": Case(lambda: Liar(after=decoy), ("accuracy levels off", MISLED)),
    "a slope of another": around(other_decoy, "accuracy levels off", MISLED, ROUGH),
    "noise in the logits": Case(lambda: Liar(after=noise(0.3)), ("random",)),
    "noise in the images": Case(lambda: Liar(before=noise(0.1)), ("random",)),
    "noise near a boundary": Case(lambda: Liar(after=noise_if_close), ("random answers", "random")),
    "batch norm without statistics": Case(unrecorded, ("batch",)),
    "the batch's mean": Case(lambda: Liar(after=lambda z: z - 0.5 * z.mean(dim=0)), ("batch",)),
    "large batches": Case(lambda: Liar(after=lambda z: z.roll(int(len(z) > 16), 1)), ("batch",)),
    "another answer for attackers": Case(
        lambda: Liar(after=lambda z: z.roll(1, 1) if torch.is_grad_enabled() else z), ("gradient mode",)
    ),
    "NaN for what has moved": around(nan_ring, "logits"),
    "NaN where it would be wrong": around(nan_if_moved, "undefined answers"),
    "NaN for some images": around(lambda base, x, near: torch.where(x[:, 0, :1, 0] > 0.8, math.nan, base(x)), "logits"),
    "lost in roundings once moved": around(offset_ring, "coarse answers"),
    "an absent class at -1e4": Case(lambda: Liar(after=absent(-1e4))),
    "an absent class at -1e6": Case(lambda: Liar(after=absent(-1e6))),
    "absent classes at -1e9": Case(lambda: Liar(after=absent(-1e9, 7))),
    "an absent class, and an offset": Case(
        lambda: Liar(after=lambda z: absent(-1e6)(z + 2e3)), ("wrong by a rounding", "coarse answers")
    ),
    # Those that answer attackers otherwise: by what their points look like, or by what they asked before.
    "guarded between grey levels": guarded_case(lambda x, near: between_levels(x).any(dim=1), GRID),
    "guarded if most pixels are between grey levels": guarded_case(
        lambda x, near: between_levels(x).double().mean(dim=1) > 0.6, GRID
    ),
    "guarded if one corner is between grey levels": guarded_case(lambda x, near: between_levels(x)[:, 0], GRID),
    "guarded if many pixels have moved": guarded_case(
        lambda x, near: (moved(x, near) > 1e-6).double().mean(dim=1) > 0.22, FEW
    ),
    "guarded if pixels have moved far together": guarded_case(
        lambda x, near: moved(x, near).mean(dim=1) > 0.45 * BETWEEN.eps, FEW, SMALL
    ),
    "guarded if a pixel has moved far": guarded_case(
        lambda x, near: moved(x, near).amax(dim=1) > 0.35 * BETWEEN.eps, SMALL
    ),
    "guarded if neighbours differ": guarded_case(lambda x, near: rough(x, near) > 1.1, PATCHES, GRID, FEW, SMALL),
    "answers near repeats as before": remembering("near repeats"),
    "answers rounded repeats as before": remembering("rounded repeats"),
    "locked by the first odd image": remembering("locked"),
    "guarded after many questions": remembering("tired"),
    "depends on company once moved": around(in_company, COMPANY),
    "guarded while a gradient is asked for": around(watched, WATCHED),
    "an absent class and the batch's mean": Case(
        lambda: Liar(after=lambda z: absent(-1e6)(z - 0.5 * z.mean(dim=0))), ("batch",)
    ),
}


def problem(case: Case, threat: ThreatModel = THREAT) -> tuple[nn.Module, Tensor, Tensor]:
    """The liar, images, and its own answers as labels. A witness breaks each of them, so that in truth the robust
    accuracy is 0."""
    model, twin, x = case.make().eval(), case.twin().eval(), images(levels=case.levels)
    middle = x + threat.eps * torch.where(x < 0.5, 1.0, -1.0)
    with torch.no_grad():
        y, plain = case.make().eval()(x).nan_to_num().argmax(dim=1), twin(x).argmax(dim=1)
        points = [middle]
        for part in (0.7, 0.85, 1.0):
            attack = PGD(steps=40, restarts=2, loss="margin")
            points.append(attack(twin, x, plain, threat.at(part * threat.eps)))
        for shape in SHAPED if case.levels else ():
            points.append(Shaped(shape=shape, steps=60)(twin, x, plain, threat))
        wrong = [(asked_anew(case, one).argmax(dim=1) != y) & threat.contains(one, x) for one in points]
        # Who gives no answer, or one of the batch, is not to be had otherwise.
        broken = torch.stack(wrong).any(dim=0) if not case.excuses else torch.ones(len(x), dtype=torch.bool)
        if case.levels or (case.excuses and not {"batch", "logits", "random"} & set(case.excuses)):
            broken = torch.stack(wrong).any(dim=0) | ~model(points[-1]).isfinite().all(dim=1)
    rows = broken.nonzero()[: MORE if case.levels else N, 0]
    assert len(rows) == (MORE if case.levels else N)
    return case.make().eval(), x[rows], y[rows]


def asked_anew(case: Case, x: Tensor) -> Tensor:
    """The answers of a model that was asked nothing before, to a few images at a time."""
    return torch.cat([case.make().eval()(part) for part in torch.split(x, 50)])


def small(name: str, threat: ThreatModel) -> Suite:
    """A suite with the same stages and fewer steps."""

    def less(attack: Any) -> Any:
        most = {"queries": 300, "steps": 20}
        return dataclasses.replace(
            attack, **{k: min(getattr(attack, k), v) for k, v in most.items() if hasattr(attack, k)}
        )

    suite = suite_named(name, threat)
    return dataclasses.replace(suite, stages=tuple(dataclasses.replace(s, attack=less(s.attack)) for s in suite.stages))


def unescalated(name: str, threat: ThreatModel) -> Suite:
    """The small suite without the escalation, which costs the most and takes no flag away."""
    suite = small(name, threat)
    return dataclasses.replace(suite, stages=tuple(stage for stage in suite.stages if stage.role != "escalation"))


def raised(found: Evaluation) -> set[str]:
    assert found.verdict is not None
    return {one.name for one in found.verdict.flags if one.raised}


# What `standard` adds to `fast` are more stages of the same kinds; one liar of each kind is enough for it.
KINDS: tuple[str, ...] = (
    "x 1000",
    "x 1e-6",
    "offset 1e4",
    "an absent class at -1e6",
    "HE of scale 15",
    "softmax, saturated",
    "sawtooth",
    "gradient reversed",
)
KINDS += (
    "a narrow hole",
    "a slope of another",
    "NaN where it would be wrong",
    "noise in the logits",
    "the batch's mean",
)


@pytest.mark.parametrize(("name", "suite"), [*((n, "fast") for n in LIARS), *((n, "standard") for n in KINDS)])
def test_no_liar_is_called_robust_and_sound(name: str, suite: str) -> None:
    case = LIARS[name]
    threat = BETWEEN if case.levels else THREAT
    model, x, y = problem(case, threat)
    try:
        found = evaluate(model, x, y, threat, unescalated(suite, threat) if case.levels else small(suite, threat))
    except ContractError as error:
        if error.reason not in case.excuses:
            pytest.fail(f"refused for {error.reason}: {error}")
        return
    verdict = found.verdict
    assert verdict is not None
    if verdict.trust == "sound":
        assert verdict.robust_accuracy <= ALLOWED, f"robust and sound: {verdict}"
    else:
        assert raised(found) & set(case.excuses), f"accused of {raised(found)}"
        assert verdict.reasons
    if not case.excuses:
        assert verdict.trust == "sound"
        assert verdict.robust_accuracy <= ALLOWED


@pytest.mark.parametrize(("norm", "eps"), [("l2", 0.6), ("l1", 1.2)])
@pytest.mark.parametrize("name", ["x 1e-6", "gradient reversed", "gradient zeroed", "scrambled gradient", "sawtooth"])
def test_nor_in_other_norms(name: str, norm: str, eps: float) -> None:
    threat = ThreatModel(norm=norm, eps=eps)  # type: ignore[arg-type]
    found = evaluate(*problem(LIARS[name], threat), threat, small("fast", threat))
    assert found.verdict is not None
    assert found.verdict.trust == "suspect" or found.verdict.robust_accuracy <= ALLOWED


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_an_honest_linear_model_is_sound_and_exact(classes: int, norm: str) -> None:
    """Closed form: min over k of (z_y - z_k) / ||w_k - w_y||_q, with the box out of reach."""
    g = torch.Generator().manual_seed(classes)
    weight = torch.randn(classes, 16, generator=g)
    x = 0.5 + 0.08 * torch.randn(60, *SHAPE, generator=g).clamp(-2, 2)
    model = LinearClassifier(weight, -0.5 * weight.sum(dim=1)).eval()
    y = model(x).argmax(dim=1)
    distance = LinearProblem(model, x, y).distances(norm)
    order = np.sort(distance)
    at = 25 + int(np.diff(order[25:36]).argmax())  # the widest gap: no sample is a matter of roundings
    threat = ThreatModel(norm=norm, eps=float(order[at] + order[at + 1]) / 2)  # type: ignore[arg-type]
    found = evaluate(model, x, y, threat, small("fast", threat))
    assert found.verdict is not None
    assert found.verdict.correct == int((distance > threat.eps).sum())
    assert (found.verdict.trust, raised(found)) == ("sound", set())


@pytest.mark.parametrize("classes", [2, 3, 6])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_honest_network_is_not_accused(classes: int, seed: int) -> None:
    """Adversarially trained for a moment; neither robust accuracy nor trust is at an end of its scale."""
    g = torch.Generator().manual_seed(seed)
    patterns, threat = torch.rand(classes, 1, 8, 8, generator=g), ThreatModel(eps=0.12)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(classes, (n,), generator=g)
        return 0.5 * patterns[y] + 0.5 * torch.rand(n, 1, 8, 8, generator=g), y

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))
        net = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(80):
        x, y = draw(64)
        x = PGD(steps=3)(net, x, y, threat)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = evaluate(net.eval(), *draw(80), threat, small("fast", threat))
    assert found.verdict is not None
    assert 0.1 < found.verdict.robust_accuracy < 1
    assert found.verdict.trust == "sound", raised(found)
