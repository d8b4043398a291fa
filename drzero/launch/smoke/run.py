"""The smoke test on its machine: `python -m drzero.launch.smoke.run challenger compute=2xa10g …`."""

import sys
from collections.abc import Iterable
from pathlib import Path

from drzero.cli import main as drzero
from drzero.launch.smoke.evidence import verdicts
from drzero.launch.smoke.needs import Verdict, needs_of
from drzero.launch.smoke.probes import probes_for, try_out
from drzero.launch.smoke.witness import Witness
from drzero.ops.errors import UserError
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.metrics import is_training, read_metrics
from drzero.stages.flight_recorder import recorder_folder


def main(stage: str, *overrides: str) -> int:
    """Probe, run, judge. Returns the run's exit code, or 1 if a needed mechanism is not proven."""
    try:
        config = resolve(compose_stage(stage, overrides))
    except UserError as refused:
        print(f"smoke: {refused}", file=sys.stderr)
        return refused.exit_code
    needs, run_dir = needs_of(config), Path(config.run.dir)
    if needs.has_gpus and _failed("probe", map(try_out, probes_for(needs, run_dir))):
        print("smoke: not started, since the run needs what is not proven here", file=sys.stderr)
        return 1
    log = run_dir / "logs" / "trainer.log"
    before = log.stat().st_size if log.is_file() else 0
    with Witness(recorder_folder(run_dir)) as seen:
        code = drzero([stage, *overrides])
    if code:
        return code
    steps = {number: step for number, step in read_metrics(run_dir).items() if is_training(step)}
    text = log.read_bytes()[before:].decode(errors="replace")
    return 1 if _failed("run", verdicts(needs, seen, text, steps)) else 0


def _failed(when: str, judged: Iterable[Verdict]) -> bool:
    fails = False
    for verdict in judged:
        print(f"[{when}] {verdict}", flush=True)
        fails |= verdict.fails
    return fails


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
