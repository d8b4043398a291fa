"""A challenger and a solver with veRL's own SGLang rollout on a CPU (`rollout=sglang`).

Two steps each of a tiny model that has memorized the protocol. Tests marked `matrix` also train the solver
with two ranks and with LoRA. The rollout engine starts with random weights, so a weight that does not arrive
shows as a gap between its log-probabilities and the actor's.
"""

import ipaddress
import re

import pytest
from solver_rows import write_questions
from stage_run import RUN_LIMIT_S, assert_nothing_left, checkpoint_weights, run_stage

pytestmark = [
    pytest.mark.slow("starts SGLang; the same stages with the reference engine: `launched_loop`"),
    pytest.mark.timeout(2 * RUN_LIMIT_S),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    write_questions(folder, 8, 4, ("Vell", "nobody"))
    return folder


LORA = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16")
RUNS = {
    # The engine samples without a seed: of twelve rollouts a step, some search and some do not.
    "challenger": ("data.train_batch_size=12",),
    "solver": (),
    "solver, two ranks, LoRA merged": ("machine.gpus=2", *LORA, "actor_rollout_ref.model.lora.merge=true"),
    "solver, an engine of two": ("machine.gpus=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"),
}
SHORT = ("challenger",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in SHORT else [pytest.mark.matrix]) for name in RUNS],
)
def trained(request, sglang_python, prepared, speaking_model, checkpoints):
    name = str(request.param)
    stage = name.partition(",")[0]
    folder = re.sub(r"\W+", "_", name)
    arguments = [
        *prepared.overrides(checkpoints, speaking_model)[:-1],
        "rollout=sglang",
        f"run.name={folder}",
    ]
    arguments += ["steps_per_iteration=2", "trainer.save_freq=1", "data.train_batch_size=4"]
    # A tiny model needs a larger rate to move visibly.
    arguments += ["trainer.max_actor_ckpt_to_keep=2", "actor_rollout_ref.actor.optim.lr=1e-3"]
    arguments += [*(["actor_rollout_ref.rollout.n=4"] if stage == "solver" else []), *RUNS[name]]
    run = run_stage(stage, arguments, checkpoints / folder, python=sglang_python)
    assert run.code == 0, run.err[-3000:] + run.out[-6000:]
    return run


@pytest.fixture(scope="module")
def metrics(trained):
    return [line["data"] for line in trained.lines("metrics/attempt_001.jsonl") if line["step"]]


def test_only_torchs_rendezvous_listens_beyond_loopback(trained):
    beyond = {
        command.split()[0]
        for (ip, _), command in trained.watch.listeners.items()
        if not ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback
    }
    # So does torch's rendezvous of several training ranks. Neither offers a choice of address.
    ranks = {"WorkerDict"} if trained.config.machine.gpus > 1 else set()
    kinds = {"WorkerDict" if "WorkerDict" in name else name.partition("_")[0] for name in beyond}
    assert kinds == {"sglang::scheduler"} | ranks


def test_its_schedulers_do_not_record_collectives(trained):
    pipes = {kind: pipe for kind, pipe in trained.watch.recorders if pipe}
    assert pipes.keys() == {"ray::WorkerDict"} and pipes["ray::WorkerDict"].endswith("/rank_")
    assert ("sglang::scheduler", "") in trained.watch.recorders


def test_no_token_drifts_and_nothing_fails(metrics):
    names = ("failures/share", "failures/rollouts_lost", "failures/rows_invalid", "failures/searches")
    for step in metrics:
        assert [step[f"drzero/{name}"] for name in (*names, "rollout/token_drift_rate")] == [0.0] * 5


def test_the_engine_samples_from_the_trained_weights(trained, metrics):
    # veRL rounds merged weights to bfloat16 before it sends them.
    model = trained.config.actor_rollout_ref.model
    is_rounded = model.lora_rank > 0 and model.lora.merge
    assert len(metrics) == 2
    for step in metrics:
        assert abs(step["actor/rollout_corr/kl"]) < (2e-3 if is_rounded else 1e-4)


def test_it_searched_and_rewards_differ(trained):
    rollouts = trained.lines("dumps/step_0001.jsonl") + trained.lines("dumps/step_0002.jsonl")
    calls = [call for r in rollouts for turn in r["trajectory"]["turns"] for call in turn["calls"]]
    assert any(call["queries"] and call["response"] for call in calls)
    assert len({r["reward"]["score"] for r in rollouts}) > 1


def test_a_step_moved_the_weights(trained):
    first, second = checkpoint_weights(trained, 1), checkpoint_weights(trained, 2)
    assert any((first[name] != second[name]).any() for name in first)


def test_nothing_is_left_of_it(trained):
    assert_nothing_left(trained)
