"""docs/metrics.md has every metric of the code, and no other; H, K, N, NAME and METHOD stand for any word."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry

from drzero.recipe.metrics import ALARMS, read_metrics
from search.serving.metrics import Metrics
from verl_ext.engine.api_server import EngineCollector
from verl_ext.method.challenger_reward import IntegrityFault
from verl_ext.method.trajectory import Trajectory, Turn
from verl_ext.trainer import collapse, step_metrics
from verl_ext.trainer.step_rows import StepRow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
OURS = [name for name in SECTIONS if name not in ("To look at first", "Of veRL", "Of the services")]
PREFIX = "drzero/"


def names(section: str) -> list[str]:
    """The metrics in the first column of a section's tables."""
    cells = re.findall(r"^\| (`[^|]+`) \|", SECTIONS[section], re.MULTILINE)
    return re.findall("`([^`]+)`", " ".join(cells))


def pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\b(METHOD|NAME)\b|(?<=_)[HN]$|(?<=/)K(?=_)", r"[\\w-]+", name))


def row(hop: int, prompt: str, **reward: Any) -> StepRow:
    parts = dict.fromkeys(("score", "difficulty", "format", "think", "tool", "answer_part", "f1"), 0.5)
    asked = {"integrity": True, "integrity_fault": None, "hop_fault": None, "k": 1, "n": 5, "valid": True}
    texts = {"question": "Who made it?", "answer": "Ada Vell"}
    reward = parts | asked | texts | reward
    return StepRow(f"{prompt}_0_0", False, "search_zero", {"hop": hop}, reward, Trajectory((Turn("t"),)), 0)


AGENT = {"places": {}, "calls": [], "faults": [{"name": "raised", "text": "it raised ValueError"}]}


def logged() -> set[str]:
    """What the code's own functions log of two hops, and what a recorded run did."""
    rows = [row(1, "a"), row(2, "a", score=1.0), row(2, "b")]
    infos = {"score": [1.0], "f1": [1.0], "valid": [True], "hop": [2]}
    parts = json.dumps({"exact": 1.0})
    episode = {"success": True, "undeclared_calls": 0, "ended": "environment", "parts": parts}
    played = {"score": [1.0], "success": [1.0], "parts": [parts], "valid": [True]}
    made = {
        **step_metrics.rollout_metrics(rows, 3),
        **step_metrics.challenger_metrics(rows),
        **step_metrics.solver_metrics(rows),
        **step_metrics.validation_metrics(infos, 1),
        **step_metrics.environment_metrics([replace(row(0, "a", **episode), agent=AGENT)]),
        **step_metrics.environment_validation(played, 1),
        **collapse.collapse_metrics(rows, ["a", "a", "b"], [[-0.1]] * 3),
    }
    recorded = {key for step in read_metrics(ROOT / "tests" / "recorded" / "demo").values() for key in step}
    return {*made, *recorded, ALARMS, f"{collapse.ALARM}entropy"}


DOCUMENTED = {name: pattern(name) for section in OURS for name in names(section)}
LOGGED = {name.removeprefix(PREFIX) for name in logged() if name.startswith(PREFIX)}


def test_the_page_is_read():
    assert len(DOCUMENTED) > 60 and len(LOGGED) > 60


@pytest.mark.parametrize("name", sorted(LOGGED))
def test_a_metric_of_the_code_is_documented_once(name):
    assert len([shown for shown, matches in DOCUMENTED.items() if matches.fullmatch(name)]) == 1


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_a_documented_metric_is_one_of_the_code(name):
    assert any(DOCUMENTED[name].fullmatch(key) for key in LOGGED)


def test_every_name_that_the_code_spells_out_is_documented():
    spelt = {
        name
        for room in ("verl_ext", "drzero")
        for path in (ROOT / room).rglob("*.py")
        for name in re.findall(r'"drzero/((?!policies/)[a-z]\w*/\w+)"', path.read_text(encoding="utf-8"))
    }
    assert len(spelt) > 20
    assert {name for name in spelt if not any(m.fullmatch(name) for m in DOCUMENTED.values())} == set()


def test_every_alarm_and_every_missing_part_of_a_pair_has_its_line():
    full = {"yes_no_share": 1.0, "number_share": 1.0, "self_similarity": 1.0, "duplicate_share": 1.0}
    full |= {"zero_variance_share": 1.0, "searched_share": 0.0, "entropy": 0.01, "response_tokens": 9.0}
    full |= {"format": 1.0, "difficulty": 0.0}
    alarms = collapse._alarms(full, {"response_tokens": 1.0, "difficulty": 1.0})
    assert {f"`{alarm.name}`" in SECTIONS["Signs of collapse"] for alarm in alarms} == {True}
    assert {f"questions/{fault}" for fault in get_args(IntegrityFault)} <= set(DOCUMENTED)


def test_the_services_metrics_are_those_of_the_services():
    registry = CollectorRegistry()
    stats = SimpleNamespace(
        **dict.fromkeys(("requests", "tokens_in", "tokens_out", "prefix_tokens_reused", "decode_steps"), 0),
        **dict.fromkeys(("running", "waiting", "prefix_cache_bytes"), 0),
    )
    registry.register(EngineCollector(SimpleNamespace(stats=lambda: stats)))  # type: ignore[arg-type]
    families = [*Metrics().registry.collect(), *registry.collect()]
    assert sorted(names("Of the services")) == sorted(family.name for family in families)
