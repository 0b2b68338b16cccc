"""The web page in Chromium; `python -m tests.clients.web_page PNG` takes its picture."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

from tests.speech_server import serving

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
SIZE = {"width": 1200, "height": 800}
WAIT_MS = 60_000  # however busy the machine is
SHOWN_S = 3.0
IS_SHOWN = """async (second) => {
  const {player} = await import('/app.js');
  return player.position > second && document.querySelector('.now') !== null;
}"""


def chromium() -> str | None:
    """Return the path of this machine's Chromium, if it has one."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Run a headless Chromium, whose microphone hears beeps."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


def open_page(browser: Browser, address: str, **options: object) -> Page:
    """Return the page of a server in a context of its own."""
    page = browser.new_context(**{"viewport": SIZE, **options}).new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"http://{address}/")
    return page


def main(path: str) -> None:
    """Write a picture of the page while it speaks."""
    with serving(flags=["--http-port", "0"]) as server, browsing() as browser:
        page = open_page(browser, str(server.http), color_scheme="light")
        page.wait_for_selector(".voice")
        page.click("#speak")
        while not page.evaluate(IS_SHOWN, SHOWN_S):
            page.wait_for_timeout(20)
        page.screenshot(path=path)


if __name__ == "__main__":
    main(sys.argv[1])
