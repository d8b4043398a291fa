"""Reads the docs' site in headless Chromium as a newcomer would, and prints what it saw as JSON.

    python drive_docs.py CHROMIUM SITE PHRASE…

Runs in an environment with playwright, which is no part of the project's.
"""

import json
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from drive_page import QUIET
from playwright.sync_api import Browser, Page, sync_playwright

WIDTHS = (1440, 1280, 390)
# What leaves the screen and nothing scrolls, and what scrolls.
CUT_OFF = """() => {
  const width = document.documentElement.clientWidth;
  const scrolls = one => ["auto", "scroll"].includes(getComputedStyle(one).overflowX);
  const wide = [...document.querySelectorAll("article *")].filter(one => {
    const { left, right } = one.getBoundingClientRect();
    if (right <= width + 1 && left >= -1) return false;
    for (let above = one; above; above = above.parentElement) if (scrolls(above)) return false;
    return true;
  });
  return wide.map(one => `${one.tagName} ${one.textContent.trim().slice(0, 60)}`);
}"""
SCROLLING_CODE = """() => [...document.querySelectorAll("pre code")]
  .filter(one => one.scrollWidth > one.clientWidth + 1)
  .map(one => one.textContent.slice(0, 60))"""
# The results stand in a shadow root, which the locators of playwright see through.
RESULTS = "links => links.map(link => new URL(link.href)).map(url => url.pathname + url.hash)"


class Quiet(SimpleHTTPRequestHandler):
    """The site on loopback, without a line for each request."""

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""


def search(page: Page, phrases: list[str]) -> dict[str, list[str]]:
    """The sections that the site's search shows for each phrase, in order."""
    page.click(".md-search__button")
    field = page.locator("input[role=combobox]")
    field.fill("install")
    page.locator("ol li > a:has(h2)").first.wait_for()  # the sections are indexed
    found = {}
    for phrase in phrases:
        field.fill(phrase)
        page.wait_for_timeout(300)
        found[phrase] = page.locator("ol li > a:has(h2)").evaluate_all(RESULTS)
    return found


def visit(browser: Browser, base: str, site: Path, phrases: list[str]) -> dict[str, Any]:
    """Everything that is asserted about the site."""
    seen: dict[str, Any] = {"messages": [], "outside": [], "cut off": [], "scrolling code": []}
    page = browser.new_page()
    page.on("console", lambda message: seen["messages"].append(message.text))
    page.on("pageerror", lambda error: seen["messages"].append(str(error)))
    page.on("request", lambda one: one.url.startswith(base) or seen["outside"].append(one.url))
    page.goto(base)
    page.wait_for_load_state("networkidle")
    seen["found"] = search(page, phrases)
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for name in pages:
            page.goto(base + name)
            seen["cut off"] += [f"{width} {name} {what}" for what in page.evaluate(CUT_OFF)]
            if width > 390:
                seen["scrolling code"] += [f"{width} {name} {what}" for what in page.evaluate(SCROLLING_CODE)]
    seen["pages"] = len(pages)
    return seen


def main() -> None:
    """Serve the site on loopback and visit it."""
    executable, folder, *phrases = sys.argv[1:]
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=QUIET)
        base = f"http://127.0.0.1:{server.server_port}/"
        print(json.dumps(visit(browser, base, Path(folder), phrases)))
        browser.close()


if __name__ == "__main__":
    main()
