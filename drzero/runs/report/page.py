"""The page: sections, charts and trajectories of a run in one HTML file that loads nothing.

Nothing from a run is executed: text is escaped (`text`), data is in JSON blocks without a `<`, and the policy
allows two scripts by their hashes, and no connection except a live page's to its server.
"""

import base64
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from markupsafe import Markup
from vl_convert import javascript_bundle

from data.examples import Examples
from drzero.ops.files import atomic_write
from drzero.recipe.compose import RESOLVED
from drzero.runs.loop_folder import progress, stage_runs, stages, versions
from drzero.runs.report import loop
from drzero.runs.report.answers import asked, counted, next_step, troubles
from drzero.runs.report.charts import Chart, metric_lines, page_spec, training_charts
from drzero.runs.report.checklist import ComponentState, RunCheck, component_states, training_checks
from drzero.runs.report.figures import Tally
from drzero.runs.report.machine import cost_of, machine_of
from drzero.runs.report.table import PACK_SIZE, TrajectoryTable
from drzero.runs.report.text import FOLDER, TEMPLATES, visible
from drzero.runs.report.trajectories import count_lines, read_trajectories, trajectory_files
from drzero.runs.report.verdict import verdict
from drzero.runs.report.warm_start import demonstrations, left_out, measured
from drzero.runs.run_folder import MANIFEST, RunFolder
from drzero.stages.examples import read_examples
from drzero.stages.preview_report import cost_lines


def make_page(run: RunFolder, version: str | None = None) -> str:
    """The run's report as HTML. One with a `version` asks its server for it, and reloads if that changes."""
    table, tally, unreadable = _read(run)
    charts = _charts(run, tally)
    checks = training_checks(run, tally) if run.kind == "training" else []
    components = component_states(run)
    scripts = [_vega(), (FOLDER / "page.js").read_text(encoding="utf-8")]
    data = {
        "columns": table.columns,
        "rows": table.rows,
        "pack_size": PACK_SIZE,
        "charts": {chart.name: page_spec(chart) for chart in charts},
        "version": version,
    }
    return TEMPLATES.get_template("page.html.jinja").render(
        run=run,
        **_answers(run, table, tally, checks, components),
        facts=_facts(run, table),
        charts=charts,
        checks=checks,
        components=components,
        **_loop(run, table),
        scores=loop.score_rows(run),
        changes=loop.score_changes(run),
        pairs=[pair for folder in _syntheses(run) for pair in loop.pairs_by_hop(folder)],
        gates=[
            *(outcome for folder in _syntheses(run) for outcome in loop.gate_outcomes(folder)),
            *left_out(run),
        ],
        measured=measured(run),
        demonstrations=demonstrations(run),
        examples=_examples(run),
        preview=run.report if run.kind == "preview" and "cost" in run.report else None,
        preview_cost=list(cost_lines(run.report)) if run.kind == "preview" and "cost" in run.report else [],
        table=table,
        unreadable=unreadable,
        data=embedded_json(data),
        css=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts, is_live=version is not None),
    )


def _answers(
    run: RunFolder,
    table: TrajectoryTable,
    tally: Tally,
    checks: Sequence[RunCheck],
    components: Sequence[ComponentState],
) -> dict[str, Any]:
    """What a training run's page begins with."""
    if run.kind != "training":
        return {"verdict": None}
    judged, wrong = verdict(run, tally), troubles(run, checks, components)
    return {
        "verdict": judged,
        "asked": asked(table),
        "asked_title": {"hrpo": "What it asked", "grpo": "What it answered"}.get(
            str(run.setting("method")), "What it played"
        ),
        "troubles": wrong,
        "counted": counted(tally, checks),
        "next": next_step(run, judged, wrong),
    }


def _loop(run: RunFolder, table: TrajectoryTable) -> dict[str, Any]:
    """What a loop's page begins with."""
    if run.kind != "loop":
        return {"iterations": []}
    iterations = loop.iterations(run)
    return {
        "iterations": iterations,
        "loop_verdict": loop.loop_verdict(run),
        "progress": progress(run),
        "changed": loop.changed(run, table.listed),
        "order": loop.STAGES,
        "made": list(dict.fromkeys(name for one in iterations for name in one.made)),
    }


def waiting_page(reason: str) -> str:
    """A page for a folder without a run, which reloads every few seconds."""
    template = TEMPLATES.from_string(
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="5">'
        "<title>waiting</title><p>{{ reason }}</p></html>"
    )
    return template.render(reason=reason)


def _read(run: RunFolder) -> tuple[TrajectoryTable, Tally, list[str]]:
    parts = stage_runs(run) if run.kind == "loop" else [run]
    files = [path for part in parts for path in trajectory_files(part)]
    table = TrajectoryTable(sum(map(count_lines, files)))
    tally, unreadable = Tally(), list[str]()
    for part in parts:
        for trajectory in read_trajectories(part, unreadable):
            tally.add(trajectory)
            if part is not run:
                source = f"../{part.name}/{trajectory.source}"
                trajectory = replace(trajectory, stage=part.name, source=source)
            table.add(trajectory)
    table.finish()
    return table, tally, unreadable


def _charts(run: RunFolder, tally: Tally) -> list[Chart]:
    if run.kind == "training":
        return training_charts(run, tally)
    if run.kind == "warm-start":
        return metric_lines(run, (), ("loss",))
    return loop.score_charts(run)


def _syntheses(run: RunFolder) -> list[Path]:
    parts = stage_runs(run) if run.kind == "loop" else [run]
    return [part.folder for part in parts if part.kind in ("synthesize", "preview")]


def _examples(run: RunFolder) -> list[tuple[str, Examples]]:
    parts = stage_runs(run)[::-1] if run.kind == "loop" else [run]
    found = ((part.name, read_examples(part.folder)) for part in parts)
    return [(name, examples) for name, examples in found if examples]


def _facts(run: RunFolder, table: TrajectoryTable) -> dict[str, Any]:
    seconds = run.seconds
    tokens = run.result.get("tokens")
    first = run  # a loop's first stage has the model and the machine it began with
    if run.kind == "loop":
        begun = stages(run)
        seconds, tokens = math.fsum(s.seconds for s in begun), sum(s.tokens for s in begun)
        first = next(iter(stage_runs(run)), run)
    machine = machine_of(first)
    facts = {
        "run": run.name,
        "stage": {"hrpo": "challenger (HRPO)", "grpo": "solver (GRPO)", "environment": "train (GRPO)"}.get(
            str(run.setting("method")), run.kind
        ),
        "model": _model(first),
        "machine": machine,
        "engine": first.setting("actor_rollout_ref.rollout.name") or first.setting("solver.engine"),
        "took": _duration(seconds),
        "tokens": f"{tokens:,}" if isinstance(tokens, int) and tokens else None,
        "cost": cost_of(run, first.config, seconds) or (machine and "no price for this machine"),
        "trajectories": f"{table.total:,}" if table.total else None,
        "command": run.command,
        "config as run": f"{RESOLVED}.yaml" if run.config else None,
        "manifest": MANIFEST if run.kind == "loop" else None,
        "versions": versions(run) if run.kind == "loop" else run.versions,
        "unreadable": ", ".join(f"{what} of {name}" for name, what in run.unreadable.items()) or None,
        "folder": str(run.folder),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _model(run: RunFolder) -> str | None:
    """The model's name, or the end of its path."""
    named = (
        run.setting("actor_rollout_ref.model.path")
        or run.report.get("model")
        or run.setting("challenger" if run.kind != "warm-start" else "base_model")
    )
    return "/".join(str(named).rsplit("/", 2)[-2:]) if named else None


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.1f} minutes"


def embedded_json(data: Mapping[str, Any]) -> Markup:
    """JSON for a script block: in ASCII and without a `<`."""
    text = json.dumps(_plain(data), separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in value]
    return value


def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, cached: joining them takes two seconds of a core."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drzero"
    path = folder / f"vega-{metadata.version('vl-convert-python')}.js"
    with suppress(OSError):
        return path.read_text(encoding="utf-8")
    script = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with suppress(OSError):  # without a cache, the next page makes it again
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic_write(path, script)
    return script


def _policy(scripts: Sequence[str], *, is_live: bool) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    connects = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connects}; base-uri 'none'; form-action 'none'"
    )
