"""How a run is watched: snapshots of its queues, the watchdog over phases and queues, and collapse alarms."""

from dataclasses import dataclass

from drzero.recipe.settings.key import Number, key


@dataclass
class Flow:
    """How the flow of samples is recorded (RUN_DIR/flow.jsonl has the stream)."""

    every_s: Number = key(5, "Seconds between two snapshots of queues and buffer.", above=0)
    log_every_s: Number = key(
        30,
        "Seconds between two lines on the console of verbose=true; a symptom is printed at once, always.",
        above=0,
    )
    workers: bool = key(
        False,
        "With each such line one for every worker: what it has finished, how fast, what it waits for.",
    )


@dataclass
class Watchdog:
    """The watchdog: it detects that the run stalls and names the culprit (docs/failures.md).

    What may stand still is a phase of the trainer (RUN_DIR/heartbeats.jsonl) or a queue on the way of the
    samples; these limits hold for both.
    """

    policy: str = key(
        "report",
        "The stall action: report (a page in RUN_DIR/logs and a line), stop (end the run, naming the "
        "culprit), or resume (stop, and resume from the last checkpoint).",
        choices=("report", "stop", "resume"),
    )
    resumes: int = key(2, "With resume: how often in one run, before it is stopped for good.", low=0)
    cold_start_s: Number = key(
        300,
        "Seconds that a phase or queue may stand still the first time: compilation, cold caches.",
        above=0,
    )
    factor: Number = key(
        2.0, "Afterwards it may stand still for this many times what is usual there.", above=0
    )
    floor_s: Number = key(60, "And for at least this many seconds.", low=0)
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
        "Seconds that this phase may stand still, whatever is usual; null leaves it to factor and floor_s. "
        "In start-up a new line in the trainer's log counts as movement, in save a growing checkpoint; done "
        "and out-of-time last from the last step to the end of the process.",
        above=0,
        closed=True,
    )
    sample_every_s: Number = key(
        5, "Seconds between two samples of what each component uses (RUN_DIR/samples.jsonl).", above=0
    )
    native_stacks: bool = key(False, "C frames in the stacks, for which each process is paused for a moment.")


@dataclass
class Collapse:
    """Alarms at signs that self-play training degenerates (their limits: `verl_ext/trainer/collapse.py`)."""

    policy: str = key(
        "warn",
        "What an alarm does: warn (one line), or stop (the line, and the run ends after that step, with its "
        "checkpoint). A rerun then starts nothing until this is warn.",
        choices=("warn", "stop"),
    )


@dataclass
class FlowTest:
    """The flow-test's load: generated samples through veRL's own queues, without model, data or services."""

    stage: str = key(
        "solver",
        "The stage the overrides are for. Its batch and estimated step say how fast samples must flow.",
        choices=("challenger", "solver", "train"),
    )
    seconds: Number = key(30, "How long samples are pushed through.", above=0)
    provoke: str = key(
        "none",
        "The fault that is caused after a third of that.",
        choices=("none", "stopped-producer", "slow-consumer", "overflow", "stale", "lost"),
    )
    workers: int = key(2, "Ray actors that play the agent loop workers.", low=1)
    concurrency: int = key(32, "Rollouts at once, in all of them.", low=1)
    rollout_s: Number = key(0.5, "Mean seconds of a rollout.", low=0)
    update_s: Number = key(1.0, "Seconds of an update.", low=0)
    tokens: int = key(512, "Tokens of a row at most.", low=1)
