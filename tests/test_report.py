"""The report: what it says is what the records hold, and the page stands alone."""

from __future__ import annotations

import base64
import io
import itertools
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from scipy.stats import beta
from torch import Tensor

from steelman.errors import UserError
from steelman.evaluation.result import CurvePoint, Evaluation, Example, Score, radius
from steelman.report import Entry
from steelman.report.html import render, write
from steelman.report.images import data_uri, scaled_perturbation
from steelman.report.plots import Chart, Line, Point, Style, axis, eps_axis, percent_axis, tick_step
from steelman.report.tables import scores_table


def an_example(channels: int = 1, *, eps: float = 0.1) -> Example:
    generator = torch.Generator().manual_seed(channels)
    clean = torch.rand((channels, 8, 8), generator=generator)
    noise = eps * (2 * torch.rand(clean.shape, generator=generator) - 1)
    adversarial = (clean + noise).clamp(0, 1)
    return Example(
        index=17,
        label=1,
        clean_prediction=1,
        adversarial_prediction=0,
        attack="pgd",
        clean=clean,
        adversarial=adversarial,
    )


def an_evaluation(correct: tuple[int, int, int] = (190, 120, 118), **changes: Any) -> Evaluation:
    names = ("clean", "pgd-20", "worst case")
    evaluation = Evaluation(
        model="mlp",
        data="digits",
        classes=("cat", "dog"),
        norm="linf",
        eps=0.1,
        low=0.0,
        high=1.0,
        seed=3,
        total=200,
        versions={"steelman": "0.1.0", "torch": "2.13.0"},
        scores=tuple(
            Score(name=name, settings={"steps": 20} if name == "pgd-20" else {}, correct=k, total=200, seconds=1.5)
            for name, k in zip(names, correct)
        ),
        curve=tuple(CurvePoint(eps=e, correct=k, total=200) for e, k in ((0.0, 190), (0.1, 120), (0.2, 40))),
        curve_attack="pgd-20",
        gallery=(an_example(), an_example(3)) if changes.pop("mixed", False) else (an_example(),),
        notes=("gradients look healthy",),
    )
    return replace(evaluation, **changes)


def a_history(epochs: int = 4, **changes: Any) -> tuple[dict[str, Any], ...]:
    line = {
        "loss": 1.0,
        "train_accuracy": 0.5,
        "validation_clean": 0.9,
        "validation_robust": 0.4,
        "lr": 0.1,
        "eps": 0.1,
    }
    return tuple({"epoch": e, "step": 10 * e, "seconds": 1.0, **line, **changes} for e in range(1, epochs + 1))


def an_entry(name: str = "plain", **changes: Any) -> Entry:
    return Entry(name=name, evaluation=an_evaluation(**changes), history=a_history())


def clopper_pearson(correct: int, total: int) -> tuple[float, float]:
    """By its definition from the beta distribution, apart from the function under test."""
    low = beta.ppf(0.025, correct, total - correct + 1) if correct else 0.0
    high = beta.ppf(0.975, correct + 1, total - correct) if correct < total else 1.0
    return float(low), float(high)


def cell(correct: int, total: int) -> str:
    low, high = clopper_pearson(correct, total)
    return f"{100 * correct / total:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def printed(entries: list[Entry], width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(scores_table(entries))
    return console.export_text()


def charts_of(page: str) -> dict[str, ET.Element]:
    """Each chart of a page by the id of its title."""
    found = {}
    for text in re.findall(r'<svg class="chart.*?</svg>', page, flags=re.DOTALL):
        svg = ET.fromstring(text)
        found[svg.attrib["aria-labelledby"].split("-title")[0]] = svg
    return found


def decode(uri: str) -> np.ndarray[Any, Any]:
    prefix, _, content = uri.partition(",")
    assert prefix == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


class Page(HTMLParser):
    """The page's tags, its text outside the style sheet, and whether the tags nest."""

    VOID = ("meta", "img")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_table_shows_models_by_attacks_with_exact_intervals() -> None:
    text = printed([an_entry("first"), an_entry("second", correct=(200, 0, 0))])
    header = next(line for line in text.splitlines() if "model" in line)
    assert header.split() == ["model", "clean", "pgd-20", "worst", "case"]
    first = next(line for line in text.splitlines() if "first" in line)
    assert [first.index(cell(k, 200)) for k in (190, 120, 118)] == sorted(
        first.index(cell(k, 200)) for k in (190, 120, 118)
    )
    second = next(line for line in text.splitlines() if "second" in line)
    assert cell(200, 200) in second
    assert second.count(cell(0, 200)) == 2


def test_table_caption_carries_the_conditions() -> None:
    text = " ".join(printed([an_entry()]).split())
    for part in ("n = 200", "L∞", "eps = 0.1", "seed 3", "steelman 0.1.0", "torch 2.13.0", "95% Clopper-Pearson"):
        assert part in text


def test_table_says_when_models_were_not_evaluated_alike() -> None:
    assert "Not evaluated alike" not in printed([an_entry("a"), an_entry("b")])
    text = printed([an_entry("a"), an_entry("b", eps=8 / 255)])
    assert "Not evaluated alike" in text
    assert "eps = 8/255" in text


def test_table_takes_names_literally_and_lacks_nothing_without_an_evaluation() -> None:
    text = printed([an_entry("[bold]x[/bold]"), Entry(name="unseen", evaluation=None)])
    assert "[bold]x[/bold]" in text
    assert next(line for line in text.splitlines() if "unseen" in line).split() == ["unseen", "–", "–", "–"]
    nothing = printed([Entry(name="unseen", evaluation=None)])
    assert "no model has been evaluated" in " ".join(nothing.split())


def test_columns_are_the_union_with_the_worst_case_last() -> None:
    other = an_evaluation()
    other = replace(other, scores=(replace(other.scores[1], name="square"), other.scores[2], other.scores[0]))
    text = printed([an_entry("a"), Entry(name="b", evaluation=other)])
    header = next(line for line in text.splitlines() if "model" in line)
    assert header.split() == ["model", "clean", "pgd-20", "square", "worst", "case"]
    assert next(line for line in text.splitlines() if " b " in line).count("–") == 1


def test_page_shows_each_score_with_its_exact_interval() -> None:
    page = Page(render([an_entry(correct=(200, 120, 0))], title="t"))
    for k in (200, 120, 0):
        assert cell(k, 200) in page.text


def test_everything_a_user_can_name_is_escaped() -> None:
    evil = "<script>alert('x')</script>\"&"
    example = replace(an_example(), attack=evil)
    evaluation = an_evaluation(
        model=evil, data=evil, classes=(evil, evil), norm=evil, versions={evil: evil}, curve_attack=evil, notes=(evil,)
    )
    scores = (*evaluation.scores, Score(name=evil, settings={evil: evil}, correct=1, total=200, seconds=0.0))
    evaluation = replace(evaluation, scores=scores, gallery=(example,))
    text = render([Entry(name=evil, evaluation=evaluation, history=a_history())] * 2, title=evil, intro=evil)
    page = Page(text)
    assert page.all("script") == []
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert page.text.count("alert('x')") >= 10


def test_page_stands_alone() -> None:
    text = render([an_entry("a"), an_entry("b")], title="t")
    page = Page(text)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "embed", "base", "form", "a"} == set()
    assert page.all("img")
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img"))
    # A strict policy forbids style attributes and event handlers; neither may be needed.
    assert not any(name == "style" or name.startswith("on") for _, attributes in page.tags for name in attributes)
    policy = next(m["content"] or "" for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_page_is_the_same_each_time_and_nests() -> None:
    entries = [an_entry("a"), an_entry("b")]
    text = render(entries, title="t", intro="one\n\ntwo")
    assert text == render(entries, title="t", intro="one\n\ntwo")
    page = Page(text)
    assert page.open == []
    assert [a for a in page.all("p") if a.get("class") == "intro"] == [{"class": "intro"}] * 2
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_page_is_accessible() -> None:
    page = Page(render([an_entry("a"), an_entry("b")], title="t"))
    assert all(image["alt"] for image in page.all("img"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    for svg in charts_of(render([an_entry("a")], title="t")).values():
        assert svg.attrib["role"] == "img"
        assert [child.tag for child in svg][:2] == ["title", "desc"]
        assert all(child.text for child in list(svg)[:2])


def test_finding_names_the_best_and_admits_overlap() -> None:
    close = Page(render([an_entry("a"), an_entry("b", correct=(190, 125, 123))], title="t"))
    assert "b has the highest worst-case accuracy" in close.text
    assert "overlaps with that of a, so these samples do not settle" in close.text
    apart = Page(render([an_entry("a"), an_entry("b", correct=(190, 20, 20))], title="t"))
    assert "a has the highest worst-case accuracy" in apart.text
    assert "do not settle" not in apart.text
    unlike = Page(render([an_entry("a"), an_entry("b", seed=4)], title="t"))
    assert "highest worst-case" not in unlike.text
    assert "Not evaluated alike" in unlike.text


def test_settings_seed_versions_and_notes_are_on_the_page() -> None:
    page = Page(render([an_entry()], title="t"))
    for part in ("steps = 20", "120 of 200", "torch 2.13.0", "L∞, eps = 0.1", "gradients look healthy", "2: cat, dog"):
        assert part in page.text


@pytest.mark.parametrize("channels", [1, 3])
def test_linf_perturbation_image_is_delta_plus_eps_over_two_eps(channels: int) -> None:
    example = an_example(channels)
    page = Page(render([an_entry(gallery=(example,))], title="t"))
    clean, change, attacked = (decode(str(image["src"])) for image in page.all("img"))

    def levels(image: Tensor) -> np.ndarray[Any, Any]:
        pixels = np.asarray(image.double() * 255)
        return np.asarray(np.rint(pixels[0] if channels == 1 else pixels.transpose(1, 2, 0)))

    delta = example.adversarial.double() - example.clean.double()
    assert change.shape == ((8, 8) if channels == 1 else (8, 8, 3))
    np.testing.assert_array_equal(change, levels((delta + 0.1) / 0.2))
    np.testing.assert_array_equal(clean, levels(example.clean))
    np.testing.assert_array_equal(attacked, levels(example.adversarial))
    assert "(δ + eps) / (2 eps), with eps = 0.1" in page.text


def test_other_norms_scale_by_the_largest_change_and_say_so() -> None:
    delta = torch.tensor([[[-0.3, 0.0, 0.6]]])
    image = scaled_perturbation(delta, norm="l2", eps=9.0)
    torch.testing.assert_close(image, torch.tensor([[[0.25, 0.5, 1.0]]]))
    page = Page(render([an_entry(norm="l2")], title="t"))
    assert "(δ + m) / (2 m)" in page.text
    assert "(2 eps)" not in page.text


def test_no_change_is_mid_grey() -> None:
    for norm in ("linf", "l2"):
        assert scaled_perturbation(torch.zeros(1, 2, 2), norm=norm, eps=0.0).flatten().tolist() == [0.5] * 4


def test_images_are_shown_relative_to_the_input_range() -> None:
    example = replace(an_example(), clean=torch.full((1, 8, 8), -0.6), adversarial=torch.full((1, 8, 8), 0.2))
    page = Page(render([an_entry(low=-1.0, high=1.0, gallery=(example,))], title="t"))
    clean, _, attacked = (decode(str(image["src"])) for image in page.all("img"))
    assert (clean.min(), clean.max(), attacked.min(), attacked.max()) == (51, 51, 153, 153)


def test_a_strange_number_of_channels_raises() -> None:
    with pytest.raises(UserError, match=r"\(4, 8, 8\)"):
        data_uri(torch.zeros(4, 8, 8))


def test_predictions_are_marked_right_or_wrong_by_name() -> None:
    page = Page(render([an_entry()], title="t"))
    assert "✓ right: dog" in page.text
    assert "✗ wrong: cat" in page.text
    beyond = replace(an_example(), adversarial_prediction=7)
    assert "✗ wrong: 7" in Page(render([an_entry(gallery=(beyond,))], title="t")).text


def test_chart_places_known_points() -> None:
    charts = charts_of(render([an_entry()], title="t"))
    for key, width, height in (("curve0-wide", 860, 370), ("curve0-narrow", 340, 270)):
        svg = charts[key]
        assert svg.attrib["viewBox"] == f"0 0 {width} {height}"
        # The plot area is what the margins (44 left, 14 right, 26 top, 38 below) leave: eps 0 to 0.2, 100% to 0%.
        expected = [
            (44 + e / 0.2 * (width - 58), 26 + (1 - k / 200) * (height - 64))
            for e, k in ((0, 190), (0.1, 120), (0.2, 40))
        ]
        marks = [mark.attrib["transform"] for mark in svg.iter("path") if mark.attrib.get("class") == "mark"]
        found = [tuple(float(v) for v in mark[len("translate(") : -1].split()) for mark in marks]
        np.testing.assert_allclose(found, expected, atol=0.01)
        stroke = next(p.attrib["d"] for p in svg.iter("path") if (p.attrib.get("class") or "").startswith("stroke"))
        np.testing.assert_allclose(np.array(re.findall(r"[\d.]+", stroke), float).reshape(-1, 2), expected, atol=0.01)
        band = next(p.attrib["d"] for p in svg.iter("path") if (p.attrib.get("class") or "").startswith("band"))
        corners = np.array(re.findall(r"[\d.]+", band), float).reshape(-1, 2)
        ends = [clopper_pearson(k, 200) for k in (190, 120, 40)]
        shares = [high for _, high in ends] + [low for low, _ in reversed(ends)]
        np.testing.assert_allclose(corners[:, 1], [26 + (1 - s) * (height - 64) for s in shares], atol=0.01)
        assert "eps = 0.1" in ET.tostring(svg, encoding="unicode")


def test_the_chart_says_how_many_samples_it_rests_on() -> None:
    curve = (CurvePoint(eps=0.0, correct=9, total=77), CurvePoint(eps=0.1, correct=1, total=77))
    assert "n = 77" in Page(render([an_entry(curve=curve)], title="t")).text


def test_ticks_lie_where_their_labels_say() -> None:
    svg = charts_of(render([an_entry()], title="t"))["curve0-wide"]
    labels = [t for t in svg.iter("text") if t.attrib.get("class") == "x" and t.text != "eps"]
    assert [t.text for t in labels] == ["0", "0.05", "0.1", "0.15", "0.2"]
    places = [float(t.attrib["x"]) for t in labels]
    np.testing.assert_allclose(places, [44 + float(t.text or "nan") / 0.2 * 802 for t in labels], atol=0.01)
    lines = [p.attrib["d"] for p in svg.iter("path") if p.attrib["d"].endswith("H846")]
    heights = [float(line.split(",")[1].removesuffix("H846")) for line in lines]
    shares = [float((t.text or "").removesuffix("%")) / 100 for t in svg.iter("text") if t.attrib.get("class") == "y"]
    np.testing.assert_allclose(heights, [26 + (1 - share) * 306 for share in shares], atol=0.01)


def test_a_missing_value_breaks_the_line() -> None:
    line = Line(name="a", style=Style.of(0), points=tuple(Point(x, y) for x, y in ((1, 1), (2, 1), (3, None), (4, 2))))
    chart = Chart(id="c", title="c", x=axis("epoch", [4]), y=axis("loss", [2]), lines=(line,))
    assert chart.stroke(line).count("M") == 1
    assert len(chart.marks(line)) == 3
    assert [len(run) for run in line.runs()] == [2, 1]


def test_long_lines_get_few_markers_and_keep_their_ends() -> None:
    line = Line(name="a", style=Style.of(0), points=tuple(Point(x, 0.5) for x in range(201)))
    chart = Chart(id="c", title="c", x=axis("epoch", [200]), y=percent_axis("accuracy"), lines=(line,))
    marks = chart.marks(line)
    assert len(marks) <= 13
    assert (marks[0][0], marks[-1][0]) == (chart.across(0), chart.across(200))


@pytest.mark.parametrize(("span", "count", "step"), [(1.0, 5, 0.2), (0.3, 6, 0.05), (7.0, 5, 2.0), (3e-4, 5, 1e-4)])
def test_tick_steps_are_round(span: float, count: int, step: float) -> None:
    assert math.isclose(tick_step(span, count), step)


def test_radii_are_written_as_people_say_them() -> None:
    assert [radius(e) for e in (8 / 255, 0.5 / 255, 0.3, 0.2, 0.0, 0.3141)] == [
        "8/255",
        "0.5/255",
        "0.3",
        "0.2",
        "0",
        "0.3141",
    ]
    assert radius(3 * 0.1) == "0.3"  # and not 76.5/255, though 3 * 0.1 is not the float 0.3
    ticks = eps_axis([0.0, 8 / 255, 16 / 255], in_255ths=True)
    assert [ticks.text(tick) for tick in ticks.ticks] == ["0", "5/255", "10/255", "15/255"]


def test_ten_models_look_different_and_two_hundred_epochs_fit() -> None:
    assert len({Style.of(i) for i in range(60)}) == 60
    entries = [Entry(name=f"m{i}", evaluation=an_evaluation(), history=a_history(200)) for i in range(10)]
    page = render(entries, title="t")
    assert len(page) < 1_000_000
    assert len(charts_of(page)) == 8


@pytest.mark.parametrize(
    "entry",
    [
        Entry(name="nothing", evaluation=None),
        Entry(name="only trained", evaluation=None, history=a_history(1)),
        Entry(name="only evaluated", evaluation=an_evaluation()),
        Entry(name="no gallery", evaluation=an_evaluation(gallery=())),
        Entry(name="no curve", evaluation=an_evaluation(curve=())),
        Entry(name="no scores", evaluation=an_evaluation(scores=())),
        Entry(name="one point", evaluation=an_evaluation(curve=(CurvePoint(eps=0.0, correct=1, total=2),))),
        Entry(name="no radius", evaluation=an_evaluation(eps=0.0)),
        Entry(name="broken", evaluation=None, history=a_history(loss=math.nan, lr=None, eps=math.inf)),
        Entry(name="sparse", evaluation=None, history=({}, {"epoch": None, "loss": 1}, {"epoch": 2})),
        Entry(name="negative", evaluation=None, history=a_history(loss=-3.2)),
        Entry(name="grey and colour", evaluation=an_evaluation(mixed=True)),
    ],
    ids=lambda entry: entry.name,
)
def test_whatever_is_missing_the_page_is_whole(entry: Entry) -> None:
    text = render([entry], title="t")
    page = Page(text)
    assert page.open == []
    assert entry.name in page.text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    for svg in charts_of(text).values():
        for path in svg.iter("path"):
            assert not re.search(r"[^MLHVZacvh\d.,\s-]", path.attrib["d"].replace("e-", ""))
    scores_table([entry])


def test_training_charts_show_what_was_recorded() -> None:
    text = render([Entry(name="a", evaluation=None, history=a_history(lr=None))], title="t")
    assert {key for key in charts_of(text) if key.startswith("training")} == {
        f"training-{key}" for key in ("validation_robust", "validation_clean", "train_accuracy", "loss", "eps")
    }
    svg = charts_of(text)["training-validation_clean"]
    marks = [mark for mark in svg.iter("path") if mark.attrib.get("class") == "mark"]
    assert [mark.findtext("title") for mark in marks] == [f"a: 90% at epoch {e}" for e in (1, 2, 3, 4)]


def test_write_puts_the_rendered_page_in_place(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write(path, [an_entry()], title="t", intro="hello")
    assert path.read_text(encoding="utf-8") == render([an_entry()], title="t", intro="hello")
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_a_report_of_nothing_raises() -> None:
    with pytest.raises(UserError, match="at least one model"):
        render([], title="t")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_contrast_in_light_and_dark() -> None:
    text = render([an_entry()], title="t")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    )
    for theme in (light, dark):
        words, lines = ("text", "soft", "good", "bad", "doubt", "accent"), tuple(f"c{i}" for i in range(6))
        for name in (*words, *lines):
            for ground in ("page", "panel"):
                a, b = sorted((luminance(theme[name]), luminance(theme[ground])))
                assert (b + 0.05) / (a + 0.05) >= (4.5 if name in words else 3.0), (name, ground)
