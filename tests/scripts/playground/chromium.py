"""A real browser for tests: Chromium without a window, driven by Debian's chromedriver."""

import contextlib
import json
import shutil

import pytest

# As root, and without the network that Chromium itself would use
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,844",
]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def why_not():
    """Why this machine cannot drive a browser; "" if it can."""
    if not any(map(shutil.which, PROGRAMS)) or not shutil.which("chromedriver"):
        return "no Chromium with its chromedriver is installed (apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed (requirements-dev.txt)"
    return ""


needs_chromium = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is a browser")


@contextlib.contextmanager
def chromium(profile):
    """A driver within the block. profile: a new folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, PROGRAMS)))
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    # A dialog is left open, so that a test can see that there is one.
    options.set_capability("unhandledPromptBehavior", "ignore")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def requested(driver):
    """The addresses that the browser has asked since the last call, by its own log."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            found.append(message["params"]["request"]["url"])
        if message["method"] == "Network.webSocketCreated":
            found.append(message["params"]["url"])
    return found
