"""The parts of the page about a verdict: trust, checks, stages and margins."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from steelman.evaluation.result import Evaluation, Flag, Score, StageRecord, Verdict
from steelman.report.entry import CLEAN, Entry
from steelman.report.plots import Chart, Line, Point, Style, axis, histogram, log_axis, percent_axis

Models = Sequence[tuple[Entry, Style]]

BACKWARD = 1.4  # the cost of a backward to the input, in forwards
BINS = 24

MEANINGS = {
    "sound": "No check leaves a reason to doubt this number.",
    "suspect": "There are signs that attacks failed, not that the model held. The true number may be far lower.",
    "invalid": "This number cannot be used. What was measured is not the robustness of this model.",
    "bound": "These attacks were given. Whether they work on this model was not checked.",
}
# The meaning of a suspect verdict that no raised flag explains: the time ran out, or the model is random.
UNSETTLED = "No check speaks against the attacks, but what is said below keeps this number open. It may be far lower."
_LOOKED_FOR = {  # the text of a flag that is not raised: what its check measures
    "zero gradients": "Share of the samples tried whose gradient with respect to the input is zero. There a gradient "
    "attack has nothing to climb.",
    "loss does not rise": "Share of the samples tried on which an attack found no point with a higher loss than the "
    "image itself.",
    "one step stronger": "Share of the samples tried that one large step breaks and many small ones do not. Many "
    "should always do better.",
    "starts disagree": "Share of the samples tried that one random start breaks and another does not.",
    "black box stronger": "Share of the samples tried that random guesses break and gradients do not. Who sees the "
    "gradient should do better.",
    "transfer stronger": "Share of the samples tried that points made for another model break and gradients of this "
    "one do not.",
    "grey levels stronger": "Share of the samples tried that points of whole grey levels break and other gradient "
    "attacks do not.",
    "few pixels stronger": "Share of the samples tried that attacks on few pixels break and attacks on all pixels do "
    "not.",
    "small moves stronger": "Share of the samples tried that attacks within a smaller radius break and attacks within "
    "the whole radius do not.",
    "patches stronger": "Share of the samples tried that attacks on whole patches break and attacks on single pixels "
    "do not.",
    "company answers": "Share of the points tried that get another answer in another batch.",
    "gradient answers": "Share of the points tried that get another answer when a gradient is asked for.",
    "remembered answers": "Share of the points tried that get another answer from a fresh copy of the model.",
    "random answers": "Share of the points tried that get another answer when the model is asked again.",
    "undefined answers": "Share of the points tried that the model answers with NaN or infinity.",
    "coarse answers": "Share of the points tried where the logits differ by less than roundings, so that which class "
    "leads is chance.",
    "sentinel broken": "How many of a few robust samples, drawn whatever their margin, the whole of AutoAttack broke. "
    "None should be: those with the smallest margins were attacked most.",
    "targeted ahead": "Share of all samples that climbs towards one other class broke, after climbs away from the "
    "true one had left them.",
    "logits not finite": "How many attacked points the model answered with NaN or infinity.",
    "accuracy levels off": "Share of the samples tried that are robust even where any image may become any "
    "other. It should be none.",
}
_COUNTED = ("sentinel broken", "logits not finite")  # their figures are counts, all others are shares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict, with what the page needs to show it."""

    entry: Entry
    look: Style
    evaluation: Evaluation
    verdict: Verdict
    clean: Score | None
    kind: str  # the trust, or "bound" for a sound protocol

    @property
    def word(self) -> str:
        return self.verdict.word

    @property
    def meaning(self) -> str:
        doubted = any(flag.raised and flag.trust == "suspect" for flag in self.verdict.flags)
        return UNSETTLED if self.kind == "suspect" and not doubted else MEANINGS[self.kind]

    @property
    def last_stage(self) -> str:
        stages = self.evaluation.stages
        return stages[-1].name if stages else ""

    @property
    def checks(self) -> list[Check]:
        """Every flag as a check: raised flags first, and those that leave the least trust before others."""
        order = {"invalid": 0, "suspect": 1, "sound": 2}
        found = sorted(self.verdict.flags, key=lambda flag: (not flag.raised, order[flag.trust]))
        return [Check(flag=flag) for flag in found]


def judgements(models: Models) -> list[Judgement]:
    """One judgement for each model that has a verdict."""
    found = []
    for entry, look in models:
        if (evaluation := entry.evaluation) and (verdict := evaluation.verdict):
            bound = verdict.protocol and verdict.trust == "sound"
            found.append(
                Judgement(
                    entry=entry,
                    look=look,
                    evaluation=evaluation,
                    verdict=verdict,
                    clean=entry.score(CLEAN),
                    kind="bound" if bound else verdict.trust,
                )
            )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A flag, with its texts for the page."""

    flag: Flag

    @property
    def text(self) -> str:
        if self.flag.raised:
            return f"{self.flag.text[:1].upper()}{self.flag.text[1:]}."
        return _LOOKED_FOR.get(self.flag.name, "")

    @property
    def figure(self) -> str:
        return self._written(self.flag.figure)

    @property
    def limit(self) -> str:
        return self._written(self.flag.limit)

    @property
    def consequence(self) -> str:
        if self.flag.trust == "sound":
            goes_on = "the trust stays; a suite that can escalate does"
            return goes_on if self.flag.raised else "a suite that can escalate would"
        return f"the verdict {'is' if self.flag.raised else 'would be'} {self.flag.trust}"

    def _written(self, value: float) -> str:
        if self.flag.name in _COUNTED:
            return f"{value:,.0f}"
        share = 100 * value
        return f"{round(share, 1) if share >= 1 else float(f'{share:.2g}'):g}%"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRow:
    """A stage, the accuracy after it, and the cost up to its end, in forwards a sample."""

    record: StageRecord
    after: Score
    cost: float


def stage_rows(evaluation: Evaluation) -> list[StageRow]:
    """A row for each stage of a cascade. The cost includes one forward a sample for the clean answer."""
    spent = itertools.accumulate(record.forwards + BACKWARD * record.backwards for record in evaluation.stages)
    return [
        StageRow(
            record=record,
            after=score_of(record.name, record.left, evaluation.total, record.seconds),
            cost=1 + passes / evaluation.total,
        )
        for record, passes in zip(evaluation.stages, spent, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaks:
    """Accuracy after each stage against the cost: one chart of all cascades, and a table for each."""

    wide: Chart
    narrow: Chart
    tables: list[tuple[Entry, Style, list[StageRow]]]


def breaks(models: Models) -> Breaks | None:
    """The chart and the tables. None if there is no cascade."""
    tables = [(entry, look, stage_rows(found)) for entry, look in models if (found := entry.cascade) and found.stages]
    if not tables:
        return None
    wide = Chart(
        id="breaks-wide",
        title="Accuracy after each stage against its cost",
        x=log_axis("forwards a sample so far (log scale)", "cost", [row.cost for *_, rows in tables for row in rows]),
        y=percent_axis("accuracy"),
        lines=tuple(
            Line(name=entry.name, style=look, points=tuple(_points(entry, rows))) for entry, look, rows in tables
        ),
        width=860,
        height=340,
    )
    return Breaks(wide=wide, narrow=dataclasses.replace(wide, id="breaks-narrow", width=340, height=270), tables=tables)


def _points(entry: Entry, rows: Sequence[StageRow]) -> list[Point]:
    clean = entry.score(CLEAN)
    first = [Point(0.0, clean.accuracy, *clean.interval, f"{entry.name}, clean")] if clean else []
    return first + [
        Point(math.log10(row.cost), row.after.accuracy, *row.after.interval, f"{entry.name}, after {row.record.name}")
        for row in rows
    ]


def margins(models: Models) -> list[tuple[Entry, Style, Chart | None]]:
    """A histogram of the margins for each cascade, all on one axis. None if a cascade has no robust sample."""
    found = [
        (entry, look, sorted(filter(math.isfinite, entry.cascade.margins))) for entry, look in models if entry.cascade
    ]
    x = axis("margin", (value for *_, values in found for value in values))
    charts: list[tuple[Entry, Style, Chart | None]] = []
    for number, (entry, look, values) in enumerate(found):
        bars = histogram(values, (x.low, x.high), BINS)
        said = (
            f"{len(values)} robust samples: the smallest margin is {values[0]:.3g}, the median "
            f"{values[len(values) // 2]:.3g}, the largest {values[-1]:.3g}."
            if values
            else ""
        )
        chart = Chart(
            id=f"margins{number}",
            title=f"Margins of the robust samples, {entry.name}",
            x=x,
            y=axis("robust samples", (bar.height for bar in bars), whole=True),
            bars=bars,
            said=said,
        )
        charts.append((entry, look, chart if values else None))
    return charts


def score_of(name: str, correct: int, total: int, seconds: float | None = None) -> Score:
    return Score(name=name, settings={}, correct=correct, total=total, seconds=seconds)
