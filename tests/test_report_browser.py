"""The report in a real browser: it shows, fits a phone, follows the colour scheme and fetches nothing."""

from __future__ import annotations

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
