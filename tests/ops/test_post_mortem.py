"""How a run ended, from its folder, and `drzero diagnose`."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from drzero.cli import main
from drzero.ops.errors import RunFailed
from drzero.ops.files import write_jsonl
from drzero.ops.process.lock import HeldLock
from drzero.ops.process.logs import EventLog
from drzero.ops.records import EVENTS_FILE
from drzero.ops.supervisor import ending
from drzero.ops.watchdog.post_mortem import examine
from drzero.stages.watch import CAUSES


def run_folder(
    folder: Path, events: list[dict[str, Any]] | None = None, logs: dict[str, str] | None = None
) -> Path:
    (folder / "logs").mkdir(parents=True)
    if events is not None:
        timed = ({"time": 100.0 + place, **event} for place, event in enumerate(events))
        write_jsonl(folder / "logs" / "events.jsonl", timed)
    for name, text in (logs or {}).items():
        (folder / "logs" / f"{name}.log").write_text(text)
    beats = [{"time": 50.0, "step": 0, "phase": "start-up"}, {"time": 90.0, "step": 3, "phase": "rollout"}]
    write_jsonl(folder / "heartbeats.jsonl", beats)
    return folder


def event(kind: str, component: str, text: str = "", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "component": component, "text": text, **more}


STARTED = [event("start", "retrieval"), event("ready", "retrieval"), event("start", "trainer", offset=0)]
DEATH = event("crash", "retrieval", "died: killed by SIGKILL", first_error="ValueError: lost my index")
TRAINER_LOG = "INFO start\nhttpx.ConnectError: refused\nRuntimeError: step 3 failed\n"
GPU_FULL = "torch.OutOfMemoryError: CUDA out of memory\n"
GARBAGE = "SearchRequestError: http://x is no retrieval service: it answered 'lorem'\n"
SGLANG_CRASHED = "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT\n"

OUT_OF_TIME = event("out_of_time", "trainer", "out of time after step 3 of 6: another step may take 60 s")
EXITED = event("exit", "trainer", "ended without an error", code=0)
FAILED = event("exit", "trainer", "'trainer' failed: exit code 1", code=1)
STOPPED = event("stopped", "retrieval")
STALL = event("stall", "solver", "rollout starvation: …", advice="look", evidence=["a"], report="x.md")
BACK = [DEATH, event("restart", "retrieval"), event("ready", "retrieval")]
COST = event("cost", "supervision")
LOADED = [event("start", "load", offset=0), event("exit", "load", "ended without an error", code=0)]
UNSOUND = event("exit", "flow", "samples do not flow", code=1, culprit="rollout workers")
OUTSIDE = event("end", "trainer", "ended from outside: exit code 143", from_outside=True)
KILLED = [{**each, "pid": 7} for each in (*STARTED, STALL)]
AGAIN = [{**each, "pid": 8} for each in STARTED]


@pytest.mark.parametrize(
    ("events", "state", "culprit", "words"),
    [
        ([*STARTED, EXITED, OUT_OF_TIME, STOPPED], "out of time", None, "another step may take 60 s"),
        ([*STARTED, OUT_OF_TIME, STOPPED, *STARTED, DEATH], "failed", "retrieval", ""),
        ([*KILLED, *AGAIN], "cut off", None, ""),
        ([*STARTED, DEATH, event("end", "trainer", "service died")], "failed", "retrieval", "SIGKILL"),
        ([*STARTED, *BACK, FAILED], "failed", "trainer", "out of memory"),
        ([*STARTED, STALL], "stalled", "solver", "starvation"),
        ([*STARTED, STALL, event("progress", "trainer"), EXITED], "finished", None, ""),
        ([*STARTED, DEATH, event("end", "trainer"), STOPPED, *STARTED, EXITED], "finished", None, ""),
        ([*STARTED, STALL, event("end", "trainer"), COST, STARTED[2], FAILED], "failed", "trainer", ""),
        ([*STARTED, OUTSIDE, STOPPED], "cut off", None, "from outside"),
        ([*LOADED, UNSOUND], "failed", "rollout workers", "do not flow"),
    ],
    ids=[
        "out of time",
        "resumed after out of time",
        "killed and started again",
        "a service died",
        "a service came back",
        "a lasting stall",
        "a passing stall",
        "only the last start counts",
        "a stall before a restart",
        "ended from outside",
        "a check failed after its load",
    ],
)
def test_events_tell_how_a_run_ended(tmp_path, events, state, culprit, words):
    logs = {"retrieval": "ValueError: lost my index\n"}
    if FAILED in events:
        logs = {"trainer": GPU_FULL}
    death = examine(run_folder(tmp_path / "run", events, logs if DEATH in events else None), CAUSES)
    assert (death.state, death.culprit) == (state, culprit) and words in death.sentence


def test_a_death_has_its_first_error_advice_facts_and_evidence(tmp_path):
    events = [*STARTED, DEATH, event("end", "trainer", "service 'retrieval' died")]
    logs = {"trainer": TRAINER_LOG, "retrieval": "ValueError: lost my index\n"}
    death = examine(run_folder(tmp_path / "died", events, logs))
    assert (death.first_error, death.facts["phase"]) == ("ValueError: lost my index", "rollout of step 3")
    back = examine(run_folder(tmp_path / "back", [*STARTED, *BACK, FAILED]))
    assert back.facts["restarts"] == "retrieval 1"
    stalled = examine(run_folder(tmp_path / "stalled", [*STARTED, STALL]))
    assert (stalled.evidence, stalled.facts["report"]) == (("a",), "x.md")
    late = examine(run_folder(tmp_path / "late", [*STARTED, OUT_OF_TIME, STOPPED]))
    assert "it resumes from there" in late.advice


@pytest.mark.parametrize(("end", "phase"), [(EXITED, "done of step 3"), (FAILED, "update of step 3")])
def test_a_trainer_that_failed_is_not_done(tmp_path, end, phase):
    folder = run_folder(tmp_path / "run", [*STARTED, end])
    beats = [{"time": 2.0, "step": 3, "phase": name} for name in ("update", "done")]
    write_jsonl(folder / "heartbeats.jsonl", beats)
    assert examine(folder).facts["phase"] == phase


def test_an_error_is_shown_without_rays_colours_and_control_characters(tmp_path):
    ray = "\x1b[36m(TaskRunner pid=1)\x1b[0m "
    log = f'{ray}    raise ValueError("Error: not this line")\n{ray}ValueError: this one\x1b]0;mine\x07\n'
    death = examine(run_folder(tmp_path / "run", logs={"trainer": log}))
    assert death.first_error == r"(TaskRunner pid=1) ValueError: this one\x1b]0;mine\x07"
    long = examine(run_folder(tmp_path / "long", logs={"trainer": "ValueError: ".ljust(900, ".")}))
    assert long.first_error and long.first_error.endswith(".… (400 more characters in the log)")


@pytest.mark.parametrize(
    ("logs", "culprit", "cause"),
    [
        ({"trainer": "OSError: [Errno 28] No space left on device\n"}, "trainer", "disk full"),
        ({"solver": GPU_FULL, "trainer": TRAINER_LOG}, "solver", "memory"),
        ({"trainer": GARBAGE}, "retrieval", "garbage"),
        ({"trainer": SGLANG_CRASHED}, "rollout engine", "a process of SGLang's"),
        ({"trainer": "KeyError: 'doc_id'\n"}, "trainer", "for an unknown reason: KeyError"),
    ],
)
def test_without_events_the_logs_alone_are_read(tmp_path, logs, culprit, cause):
    death = examine(run_folder(tmp_path / "run", None, logs), CAUSES)
    assert (death.state, death.culprit) == ("failed", culprit) and cause in death.sentence


def test_a_run_that_ended_without_an_error_is_reported_with_what_had_run_out(tmp_path):
    folder = run_folder(tmp_path / "run", STARTED)
    host = {"component": "host", "memory_free_mb": 120, "disk_free_gb": 0.1}
    trainer = {"component": "trainer", "rss_mb": 9000, "time": 95.0}
    write_jsonl(folder / "samples.jsonl", [trainer, {**host, "time": 95.0}])
    death = examine(folder)
    assert death.state == "cut off" and "120 MB of memory" in death.sentence
    assert len(death.evidence) == 2 and death.facts["peak memory"] == "trainer 9000 MB"


def test_a_stage_without_a_trainer_is_judged_by_its_result(tmp_path):
    folder = run_folder(tmp_path / "run", [*STARTED[:2], event("stopped", "retrieval")])
    assert examine(folder).state == "failed" and "left no result" in examine(folder).sentence
    (folder / "result.json").write_text("{}")
    assert examine(folder).state == "finished"


@pytest.mark.parametrize(
    ("raised", "state", "sentence"),
    [
        (None, "finished", "without an error"),
        (RunFailed("not ready:\n  1 of 50 runs failed"), "failed", "not ready: 1 of 50 runs failed"),
        (KeyboardInterrupt(), "cut off", "Ctrl-C"),
        (SystemExit(143), "cut off", "killed by SIGTERM"),
    ],
)
def test_what_a_command_does_in_its_own_process_is_judged_by_its_last_end(tmp_path, raised, state, sentence):
    events = EventLog(tmp_path / "logs" / EVENTS_FILE)
    earlier = ValueError("of an earlier start") if raised is None else None
    for error in (earlier, raised):
        events.add("start", "compare", "starting")
        with suppress(BaseException), ending(events, "compare", "both agree"):
            if error:
                raise error
    death = examine(tmp_path)
    assert death.state == state and sentence in death.sentence
    assert death.culprit == ("compare" if state == "failed" else None)


def test_an_empty_folder_of_a_run_can_be_read(tmp_path):
    (tmp_path / "logs").mkdir()
    assert examine(tmp_path).state == "cut off"


def test_diagnose_prints_culprit_cause_and_what_to_do(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", [*STARTED, DEATH], {"retrieval": "ValueError: lost my index\n"})
    assert main(["diagnose", str(folder)]) == 0
    printed = capsys.readouterr().out
    for words in ("failed", "retrieval died: killed by SIGKILL", "lost my index", "rollout of step 3"):
        assert words in printed


def test_diagnose_of_a_running_run_says_so(tmp_path, capsys):
    folder = run_folder(tmp_path / "run", STARTED)
    with HeldLock(folder / "lock"):
        assert main(["diagnose", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "still running" in said and "cut off" not in said


SYMPTOM = {"check": "samples dropped", "point": "buffer", "text": "5 of the 16 were dropped", "action": ""}


def flow_record(time: float, **more: Any) -> dict[str, Any]:
    samples = {"asked": 16.0, "produced": 8.0, "accepted": 8.0, "in_flight": 8.0, "lost": 0.0}
    points = {"buffer": {"depth": 3, "capacity": 10}, "prompts": {"depth": 0}}
    return {
        **{"time": time, "points": points, "samples": samples, "warmup": False, "waiting": None},
        **{"about": {"warmup_s": 4.2}, "symptoms": [], **more},
    }


def test_what_flowed_is_among_the_facts_and_its_symptoms_are_evidence_of_a_run_that_did_not_finish(tmp_path):
    folder = run_folder(tmp_path / "run", STARTED)
    write_jsonl(folder / "flow.jsonl", [flow_record(150.0, symptoms=[SYMPTOM]), flow_record(160.0)])
    death = examine(folder)
    assert death.facts["warm-up"] == "complete after 4.2 s"
    assert death.facts["held last"] == "buffer 3/10"
    assert death.facts["samples"] == "asked 16 = accepted 8 + in flight 8"
    assert death.evidence == ("samples dropped, buffer: 5 of the 16 were dropped (in 1 of 2 snapshots)",)
    write_jsonl(folder / "logs" / "events.jsonl", ({"time": 100.0, **each} for each in (*STARTED, EXITED)))
    assert (examine(folder).state, examine(folder).evidence) == ("finished", ())


def test_a_warm_up_that_was_never_complete_says_what_was_there(tmp_path):
    waiting = {"point": "buffer", "have": 3, "want": 16, "since_s": 90.0}
    late = flow_record(150.0, warmup=True, waiting=waiting, about={})
    folder = run_folder(tmp_path / "run", STARTED)
    write_jsonl(folder / "flow.jsonl", [flow_record(50.0, symptoms=[SYMPTOM]), late])
    death = examine(folder)
    assert death.facts["warm-up"] == "never complete: 3 of 16 in buffer"
    assert death.evidence == ()  # of an earlier start
