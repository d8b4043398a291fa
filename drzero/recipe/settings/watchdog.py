"""How a run is watched: queue snapshots, the watchdog, and collapse alarms."""

from dataclasses import dataclass

from drzero.recipe.settings.key import Number, key


@dataclass
class Flow:
    """Recording of the sample flow, in RUN_DIR/flow.jsonl."""

    every_s: Number = key(5, "Seconds between snapshots of queues and buffer.", above=0)
    log_every_s: Number = key(30, "Seconds between console lines with verbose=true.", above=0)
    workers: bool = key(False, "Add a line per worker: finished, rate, waiting for.")


@dataclass
class Watchdog:
    """Detects a stalled phase or queue and names the culprit (docs/failures.md)."""

    policy: str = key(
        "report",
        "On a stall: report (a page in RUN_DIR/logs; a lost worker or a kill for lack of memory resumes "
        "once), stop (end the run), or resume (from the last checkpoint).",
        choices=("report", "stop", "resume"),
    )
    resumes: int = key(2, "Resumes per run before it stops for good.", low=0)
    cold_start_s: Number = key(300, "Patience in seconds the first time (compilation, cold caches).", above=0)
    patience_factor: Number = key(2.0, "Later patience, as a multiple of the usual time.", above=0)
    floor_s: Number = key(60, "Least patience in seconds.", low=0)
    limits: dict[str, int | float | None] = key(
        {
            "start-up": 900,
            "rollout": None,
            "log-probs": None,
            "advantage": None,
            "update": None,
            "save": None,
            "weight-sync": None,
            "validation": None,
            "done": 300,
            "out-of-time": 300,
        },
        "Fixed patience in seconds; null follows the usual time.",
        above=0,
        closed=True,
    )
    sample_every_s: Number = key(5, "Seconds between samples of resources (RUN_DIR/samples.jsonl).", above=0)
    native_stacks: bool = key(False, "Add C frames to stacks, pausing each process briefly.")


@dataclass
class Collapse:
    """Alarms for degenerating self-play; their limits are in `verl_ext/trainer/collapse.py`."""

    policy: str = key(
        "warn",
        "On an alarm: warn (one line), or stop (end the run after this step, with its checkpoint).",
        choices=("warn", "stop"),
    )


@dataclass
class FlowTest:
    """The load of flow-test: generated samples through veRL's own queues."""

    stage: str = key(
        "solver",
        "Stage whose batch, lengths and estimated step set the required speed.",
        choices=("challenger", "solver", "train"),
    )
    seconds: Number = key(30, "Seconds of pushing samples through.", above=0)
    provoke: str = key(
        "none",
        "Fault to cause after a third of the time.",
        choices=("none", "stopped-producer", "slow-consumer", "overflow", "stale", "lost"),
    )
    workers: int = key(2, "Ray actors that stand in for agent loop workers.", low=1)
    concurrency: int = key(32, "Rollouts at once, over all workers.", low=1)
    rollout_s: Number = key(0.5, "Mean seconds of a rollout.", low=0)
    update_s: Number = key(1.0, "Seconds of an update.", low=0)
    tokens: int = key(512, "Most tokens of a row.", low=1)
