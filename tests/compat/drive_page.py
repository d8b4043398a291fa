"""Opens reports in headless Chromium as a reader would, and prints what it saw as JSON.

    python drive_page.py CHROMIUM FOLDER PAGE…      # screenshots go to FOLDER

Runs in an environment with playwright, which is no part of the project's.
"""

import json
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

# Words of the charts that leave their chart's place, and the narrowest cell that has more than a number.
CUT_OFF = """texts => texts.filter(text => {
  const [own, place] = [text, text.closest(".chart")].map(one => one.getBoundingClientRect());
  return own.width && (own.left < place.left - 1 || own.right > place.right + 1);
}).map(text => text.textContent)"""
NARROWEST = """cells => Math.min(
  ...cells.filter(cell => /[a-z]{4}/.test(cell.innerText)).map(cell => cell.offsetWidth)
)"""
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


def count(page: Page) -> int:
    """The rows that pass the filters, once the page has counted them."""
    while not (text := page.inner_text("#count")).endswith("rows"):
        page.wait_for_timeout(20)
    return int(text.split()[0])


def filtered(page: Page, name: str, text: str) -> int:
    """The rows that pass the filters once this field has this text."""
    page.fill(f"#filters input[name={name}]", text)
    return count(page)


def open_changed(page: Page) -> list[str]:
    """Where the conversations are from that the links of changed questions open."""
    opened = []
    for link in page.locator(".changed a").all():
        link.click()
        page.wait_for_selector("#one[open] .turn")
        opened.append(page.inner_text("#one .where"))
        page.keyboard.press("Escape")
        page.wait_for_selector("#one", state="hidden")
    return opened


def use_table(page: Page) -> dict[str, Any]:
    """Filter, sort and open rows, the latter with the keyboard alone."""
    seen: dict[str, Any] = {"all": count(page)}
    seen["of two hops"] = filtered(page, "hop", "2")
    seen["hops shown"] = sorted(set(page.locator("#rows td[data-column=hop]").all_inner_texts()))
    filtered(page, "hop", "")
    if page.locator("#filters input[name=stage]").count():
        filtered(page, "stage", "evaluate")
        seen["columns of evaluations"] = page.locator("#rows th[data-column]:visible").all_inner_texts()
        filtered(page, "stage", "")
    seen["with text"] = filtered(page, "text", "i look it up")  # only in the attempts
    filtered(page, "text", "")
    page.click("#rows th[data-column=score] button")
    page.click("#rows th[data-column=score] button")
    page.wait_for_selector('#rows th[data-column=score][aria-sort="descending"]')
    seen["scores"] = page.locator("#rows td[data-column=score]").all_inner_texts()
    page.locator("#rows tbody button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#one[open] .turn")
    seen["first"] = page.inner_text("#one .where")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('#one .where').innerText !== before", arg=seen["first"]
    )
    seen["second"] = page.inner_text("#one .where")
    page.keyboard.press("Escape")
    page.wait_for_selector("#one", state="hidden")
    return seen


def use_first_screen(page: Page) -> dict[str, Any]:
    """What the first screen holds, and where its links and its button lead."""
    height = page.viewport_size["height"] if page.viewport_size else 0
    bottoms = page.locator(".first h2").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect().bottom)"
    )
    seen: dict[str, Any] = {"on the first screen": [bottom < height for bottom in bottoms]}
    seen["folds open"] = page.locator("details.fold").evaluate_all(
        "all => all.map(one => [one.id, one.open])"
    )
    link = page.locator(".asked a").first
    if link.count():
        seen["asked"] = link.inner_text()
        link.click()
        page.wait_for_selector("#one[open] .turn")
        seen["opened"] = page.locator("#one .pair dd").first.inner_text()
        page.keyboard.press("Escape")
        page.wait_for_selector("#one", state="hidden")
    if page.locator("#next ~ .command").count():
        page.click("#next ~ .command button")
        page.wait_for_function("() => document.querySelector('#next ~ .command button').innerText !== 'copy'")
        seen["command"] = page.inner_text("#next ~ .command code")
        seen["copied"] = page.evaluate("navigator.clipboard.readText()")
    page.click('.contents a[href="#h-about"]')
    page.wait_for_selector("#h-about[open]")
    seen["about opens"] = page.locator("#h-about").evaluate("fold => fold.open")
    page.evaluate("scrollTo(0, 0)")
    return seen


def visit(browser: Browser, path: str, folder: Path) -> dict[str, Any]:
    """Everything that is asserted about one page."""
    seen: dict[str, Any] = {"messages": [], "requests": []}
    # The page's policy forbids `eval`, with which playwright polls. So escaping has to do without the policy.
    context = browser.new_context(viewport={"width": 1440, "height": 900}, bypass_csp=True)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.on("console", lambda message: seen["messages"].append(message.text))
    page.on("pageerror", lambda error: seen["messages"].append(str(error)))
    page.on("dialog", lambda dialog: (seen["messages"].append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.goto(Path(path).as_uri())
    page.wait_for_selector("body[data-drawn]")
    for fold in page.locator("details:not([open]):has(.chart) > summary").all():
        fold.click()
    page.wait_for_function("[...document.querySelectorAll('.chart')].every(one => one.querySelector('svg'))")
    charts = page.locator(".chart")
    seen["charts"] = charts.count()
    seen["drawn"] = sum(
        charts.nth(place).locator("svg path[d]").count() > 0 for place in range(charts.count())
    )
    seen["changed"] = open_changed(page)
    seen["first"] = use_first_screen(page) if page.locator(".firsts").count() else None
    if page.locator("#rows tbody tr").count():
        seen["table"] = use_table(page)
    context.close()
    strict = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = strict.new_page()  # the policy in force
    page.on("console", lambda message: seen["messages"].append(message.text))
    page.goto(Path(path).as_uri())
    page.wait_for_selector("body[data-drawn]")
    seen["folded"] = page.locator("details:not([open]) .chart").count()
    seen["drawn under the policy"] = page.locator(".chart svg").count()
    seen["width on a phone"] = page.evaluate("document.documentElement.scrollWidth")
    seen["cut off on a phone"] = page.locator(".chart svg text").evaluate_all(CUT_OFF)
    seen["narrowest on a phone"] = page.locator(".checks td, .wide td").evaluate_all(NARROWEST)
    page.screenshot(path=folder / f"{Path(path).parent.name}-phone.png")
    strict.close()
    return seen


def main() -> None:
    """Visit the pages in one browser."""
    executable, folder, *pages = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=QUIET)
        print(json.dumps({path: visit(browser, path, Path(folder)) for path in pages}))
        browser.close()


if __name__ == "__main__":
    main()
