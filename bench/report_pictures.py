"""The docs' two pictures of a run's page: its curves, and one trajectory.

    python -m venv /tmp/pictures && /tmp/pictures/bin/pip install playwright==1.65.2
    /tmp/pictures/bin/python bench/report_pictures.py outputs/checkpoints/demo docs

It writes report-curves.png and report-trajectory.png, in an environment with playwright and with `chromium`
on the path (Debian: apt-get install chromium).
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

_WIDTH = 1200
_ROW = "hop=2&searches=>0&attempts_right=1..4"
"""A question that earns the difficulty reward, as the page's address has its filters."""


def opened(browser: Browser, report: Path, scheme: str, height: int) -> Page:
    """The page, drawn, with the rows that the pictures are about."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": _WIDTH, "height": height})
    page.goto(f"{report.resolve().as_uri()}#{_ROW}")
    page.wait_for_selector("body[data-drawn]")
    return page


def main() -> None:
    """Write both pictures of the run folder in the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("target", type=Path)
    words = parser.parse_args()
    report = words.run / "report.html"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = opened(browser, report, "light", 980)
        page.evaluate("document.getElementById('h-charts').scrollIntoView()")
        page.screenshot(path=words.target / "report-curves.png")
        page = opened(browser, report, "dark", 820)
        page.locator("#rows tbody button").first.click()
        page.locator("#one .sides details", has=page.locator(".good")).first.locator("summary").click()
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=words.target / "report-trajectory.png")
        browser.close()


if __name__ == "__main__":
    main()
