"""What the report says of a verdict: its trust, its stages, its robust samples, its classes and every flag."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from steelman.evaluation.result import CurvePoint, Evaluation, Flag, Score, StageRecord, Verdict
from steelman.report import Entry
from steelman.report.html import render
from steelman.report.plots import histogram, log_axis
from steelman.report.tables import scores_table, verdict_text
from steelman.report.verdict import stage_rows
from steelman.threat import ThreatModel
from tests.evidence_helpers import EPS, SUITE, a_model, evaluate, the_data
from tests.test_report import Page, an_entry, an_evaluation, cell, charts_of

EVIL = "<script>alert('x')</script>\"&"
UPPER_BOUND = "a protocol of given attacks: an upper bound, which a stronger attack may lower"


def a_flag(name: str = "zero gradients", *, raised: bool = False, **changes: Any) -> Flag:
    flag = Flag(
        name=name,
        figure=0.34 if raised else 0.01,
        limit=0.05,
        raised=raised,
        trust="suspect",
        text="for 34% of the samples the gradient is zero",
    )
    return replace(flag, **changes)


QUIET = (a_flag(), a_flag("one step stronger"))
SENTINEL = a_flag("sentinel broken", figure=0, limit=0, trust="sound", text="broke 0 of 6: so every sample is broken")


def a_stage(name: str, attacked: int, broken: int, left: int, **changes: Any) -> StageRecord:
    stage = StageRecord(
        name=name,
        settings={"steps": 15},
        attacked=attacked,
        broken=broken,
        left=left,
        forwards=10 * attacked,
        backwards=5 * attacked,
        seconds=0.5,
    )
    return replace(stage, **changes)


STAGES = (
    a_stage("climb", 190, 60, 130),
    a_stage("square", 65, 12, 118, backwards=0),
    a_stage("sentinel FAB", 3, 0, 118),
)


def a_cascade(stages: tuple[StageRecord, ...] = STAGES, clean: int = 190, **changes: Any) -> Evaluation:
    """200 samples of two classes; `changes` may hold fields of the evaluation and of its verdict."""
    left = stages[-1].left
    verdict = Verdict(
        correct=left,
        total=200,
        clean=clean,
        norm="linf",
        eps=0.1,
        suite="fast",
        trust="sound",
        reasons=(),
        flags=QUIET,
    )
    known = {field.name for field in dataclasses.fields(Verdict)}
    verdict = replace(verdict, **{key: changes.pop(key) for key in known & set(changes)})
    counts = (("clean", clean), *((stage.name, stage.left) for stage in stages), ("worst case", left))
    found = Evaluation(
        **{field.name: getattr(an_evaluation(), field.name) for field in dataclasses.fields(Evaluation)}
        | {
            "scores": tuple(Score(name=n, settings={}, correct=k, total=200, seconds=1.0) for n, k in counts),
            "verdict": verdict,
            "stages": stages,
            "confusion": ((80, 20), (100 - (left - 80), left - 80)) if left > 80 else ((left, 100 - left), (100, 0)),
            "margins": tuple((k + 1) / 100 for k in range(left)),
            "right": (98, clean - 98),
        }
    )
    return replace(found, **changes)


def page_of(evaluation: Evaluation, name: str = "model") -> Page:
    return Page(render([Entry(name=name, evaluation=evaluation)], title="t"))


def part(evaluation: Evaluation, section: str) -> str:
    """The words of one section."""
    text = render([Entry(name="model", evaluation=evaluation)], title="t")
    found = re.search(rf'<section id="{section}".*?</section>', text, re.DOTALL)
    return Page(found.group()).text if found else ""


def printed(evaluation: Evaluation) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(verdict_text(evaluation))
    return console.export_text()


def test_the_verdict_comes_first_with_all_that_it_rests_on() -> None:
    text = part(a_cascade(), "verdict")
    for words in (
        "Trust: sound",
        cell(118, 200),
        "no attack broke 118 of 200 samples",
        f"{cell(190, 200)} are right when left alone",
        "No check leaves a reason to doubt",
        "Adversary L∞, eps = 0.1",
        "Suite fast",
        "Complete yes",
        "Escalated no",
    ):
        assert words in text, words
    page = page_of(a_cascade())
    sections = [attributes["id"] for attributes in page.all("section")]
    assert sections == ["verdict", "accuracy", "checks", "stages", "margins", "curve", "classes", "gallery", "settings"]


@pytest.mark.parametrize("trust", ["sound", "suspect", "invalid"])
def test_trust_is_told_by_word_colour_and_shape(trust: str) -> None:
    text = render([Entry(name="model", evaluation=a_cascade(trust=trust, reasons=("the model is odd",)))], title="t")
    assert f'<article class="verdict {trust}"' in text
    assert f"Trust: {trust}" in re.sub(r"\s+", " ", Page(text).text)
    assert "The model is odd." in Page(text).text
    found = re.search(r'<p class="trust">.*?class="body" d="([^"]*)"', text, re.DOTALL)
    assert found
    # A disc, a triangle, an octagon: what is drawn differs, not the colour alone.
    assert {"sound": "a11", "suspect": "M12,1.5", "invalid": "M7.5,1H16.5"}[trust] in found[1]
    assert ("may be far lower" in text) == (trust == "suspect")
    assert ("cannot be used" in text) == (trust == "invalid")


def test_a_verdict_in_doubt_is_never_quoted_without_its_doubt() -> None:
    shaky = Entry(name="shaky", evaluation=a_cascade(trust="suspect", reasons=("odd",)))
    page = Page(render([shaky, Entry(name="firm", evaluation=a_cascade())], title="t"))
    assert "But its verdict is suspect : the number may be far too high" in page.text
    assert re.search(r"shaky suspect", page.text)
    assert "firm suspect" not in page.text
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(scores_table([shaky]))
    assert "shaky (suspect)" in console.export_text()


def test_what_is_not_complete_or_was_escalated_says_so() -> None:
    late = a_cascade(complete=False, reasons=("the time ran out before all attacks had run",))
    text = part(late, "verdict")
    assert "Complete no: the time ran out in “sentinel FAB”" in text
    assert "The time ran out before all attacks had run." in text
    assert "Escalated not reached" in text
    assert "Escalated yes: all of AutoAttack on every robust sample" in part(a_cascade(escalated=True), "verdict")
    said = printed(replace(late, verdict=replace(late.verdict, escalated=True)))  # type: ignore[type-var]
    assert "Trust: sound, not complete, escalated" in said


def test_a_suspect_verdict_speaks_of_signs_only_where_there_are_some() -> None:
    late = part(a_cascade(trust="suspect", complete=False, reasons=("the time ran out",)), "verdict")
    assert "No check speaks against the attacks" in late
    assert "signs that attacks failed" not in late
    masked = part(a_cascade(trust="suspect", complete=False, flags=(a_flag(raised=True),)), "verdict")
    assert "signs that attacks failed" in masked


def test_a_sample_that_was_not_reached_is_not_shown_as_attacked() -> None:
    gallery = tuple(replace(one, attack="") for one in a_cascade().gallery)
    assert gallery
    text = part(a_cascade(gallery=gallery), "gallery")
    assert f"sample {gallery[0].index}, not attacked yet" in text


def test_a_curve_of_no_samples_is_not_drawn() -> None:
    found = a_cascade()
    assert found.curve
    nobody = tuple(replace(point, correct=0, total=0) for point in found.curve)
    assert part(replace(found, curve=nobody), "curve") == ""


def test_stages_are_in_the_table_with_their_cost_so_far() -> None:
    text = part(a_cascade(), "stages")
    assert f"climb 190 60 130 {cell(130, 200)} 1,900 950 0.5 17" in text
    assert f"square 65 12 118 {cell(118, 200)} 650 0 0.5 20" in text
    assert f"all stages 72 118 {cell(118, 200)} 2,580 965 1.5 21" in text
    # One forward for the clean answer; a backward counts 1.4.
    costs = [row.cost for row in stage_rows(a_cascade())]
    assert costs == pytest.approx([1 + (1900 + 1.4 * 950) / 200, 1 + 3880 / 200, 1 + (3880 + 30 + 21) / 200])


def test_the_break_curve_lies_where_cost_and_accuracy_say() -> None:
    svg = charts_of(render([Entry(name="model", evaluation=a_cascade())], title="t"))["breaks-wide"]
    marks = [path for path in svg.iter("path") if path.attrib.get("class") == "mark"]
    assert [(mark.findtext("title") or "").split(":")[0] for mark in marks] == [
        "model, clean",
        "model, after climb",
        "model, after square",
        "model, after sentinel FAB",
    ]
    assert "at cost 17.1" in (marks[1].findtext("title") or "")
    places = [tuple(map(float, re.findall(r"[\d.]+", mark.attrib["transform"]))) for mark in marks]
    # Plot area: 44 left, 14 right, 12 top, 38 below, of 860 x 340; from 1 to the last cost on a log scale.
    costs, shares = [1.0, *(row.cost for row in stage_rows(a_cascade()))], [0.95, 0.65, 0.59, 0.59]
    expected = [(44 + 802 * math.log10(c) / math.log10(costs[-1]), 12 + 290 * (1 - s)) for c, s in zip(costs, shares)]
    for place, wanted in zip(places, expected, strict=True):
        assert place == pytest.approx(wanted, abs=0.02)


def test_every_stage_has_its_mark_however_many_there_are() -> None:
    stages = tuple(a_stage(f"stage {k}", 150, 1, 189 - k) for k in range(20))
    svg = charts_of(render([Entry(name="model", evaluation=a_cascade(stages))], title="t"))["breaks-narrow"]
    said = [path.findtext("title") or "" for path in svg.iter("path") if path.attrib.get("class") == "mark"]
    assert [text.split(":")[0] for text in said[1:]] == [f"model, after stage {k}" for k in range(20)]


def test_a_log_axis_has_ticks_at_ones_and_threes() -> None:
    found = log_axis("passes", "cost", [250.0])
    assert [found.text(tick) for tick in found.ticks] == ["1", "3", "10", "30", "100"]
    assert found.high == pytest.approx(math.log10(250))
    assert found.text(math.log10(11_600)) == "11,600"


def test_a_cascade_s_stages_are_not_columns_of_the_accuracy_table() -> None:
    mixed = [Entry(name="a", evaluation=a_cascade()), an_entry("b")]
    text = render(mixed, title="t")
    heads = re.findall(r'role="columnheader"[^>]*>([^<]*)<', text)
    assert heads == ["Model", "clean", "pgd-20", "worst case"]
    named = (a_stage("pgd-20", 190, 72, 118),)
    assert Entry(name="a", evaluation=a_cascade(named)).score("pgd-20") is None


def test_histogram_counts_every_value_once() -> None:
    bars = histogram([0.0, 0.24, 0.25, 0.5, 0.99, 1.0], (0.0, 1.0), 4)
    assert [bar.height for bar in bars] == [2, 1, 1, 2]
    assert [(bar.start, bar.end) for bar in bars] == [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]


def test_the_robust_samples_margins_are_a_histogram() -> None:
    text = render([Entry(name="model", evaluation=a_cascade(margins=(0.1, 0.11, 0.9)))], title="t")
    svg = charts_of(text)["margins0"]
    columns = [rect for rect in svg.iter("rect") if rect.attrib["class"] == "column"]
    heights = [float(rect.attrib["height"]) for rect in columns]
    # The axis ends at 2 and the plot is 170 high.
    assert heights == pytest.approx([170, 85], abs=0.1)
    assert [(rect.findtext("title") or "")[:16] for rect in columns] == ["2 robust samples", "1 robust samples"]
    assert "3 robust samples: the smallest margin is 0.1, the median 0.11, the largest 0.9." in Page(text).text


def test_no_sample_robust_and_all_robust() -> None:
    nobody = a_cascade((a_stage("climb", 190, 190, 0), a_stage("square", 0, 0, 0)))
    text = render([Entry(name="model", evaluation=nobody)], title="t")
    assert "No sample is robust." in Page(text).text
    assert cell(0, 200) in Page(text).text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    everybody = a_cascade((a_stage("climb", 200, 0, 200),), clean=198, confusion=((100, 0), (0, 100)))
    text = render([Entry(name="model", evaluation=everybody)], title="t")
    assert cell(200, 200) in part(everybody, "verdict")
    assert "Commonest mistake" not in text
    assert "Broken by: nothing." in printed(everybody)


def test_classes_are_shown_clean_and_under_attack() -> None:
    text = part(a_cascade(), "classes")
    assert f"cat n = 100 {cell(98, 100)} {cell(80, 100)}" in text
    assert f"dog n = 100 {cell(92, 100)} {cell(38, 100)}" in text
    assert f"Weakest: dog , {cell(38, 100)}" in text
    assert "Commonest mistake: dog taken for cat , 62 of 100" in text
    unknown = part(a_cascade(right=()), "classes")
    assert "Class Under attack" in unknown
    assert f"cat n = 100 {cell(80, 100)}" in unknown


def test_confusion_is_shaded_by_share_and_frames_what_held() -> None:
    text = render([Entry(name="model", evaluation=a_cascade(confusion=((80, 20), (0, 100))))], title="t")
    table = re.search(r'<table class="confusion">.*?</table>', text, re.DOTALL)
    assert table
    assert re.findall(r'<td class="([^"]*)">(\d+)</td>', table[0]) == [
        ("s5 held", "80"),
        ("s2", "20"),
        ("s0", "0"),
        ("s6 held", "100"),
    ]


def test_many_classes_collapse_to_the_weakest_and_the_commonest_mistakes() -> None:
    names = tuple(f"c{k}" for k in range(100))
    # Class k has two samples; one of class 7 and both of class 93 are taken for the next.
    lost = {7: 1, 93: 2}
    rows = [[0] * 100 for _ in names]
    for k in range(99):
        rows[k][k], rows[k][k + 1] = 2 - lost.get(k, 0), lost.get(k, 0)
    evaluation = a_cascade(classes=names, confusion=tuple(map(tuple, rows)), right=(2,) * 99 + (0,))
    text = part(evaluation, "classes")
    assert text.index("c93 n = 2") < text.index("c7 n = 2") < text.index("c0 n = 2")
    assert "The other 80 classes" in text
    assert "c99 n = 0 – –" in text
    assert "c93 c94 2 of 2 c7 c8 1 of 2" in text
    page = render([Entry(name="model", evaluation=evaluation)], title="t")
    assert 'class="confusion"' not in page
    assert len(page) < 200_000


def test_flags_are_explained_with_figure_limit_and_consequence_the_gravest_first() -> None:
    flags = (
        a_flag("one step stronger"),
        SENTINEL,
        a_flag(raised=True),
        a_flag("logits not finite", figure=12, limit=0, raised=True, trust="invalid", text="NaN at 12 points"),
        a_flag("targeted ahead", figure=0.2, limit=0.1, raised=True, trust="sound", text="targets broke 20%"),
        a_flag("of tomorrow", figure=0.00042, limit=0),
    )
    text = part(a_cascade(flags=flags, trust="invalid"), "checks")
    assert "model: 3 of 6 raised" in text
    order = [text.index(f"▲ raised {name}") for name in ("logits not finite", "zero gradients", "targeted ahead")]
    order += [text.index(f"– not raised {name}") for name in ("one step stronger", "sentinel broken", "of tomorrow")]
    assert len(set(order)) == 6
    assert order[:3] == sorted(order[:3])
    assert max(order[:3]) < min(order[3:])
    assert "NaN at 12 points. Figure 12 Raised above 0 Consequence the verdict is invalid" in text
    assert "the gradient is zero. Figure 34% Raised above 5% Consequence the verdict is suspect" in text
    assert "Figure 20% Raised above 10% Consequence the trust stays; a suite that can escalate does" in text
    assert "Figure 1% Raised above 5% Consequence the verdict would be suspect" in text
    assert "of tomorrow Figure 0.042% Raised above 0% Consequence" in text
    # What a flag says when it is raised is not said of one that is not.
    assert "so every sample is broken" not in text
    assert "None should" in text


def test_a_protocol_keeps_its_page_and_is_called_an_upper_bound() -> None:
    known = a_cascade().verdict
    assert known is not None
    verdict = replace(known, suite="custom", reasons=(UPPER_BOUND,), flags=(), protocol=True)
    protocol = an_evaluation(verdict=verdict, stages=(a_stage("pgd-20", 190, 70, 120),), confusion=((1, 0), (0, 1)))
    text = render([Entry(name="model", evaluation=protocol)], title="t")
    page = Page(text)
    assert '<article class="verdict bound"' in text
    assert "Trust: upper bound" in page.text
    assert f"A{UPPER_BOUND[1:]}." in page.text
    sections = [attributes["id"] for attributes in page.all("section")]
    assert sections == ["verdict", "accuracy", "curve", "gallery", "settings"]
    assert "pgd-20" in re.findall(r'role="columnheader"[^>]*>([^<]*)<', text)
    assert "Escalated" not in page.text
    random = replace(verdict, trust="suspect", reasons=("the model is random", UPPER_BOUND))
    assert "Trust: suspect" in page_of(replace(protocol, verdict=random)).text
    assert "Trust: upper bound" in printed(protocol)
    # An unnamed protocol is told from an older evaluation by nothing that matters.
    assert "Not evaluated alike" not in render([an_entry("old"), Entry(name="new", evaluation=protocol)], title="t")


def test_an_evaluation_without_a_verdict_is_shown_as_before() -> None:
    page = page_of(an_evaluation())
    assert [attributes["id"] for attributes in page.all("section")] == ["accuracy", "curve", "gallery", "settings"]
    assert verdict_text(an_evaluation()).plain == ""


def test_other_suites_are_other_conditions() -> None:
    entries = [Entry(name="a", evaluation=a_cascade()), Entry(name="b", evaluation=a_cascade(suite="standard"))]
    page = Page(render(entries, title="t"))
    assert "Not evaluated alike" in page.text
    assert "suite standard" in page.text


def test_a_radius_far_away_is_said_and_not_drawn() -> None:
    curve = tuple(CurvePoint(eps=e, correct=k, total=50) for e, k in ((0.0, 50), (0.1, 30), (0.3, 5), (8.0, 1)))
    text = render([Entry(name="model", evaluation=a_cascade(curve=curve))], title="t")
    svg = charts_of(text)["curve0-wide"]
    assert len([path for path in svg.iter("path") if path.attrib.get("class") == "mark"]) == 3
    assert f"Far outside the chart, at eps = 8: {cell(1, 50)}" in Page(text).text
    assert "Only samples that the model gets right when left alone were drawn." in Page(text).text


def test_everything_that_has_a_name_is_escaped_and_the_page_stands_alone() -> None:
    evaluation = a_cascade(
        (a_stage(EVIL, 190, 72, 118, settings={EVIL: EVIL}),),
        classes=(EVIL, EVIL),
        suite=EVIL,
        trust="suspect",
        reasons=(EVIL,),
        flags=(a_flag(EVIL, raised=True, text=EVIL), a_flag(EVIL)),
    )
    text = render([Entry(name=EVIL, evaluation=evaluation)] * 2, title=EVIL)
    page = Page(text)
    assert "<script" not in text
    assert page.text.count("alert('x')") >= 30
    assert page.open == []
    assert not any(name == "style" or name.startswith("on") for _, attributes in page.tags for name in attributes)
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))
    assert EVIL in verdict_text(evaluation).plain


def test_the_page_with_a_verdict_is_accessible() -> None:
    page = Page(render([Entry(name="a", evaluation=a_cascade()), Entry(name="b", evaluation=a_cascade())], title="t"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    known = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    for tag, attributes in page.tags:
        for name in (attributes.get("aria-labelledby") or "").split():
            assert name in known, (tag, name)
    regions = [attributes for _, attributes in page.tags if attributes.get("role") == "region"]
    assert regions
    assert all(a.get("tabindex") == "0" and (a.get("aria-label") or a.get("aria-labelledby")) for a in regions)


def test_verdict_in_the_terminal() -> None:
    lines = printed(a_cascade(trust="suspect", reasons=("first [bold]reason[/bold]", "second"))).splitlines()
    assert [line.rstrip() for line in lines] == [
        f"Robust accuracy {cell(118, 200)}  n = 200, L∞, eps = 0.1 (25.5 of 255 grey levels), suite fast, seed 3",
        "Trust: suspect",
        "  - first [bold]reason[/bold]",
        "  - second",
        "  note: gradients look healthy",
        "Broken by: climb 60, square 12. Cost: 13 F + 5 B a sample.",
    ]


def test_an_evaluation_gives_the_same_page_when_it_is_read_back(tmp_path: Path) -> None:
    found = evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), SUITE, out=tmp_path)
    assert render([Entry(name="m", evaluation=Evaluation.load(tmp_path))], title="t") == render(
        [Entry(name="m", evaluation=found)], title="t"
    )


def test_a_verdict_printed_is_three_lines_at_most() -> None:
    def lines(**changes: Any) -> list[str]:
        verdict = a_cascade(**changes).verdict
        assert verdict is not None
        return str(verdict).splitlines()

    robust, clean = f"robust {cell(118, 200)} of 200 (linf, eps", f"clean {cell(190, 200)}, suite fast"
    assert lines() == [f"{robust} 0.1, 25.5 of 255 grey levels), sound", clean]
    doubted = lines(trust="suspect", reasons=("first", "second"))
    assert doubted == [f"{robust} 0.1, 25.5 of 255 grey levels), suspect", clean, "first; second"]
    verdict = replace(a_cascade().verdict, correct=946, clean=1800, total=2000, eps=8 / 255, protocol=True)  # type: ignore[type-var]
    line = "robust 47.3% [45.1, 49.5] of 2,000 (linf, eps 0.0314, 8.0 of 255 grey levels), upper bound"
    assert verdict is not None
    assert str(verdict).startswith(f"{line}\nclean 90.0%")
    assert "(linf, eps 8, 8.0 of 255 grey levels)" in str(replace(verdict, eps=8.0, high=255.0))
    assert "(linf, eps 0.15, 0.15 of 255 grey levels)" in str(replace(verdict, eps=0.15, high=255.0))
    assert "(l0, eps 3)" in str(replace(verdict, norm="l0", eps=3.0)), "pixels have no grey levels"


def test_times_that_nobody_knows_are_not_shown() -> None:
    stages = tuple(replace(stage, seconds=None) for stage in STAGES)
    scores = tuple(replace(score, seconds=None) for score in a_cascade().scores)
    timed, timeless = (page_of(found).text for found in (a_cascade(), a_cascade(stages, scores=scores)))
    assert "1.5" in timed
    assert timeless.count("–") > timed.count("–") + len(stages)
    assert "None" not in timeless
