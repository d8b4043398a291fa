"""Which events of a run are worth a line on the console: `notice_of({"kind": "restart", …})`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["info", "warning", "error"]

CHECKPOINT_KIND, ALARM_KIND, STARTUP_KIND = "checkpoint", "alarm", "startup"

_LEVELS: dict[str, Level] = {
    **dict.fromkeys(("crash", "hung", "stall", "end"), "error"),
    **dict.fromkeys(("restart", "silent", "out_of_time", ALARM_KIND), "warning"),
}
_HIDDEN = ("cost",)
_SHOWN = 500  # characters of a line of a log
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
# Control characters except the line feed, and characters that reorder text, are invisible or invalid.
OBEYED = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


@dataclass(frozen=True)
class Notice:
    """One event of a run's component, for the user."""

    time: float
    component: str
    text: str
    level: Level = "info"

    def __str__(self) -> str:
        return f"[{self.component}] {self.text}"


def notice_of(event: Mapping[str, Any]) -> Notice | None:
    """Turn an event of `events.jsonl` into a notice, or None if only a post-mortem needs it."""
    kind, text = event.get("kind"), str(event.get("text", ""))
    failed = kind == "exit" and bool(event.get("code"))
    # The error that ends a run is in its `exit`, or the command prints it.
    if kind in _HIDDEN or (kind == "end" and not event.get("from_outside")):
        return None
    if kind == "start" and event.get("log"):
        text = f"{text}, log: {event['log']}"
    if kind == "stall":
        text = (
            f"no progress for {event.get('silent_s', 0):.0f} s in {event.get('phase')} of step "
            f"{event.get('step')}: {text}. Culprit: {event['component']}. Report: {event.get('report')}"
        )
    if event.get("first_error"):
        text = f"{text}; first error: {event['first_error']}"
    component = "watchdog" if kind == "stall" else str(event.get("component", ""))
    level = "error" if failed else _LEVELS.get(str(kind), "info")
    return Notice(float(event.get("time", 0.0)), plain(component), plain(text), level)


def shown_line(raw: bytes) -> str:
    """A line of another program's output, and of a progress bar that rewrites it only the last state."""
    return plain(raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


def shortened(line: str) -> str:
    """The beginning of a long line. Ray's word on a kill takes thousands of characters."""
    more = len(line) - _SHOWN
    return line if more <= 0 else f"{line[:_SHOWN]}… ({more:,} more characters in the log)"


def one_line(text: str) -> str:
    """`plain`, with spaces for line feeds."""
    return plain(text).replace("\n", " ")


def plain(text: str) -> str:
    """Strip colours from another program's text and make its control characters visible."""
    shown = _COLOURS.sub("", text).replace("\t", " ")
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), shown)
