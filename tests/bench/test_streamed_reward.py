"""bench/streamed_reward.py: its barrier holds every other step's rewards, and it compares the times."""

import asyncio
import os
import time

from bench import streamed_reward
from bench.streamed_reward import BARRIER, FOLDER, ROWS, STREAMED, Step, arm_of, read, verdict


def test_every_other_step_waits_for_its_last_rollout(tmp_path, monkeypatch):
    async def score(*args, **named):
        return {"attempt_tokens": 7}

    async def play(step):
        first = asyncio.create_task(streamed_reward.challenger_score())
        await asyncio.sleep(0.3)
        assert first.done() is (arm_of(step) == STREAMED)
        await streamed_reward.challenger_score()
        await first

    monkeypatch.setattr(streamed_reward.rewards, "challenger_score", score)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(ROWS, "2")
    beats = []
    for step in range(4):
        beats.append({"time": time.time(), "step": step, "phase": "rollout"})
        asyncio.run(play(step))
    assert len((tmp_path / f"rewards-{os.getpid()}.jsonl").read_text().splitlines()) == 8
    steps = read(tmp_path, beats)
    assert [step.arm for step in steps] == [STREAMED, BARRIER] and {step.tokens for step in steps} == {14}
    assert steps[0].first < steps[0].rollouts and steps[1].first >= steps[1].rollouts


def test_the_ratio_is_that_of_all_steps():
    took = [(STREAMED, 50.0), (BARRIER, 60.0), (STREAMED, 40.0), (BARRIER, 60.0)]
    steps = [Step(arm, 20.0, 10.0, seconds, tokens=0) for arm, seconds in took]
    # 120 / 90, and 60 / 50 and 60 / 40 by pair.
    assert "takes 1.33 times as long** (1.20 to 1.50 by pair)" in verdict(steps)
