"""The arithmetic of bench/streamed_reward.py on steps whose times are made up."""

from bench.streamed_reward import BARRIER, STREAMED, Step, verdict


def step(arm: str, took: float, begun: tuple[float, ...]) -> Step:
    return Step(arm, took, begun, tokens=0, solver_cpu_s=0.0, rollouts=(), attempts=())


def test_the_ratio_is_that_of_all_steps_and_its_bound_starts_with_the_first_question():
    steps = [
        step(STREAMED, 50.0, (10.0, 20.0)),
        step(BARRIER, 60.0, (20.0, 20.0)),
        step(BARRIER, 60.0, (20.0, 20.0)),
        step(STREAMED, 40.0, (10.0, 20.0)),
    ]
    text = verdict(steps)
    # 120 / 90, and 60 / 50 and 60 / 40 by pair; the bound (20 + 40) / (10 + 40).
    assert "takes 1.33 times as long** (1.20 to 1.50 by pair)" in text and "would be 1.20:" in text


def test_rollouts_that_outlast_the_attempts_are_what_a_streamed_step_takes():
    steps = [step(STREAMED, 40.0, (5.0, 40.0)), step(BARRIER, 60.0, (40.0,))]
    # (40 + 20) / max(40, 5 + 20).
    assert "would be 1.50:" in verdict(steps)
