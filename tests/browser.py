"""A headless Chromium for tests; skips, with the reason, where there is none."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser with a fresh profile in the folder `profile`, which keeps the console's messages."""
    binary = next(filter(None, map(shutil.which, _BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if binary is None:
        pytest.skip(f"no Chromium found; looked for {', '.join(_BROWSERS)}")
    if driver is None:
        pytest.skip("no chromedriver found")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


def resize(browser: webdriver.Chrome, width: int, height: int = 900) -> None:
    """Give the page a viewport of exactly this size; a window cannot be as narrow as a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(browser: webdriver.Chrome, scheme: str) -> None:
    """Ask for the "light" or the "dark" colour scheme."""
    wish = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)


def messages(browser: webdriver.Chrome, log: str) -> list[str]:
    """What a log ("browser", the console, or "performance", the network) gathered since it was last asked."""
    entries: list[dict[str, str]] = browser.get_log(log)  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries]
