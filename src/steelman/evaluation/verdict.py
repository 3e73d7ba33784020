"""The verdict: flags, trust, reasons and notes, all from what an evaluation keeps.

An evaluation and `steelman.verify` both call these functions. So a verdict that was edited afterwards differs from what
`verify` computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from steelman.evaluation.curve import levels_off
from steelman.evaluation.result import CurvePoint, Flag, Role, StageRecord, Trust, Verdict
from steelman.evaluation.signs import SIGNS, flag
from steelman.evaluation.signs import flags_of as signs_raised
from steelman.evidence.ledger import ROBUST, SMALL, WRONG, pilot_size
from steelman.threat import ThreatModel

# For each flag that comes from the stages: its limit, whether one more sample may pass, the trust that the flag leaves,
# and its text. The limits are shares of the samples, and 0 for counts. SIGNS has the same for the pilot's flags.
DOUBTS: dict[str, tuple[float, bool, Trust, str]] = {
    "sentinel broken": (
        0,
        False,
        "sound",
        "AutoAttack's own attacks broke {figure:.0f} of {tried} robust samples drawn at random; where they break one, "
        "every robust sample is attacked at full cost",
    ),
    "points outside": (
        0.05,
        False,
        "suspect",
        "{figure:.0%} of the points that {stage} gave lie outside the threat model and could not be counted: it does "
        "not know the rules",
    ),
    "successes refuted": (
        0.05,
        True,
        "suspect",
        "for {figure:.0%} of its samples {stage} saw a success that the model, asked again in full precision, does not "
        "confirm: its answers change",
    ),
    "copy disagrees": (
        0,
        False,
        "suspect",
        "a fresh copy of the model gives another answer at {figure:.0%} of the points of {stage} that it was asked "
        "about: the model remembers what it was asked",
    ),
    "targeted ahead": (
        0.1,
        False,
        "sound",
        "targeted attacks broke {figure:.1%} of all samples after untargeted ones had left them",
    ),
    "pilot stronger": (
        0.05,
        False,
        "suspect",
        "{figure:.0%} of the samples that checks were made on are broken by the checks' own attacks, which this suite "
        "does not count, and by none of its own",
    ),
    "wrong by a rounding": (
        0.05,
        True,
        "suspect",
        "for {figure:.0%} of the samples the model was wrong at a point, but by no more than what sums of such numbers "
        "differ by; those points were not counted",
    ),
    "logits not finite": (
        0,
        False,
        "invalid",
        "the model gave NaN or infinite logits at {figure:.0f} points inside the threat model; what it answers there "
        "is not defined, and they were not counted",
    ),
}
# A model has collapsed if it gives one class to at least COLLAPSE of the images. The class's share of the data must be
# lower by COLLAPSE_AHEAD. There must be COLLAPSE_SEEN images: a few images may have one class by chance.
COLLAPSE, COLLAPSE_AHEAD, COLLAPSE_SEEN = 0.95, 0.2, 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept:
    """What an evaluation keeps. Verdict and notes follow from it alone.

    `roles` are the roles of the suite's stages, by name. `samples` are the columns of the ledger. `signs` are the
    columns of ``signs.safetensors``: the pilot's rows, which of them it broke, and each measured sign. `random` is True
    if the model is, and `grain` is the model's (see `Manners`). `cut` names the stages that ran out of time, with
    (samples attacked, samples planned). `look_cut` is the same pair for the pilot, or for the curve of a protocol.
    """

    suite: str
    protocol: bool
    roles: Mapping[str, Role]
    threat: ThreatModel
    classes: tuple[str, ...]
    samples: Mapping[str, Tensor]
    stages: tuple[StageRecord, ...]
    signs: Mapping[str, Tensor]
    curve: tuple[CurvePoint, ...]
    random: bool
    grain: float
    escalated: bool
    cut: Mapping[str, tuple[int, int]]
    look_cut: tuple[int, int] | None

    @property
    def total(self) -> int:
        return len(self.samples["label"])

    @property
    def complete(self) -> bool:
        """Whether all attacks ran to their end. A protocol does not need its curve."""
        return not self.cut and (self.look_cut is None or self.protocol)

    @property
    def right(self) -> int:
        return int((self.samples["broken_by"] != WRONG).sum())

    @property
    def robust(self) -> Tensor:
        return self.samples["broken_by"] == ROBUST


def verdict_of(kept: Kept) -> Verdict:
    """The verdict. Its trust is the lowest that any raised flag leaves."""
    order, flags = list(get_args(Trust)), flags_of(kept)
    unsure = kept.random or not kept.complete
    worst: list[Trust] = ["suspect" if unsure else "sound", *(one.trust for one in flags if one.raised)]
    return Verdict(
        correct=int(kept.robust.sum()),
        total=kept.total,
        clean=kept.right,
        norm=kept.threat.norm,
        eps=kept.threat.eps,
        low=kept.threat.low,
        high=kept.threat.high,
        suite=kept.suite,
        trust=max(worst, key=order.index),
        reasons=tuple(reasons_of(kept, flags)),
        flags=flags,
        complete=kept.complete,
        escalated=kept.escalated,
        protocol=kept.protocol,
    )


def doubtful(kept: Kept) -> bool:
    """Whether any flag is raised so far."""
    return any(one.raised for one in flags_of(kept))


def reasons_of(kept: Kept, flags: tuple[Flag, ...]) -> Iterator[str]:
    """The sentences of a verdict: one for each raised flag, and for all else that limits what the number means."""
    yield from (one.text for one in flags if one.raised)
    if collapse := collapsed(kept):
        yield collapse
    if kept.random:
        yield "the model is random: another draw of its noise may give another answer"
    if kept.protocol:
        yield "a protocol of given attacks: an upper bound, which a stronger attack may lower"
    if not kept.complete:
        yield "the time ran out before all attacks had run: an upper bound, the tightest so far"


def collapsed(kept: Kept) -> str:
    """A sentence if the model gives one class to almost every image, but the data do not. Else an empty text."""
    n = len(kept.classes)
    answers, labels = (torch.bincount(kept.samples[name], minlength=n) for name in ("clean", "label"))
    most = int(answers.argmax())
    share, expected = int(answers[most]) / kept.total, int(labels[most]) / kept.total
    if kept.total < COLLAPSE_SEEN or share < COLLAPSE or share - expected < COLLAPSE_AHEAD:
        return ""
    return f'the model answers "{kept.classes[most]}" for {share:.0%} of the images: it has collapsed'


def notes_of(kept: Kept) -> tuple[str, ...]:
    """Notes on points that were not counted, on what the time cut short, and on what limits the checks."""
    outside = [
        f"{stage.name}: {stage.outside} points outside the threat model were not counted"
        for stage in kept.stages
        if stage.outside
    ]
    before = "curve" if kept.protocol else "pilot"
    cut = [
        f"{name}: the time ran out after {done} of {count} samples"
        + ("" if name == "curve" else "; the others count as robust")
        for name, (done, count) in {**kept.cut, **({before: kept.look_cut} if kept.look_cut else {})}.items()
    ]
    coarse = [
        f"the model computes coarsely: its logits move by up to {kept.grain:.2%} of their spread with the other images "
        "of the batch; an answer counts as changed only beyond that"
    ] * bool(kept.grain)
    return (*outside, *cut, *coarse, *_small(kept))


def _small(kept: Kept) -> Iterator[str]:
    """What the checks of a small set can miss."""
    looked = len(kept.signs["rows"]) if "rows" in kept.signs else 0
    if kept.protocol or kept.total >= SMALL or not looked:
        return
    # A lie about this share of the samples is in none of those looked at with a chance of 5%.
    share = 1 - 0.05 ** (1 / looked)
    said = f"a small set: the pilot looked at {looked} samples, so it may miss a lie about under {share:.0%}"
    watch = [stage for stage in kept.stages if kept.roles[stage.name] == "sentinel"]
    if watch:
        said += f"; the sentinel attacked {watch[0].attacked} of {watch[0].left + watch[0].broken} robust samples"
    yield said


def flags_of(kept: Kept) -> tuple[Flag, ...]:
    """All flags: those of the pilot, that of the curve, and those of the stages."""
    signs = {name: column for name, column in kept.signs.items() if name.split(",")[0] in SIGNS}
    pilot = signs_raised([signs]) if signs else []
    curve = [] if kept.protocol else levels_off(kept.curve)
    return (*pilot, *curve, *_of_stages(kept))


def _doubt(name: str, figure: float, of: int = 0, **said: Any) -> Flag:
    """The flag `name` of DOUBTS. `of` is the number of samples behind the figure, where one more may pass."""
    limit, one, trust, text = DOUBTS[name]
    return flag(name, figure, limit + one / max(of, 1), trust, text.format(figure=figure, **said))


def _of_stages(kept: Kept) -> Iterator[Flag]:
    """The flags that come from the stages. Some are there only if they are raised."""
    watch = [stage for stage in kept.stages if kept.roles[stage.name] == "sentinel"]
    if watch:
        yield _doubt("sentinel broken", sum(stage.broken for stage in watch), tried=watch[0].attacked)
    maybe = []
    for stage in kept.stages:
        of = max(stage.attacked, 1)
        maybe.append(_doubt("points outside", stage.outside / of, of, stage=stage.name))
        maybe.append(_doubt("successes refuted", stage.refuted / of, of, stage=stage.name))
        maybe.append(_doubt("copy disagrees", stage.contradicted / max(stage.witnessed, 1), stage=stage.name))
    yield from (one for one in maybe if one.raised)
    targeted = [stage.broken for stage in kept.stages if stage.settings.get("attack") == "MultiTargeted"]
    if targeted and not kept.protocol:  # in a protocol, targeted attacks also get samples that others broke
        yield _doubt("targeted ahead", sum(targeted) / max(kept.total, 1))
    last = []
    if not {"pilot", "escalation"} & set(kept.roles.values()) and "rows" in kept.signs:
        missed = int(kept.robust[kept.signs["rows"][kept.signs["broken"]]].sum())
        last.append(_doubt("pilot stronger", missed / pilot_size(kept.total)))
    right = max(kept.right, 1)
    last.append(_doubt("wrong by a rounding", int(kept.samples["unclear"].sum()) / right, right))
    last.append(_doubt("logits not finite", sum(stage.nonfinite for stage in kept.stages)))
    yield from (one for one in last if one.raised)
