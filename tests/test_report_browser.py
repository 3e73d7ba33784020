"""The report in a real browser: it shows, fits a phone, follows the colour scheme and fetches nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from steelman.report import Entry
from steelman.report.html import write
from tests.browser import chromium, messages, prefer, resize
from tests.test_report import a_history, an_entry
from tests.test_report_verdict import a_cascade, a_flag

pytestmark = pytest.mark.browser

LONG = "a model whose name is long and has_no_place_to_break_" + 40 * "x"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    entries = [an_entry("plain"), an_entry(LONG, mixed=True), Entry(name="raw", evaluation=None, history=a_history(30))]
    write(path, entries, title="A <b>report</b>", intro="For a browser.")
    return Path(path).as_uri()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(opened: webdriver.Chrome, page: str) -> webdriver.Chrome:
    resize(opened, 1280)
    prefer(opened, "light")
    for log in ("browser", "performance"):
        messages(opened, log)
    opened.get(page)
    return opened


def test_the_page_shows_without_a_complaint(browser: webdriver.Chrome) -> None:
    assert messages(browser, "browser") == []
    assert browser.title == "A <b>report</b>"
    for selector in (
        "h1",
        ".facts",
        "table.scores",
        "#curve .chart.wide",
        "#training .chart",
        "#gallery .card",
        "#settings summary",
    ):
        found = browser.find_elements(By.CSS_SELECTOR, selector)
        assert found, selector
        assert all(element.is_displayed() and element.size["height"] > 0 for element in found), selector
    assert not browser.find_element(By.CSS_SELECTOR, ".chart.narrow").is_displayed()


def test_the_style_sheet_passes_the_content_security_policy(browser: webdriver.Chrome) -> None:
    stroke = browser.find_element(By.CSS_SELECTOR, "#curve .chart.wide .stroke")
    assert stroke.value_of_css_property("fill") == "none"
    assert browser.find_element(By.CSS_SELECTOR, ".triple img").value_of_css_property("image-rendering") == "pixelated"


def test_the_images_are_decoded(browser: webdriver.Chrome) -> None:
    widths = browser.execute_script("return [...document.images].map(image => image.complete && image.naturalWidth)")
    assert widths == [8] * 9


def test_bars_are_as_long_as_the_scores(browser: webdriver.Chrome) -> None:
    shares = browser.execute_script(
        "return [...document.querySelectorAll('.scores tbody tr:first-child .bar')].map(bar =>"
        " bar.querySelector('.fill').getBoundingClientRect().width / bar.getBoundingClientRect().width)"
    )
    assert shares == pytest.approx([0.95, 0.6, 0.59], abs=0.01)


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_the_page_does_not_scroll_sideways(browser: webdriver.Chrome, width: int) -> None:
    resize(browser, width)
    browser.execute_script("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_on_a_phone_the_table_restacks_and_the_small_chart_shows(browser: webdriver.Chrome) -> None:
    resize(browser, 390)
    assert browser.find_element(By.CSS_SELECTOR, ".chart.narrow").is_displayed()
    assert not browser.find_element(By.CSS_SELECTOR, ".chart.wide").is_displayed()
    cells = browser.find_elements(By.CSS_SELECTOR, ".scores tbody tr:first-child > *")
    places = [cell.rect for cell in cells]
    assert len({place["x"] for place in places}) == 1
    assert all(place["x"] >= 0 and place["x"] + place["width"] <= 390 for place in places)
    assert [place["y"] for place in places] == sorted({place["y"] for place in places})


def test_dark_mode_turns_the_page_dark(browser: webdriver.Chrome) -> None:
    def brightness() -> int:
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    light = brightness()
    prefer(browser, "dark")
    assert brightness() < 150 < 600 < light


def test_nothing_is_fetched_but_the_page(browser: webdriver.Chrome, page: str) -> None:
    names = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in names if not name.startswith("data:")] == []
    events = [json.loads(text)["message"] for text in messages(browser, "performance")]
    asked = [m["params"]["request"]["url"] for m in events if m["method"] == "Network.requestWillBeSent"]
    assert page in asked
    assert [url for url in asked if url != page and not url.startswith("data:")] == []


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", LONG)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of three verdicts: two classes, ten of which one has a long name, and a hundred."""
    path = tmp_path_factory.mktemp("verdict") / "report.html"
    ten = tuple(tuple(15 if i == j else (i + j) % 2 for j in range(10)) for i in range(10))
    hundred = tuple(tuple(2 - (i == j) if abs(i - j) < 2 else 0 for j in range(100)) for i in range(100))
    flags = (a_flag(raised=True, text=LONG), a_flag("one step stronger"))
    evaluations = {
        "sound": a_cascade(),
        LONG: a_cascade(classes=CLASSES, confusion=ten, right=(), trust="suspect", reasons=(LONG,), flags=flags),
        "many": a_cascade(
            classes=tuple(map(str, range(100))), confusion=hundred, right=(), trust="invalid", complete=False
        ),
    }
    entries = [Entry(name=name, evaluation=evaluation) for name, evaluation in evaluations.items()]
    write(path, entries, title="Verdicts")
    return path.as_uri()


@pytest.fixture
def verdict(opened: webdriver.Chrome, judged: str) -> webdriver.Chrome:
    resize(opened, 1280)
    prefer(opened, "light")
    messages(opened, "browser")
    opened.get(judged)
    opened.execute_script("document.querySelectorAll('details').forEach(element => element.open = true)")
    return opened


@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_of_a_verdict_shows_and_fits(verdict: webdriver.Chrome, width: int) -> None:
    resize(verdict, width)
    assert messages(verdict, "browser") == []
    assert verdict.execute_script("return window.innerWidth") == width
    assert verdict.execute_script("return document.documentElement.scrollWidth") <= width
    kind = "wide" if width > 640 else "narrow"
    for selector in (".verdict .shape", ".checks li", f"#stages .chart.{kind}", "#margins .column", ".confusion td"):
        found = verdict.find_elements(By.CSS_SELECTOR, selector)
        assert found, selector
        assert all(element.is_displayed() and element.size["height"] > 0 for element in found), selector
    # What lies outside the page is inside a region that scrolls by itself.
    outside = verdict.execute_script(
        "return [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg, .hidden')"
        " && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    levels = verdict.execute_script("return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[:3] == [1, 2, 3]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_wide_table_scrolls_in_its_own_region_and_keeps_its_names(verdict: webdriver.Chrome) -> None:
    resize(verdict, 360)
    region = verdict.find_element(By.CSS_SELECTOR, "#stages .scroll")
    inside, room = verdict.execute_script("return [arguments[0].scrollWidth, arguments[0].clientWidth]", region)
    assert inside > room
    name = region.find_element(By.CSS_SELECTOR, "tbody th")
    before = name.rect["x"]
    verdict.execute_script("arguments[0].scrollLeft = 200", region)
    assert verdict.execute_script("return arguments[0].getBoundingClientRect().x", name) == pytest.approx(before, abs=1)


def test_trusts_differ_in_colour_and_in_form(verdict: webdriver.Chrome) -> None:
    boxes = verdict.find_elements(By.CSS_SELECTOR, ".verdict")
    assert len({box.find_element(By.CSS_SELECTOR, ".trust").value_of_css_property("color") for box in boxes}) == 3
    assert len({box.value_of_css_property("border-left-style") for box in boxes}) == 3
    assert len({box.find_element(By.CSS_SELECTOR, ".body").get_attribute("d") for box in boxes}) == 3


def test_cells_are_tinted_and_readable(verdict: webdriver.Chrome) -> None:
    def tint(selector: str) -> str:
        return verdict.find_element(By.CSS_SELECTOR, f".confusion {selector}").value_of_css_property("background-color")

    assert len({tint(".s0"), tint(".s2:not(.held)"), tint(".s5.held"), tint(".s3.held")}) == 4
    for width in (1280, 360):
        resize(verdict, width)
        sizes = verdict.execute_script(
            "return [...document.querySelectorAll('.confusion td')].map(e => parseFloat(getComputedStyle(e).fontSize))"
        )
        assert min(sizes) >= 12
