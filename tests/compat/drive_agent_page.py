"""Uses the agent's page in headless Chromium as its visitor would, and prints what it saw as JSON.

    python drive_agent_page.py CHROMIUM FOLDER ADDRESS VISIT      # screenshots go to FOLDER

Runs in an environment with playwright, which is no part of the project's.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Browser, Page, Route, sync_playwright

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
IDLE = "#ask:not(.stop)"
Seen = dict[str, Any]


def ask(page: Page, question: str) -> None:
    """Type a question where the focus is, and wait until it has ended."""
    number = page.locator("article").count() + 1
    page.keyboard.type(question)
    page.keyboard.press("Enter")
    page.wait_for_selector(f"article:nth-child({number}) .state")
    page.wait_for_selector(IDLE)


def said(page: Page) -> Seen:
    """What the last exchange shows of each side."""
    sides = page.locator("article").last.locator(".sides > section")
    return {
        part: [sides.nth(n).locator(selector).all_inner_texts() for n in range(sides.count())]
        for part, selector in (("answers", ".answer"), ("states", ".state"), ("marks", "mark"))
    }


def by_keyboard(page: Page) -> Seen:
    """A question, a follow-up and a new start, with the keyboard alone."""
    page.keyboard.type("Where does Velmar lie?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".steps li:not(.waits) summary")
    seen: Seen = {"early": [page.locator(".steps li").first.inner_text(), page.locator(".answer").count()]}
    page.wait_for_selector(IDLE)
    seen["first"] = said(page)
    seen["told"] = page.inner_text("#said")
    ask(page, "Who founded Velmar?")
    seen["second"] = said(page)
    box = page.locator(".answer").last.bounding_box()
    seen["second in view"] = 0 < box["y"] < page.locator("#form").bounding_box()["y"]
    page.keyboard.press("Shift+Tab")  # from the question to the last passage
    page.keyboard.press("Enter")
    focus = page.locator(":focus")
    seen["opened"] = focus.evaluate("summary => summary.parentElement.open && summary.innerText")
    seen["outline"] = focus.evaluate("one => getComputedStyle(one).outlineStyle")
    page.locator("#over").focus()
    page.keyboard.press("Enter")
    seen["left"] = page.locator("article").count()
    ask(page, "Who knows?")
    return seen | {"third": said(page)}


def hostile(page: Page) -> Seen:
    """An answer and a passage that are HTML."""
    ask(page, "Who is hostile?")
    page.locator("summary").last.click()
    elements = page.locator("main :is(img, script)").count()
    return {"text": page.inner_text("main"), "elements": elements, **said(page)}


def two_sides(page: Page) -> Seen:
    """A comparison on a wide and on a narrow screen."""
    page.check("#compare")
    page.focus("#question")
    ask(page, "Where does Velmar lie?")
    sides = page.locator(".sides > section")
    wide = [sides.nth(n).bounding_box() for n in range(2)]
    page.set_viewport_size({"width": 390, "height": 844})
    narrow = [sides.nth(n).bounding_box() for n in range(2)]
    return {
        "names": page.locator(".sides h3").all_inner_texts(),
        "next to each other": wide[0]["y"] == wide[1]["y"] and wide[0]["x"] < wide[1]["x"],
        "below each other": narrow[0]["x"] == narrow[1]["x"] and narrow[0]["y"] < narrow[1]["y"],
        "width on a phone": page.evaluate("document.documentElement.scrollWidth"),
        "background": page.evaluate("getComputedStyle(document.body).backgroundColor"),
        **said(page),
    }


def stop(page: Page) -> Seen:
    """A question that is stopped while it searches: by Esc, then by the button."""
    seen: Seen = {}
    for way in ("key", "button"):
        page.fill("#question", "Where does Velmar lie?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".steps .waits b")
        if way == "key":
            page.keyboard.press("Escape")
        else:
            page.click("#ask")
        page.wait_for_selector(IDLE)
        seen[way] = [*said(page)["states"][0], page.input_value("#question")]
    return seen


def token(page: Page) -> Seen:
    """A door: left, tried with a wrong token, entered, and not asked for again in this tab."""
    page.keyboard.type("Where does Velmar lie?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#door[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector(IDLE)
    seen: Seen = {"left": [*said(page)["states"][0], page.input_value("#question")]}
    page.keyboard.press("Enter")
    for guess in ("other", "planted-token"):
        page.wait_for_selector("#door[open]")
        page.keyboard.type(guess)
        seen["refused"] = page.inner_text("#refused")
        page.keyboard.press("Enter")
        page.wait_for_selector("#refused:not(:empty)" if guess == "other" else ".answer")
    page.reload()
    ask(page, "Where does Velmar lie?")
    kept = page.evaluate("[localStorage.length, sessionStorage.length]")
    return seen | {"entered": said(page), "kept": kept}


def faults(page: Page) -> Seen:
    """A server that is gone, one that ends early, and a refusal."""

    def ending(route: Route) -> None:
        event = 'data: {"side": 0, "model": "m", "searching": ["x"]}\n\n'
        route.fulfill(status=200, content_type="text/event-stream", body=event)

    def busy(route: Route) -> None:
        route.fulfill(status=429, json={"error": {"message": "ask again in a moment"}})

    seen: Seen = {}
    for name, act in (("gone", lambda route: route.abort()), ("early", ending), ("busy", busy)):
        page.route("**/ask", act)
        page.fill("#question", "Where?")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"article:nth-child({len(seen) + 1}) .state")
        seen[name] = said(page)["states"][0]
        page.unroute("**/ask")
    return seen


VISITS: dict[str, Callable[[Page], Seen]] = {
    one.__name__: one for one in (by_keyboard, hostile, two_sides, stop, token, faults)
}


def visit(browser: Browser, folder: str, address: str, name: str) -> Seen:
    """What a visit saw, and what the page said on the console and asked for."""
    heard: Seen = {"messages": [], "requests": []}
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.on("console", lambda message: heard["messages"].append(message.text))
    page.on("pageerror", lambda error: heard["messages"].append(str(error)))
    page.on("dialog", lambda dialog: (heard["messages"].append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: heard["requests"].append(request.url.removeprefix(address)))
    page.goto(address)
    seen = VISITS[name](page)
    page.screenshot(path=f"{folder}/{name}.png")
    context.close()
    return seen | heard


def main() -> None:
    """Make the visit."""
    executable, folder, address, name = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=QUIET)
        print(json.dumps(visit(browser, folder, address, name)))
        browser.close()


if __name__ == "__main__":
    main()
