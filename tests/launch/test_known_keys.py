"""Which overrides the client refuses before anything is built."""

import pytest
import yaml

from drzero.launch.errors import LaunchError
from drzero.launch.known_keys import FILE, check_keys, verl_keys


def test_the_file_has_every_key_of_verl():
    assert yaml.safe_load(FILE.read_text(encoding="utf-8")) == verl_keys(), (
        "run python -m drzero.launch.known_keys"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.save_frek=5", "did you mean 'trainer.save_freq'?"),
        ("retrieval.topkk=5", "did you mean 'retrieval.topk'?"),
        ("~trainer.no_such", "there is no key 'trainer.no_such'"),
        ("stages.solver.trainer.save_frek=5", "did you mean 'trainer.save_freq'?"),
        ("stages.solvr.trainer.save_freq=5", "did you mean 'solver'?"),
        ("mode=synk", "did you mean 'sync'?"),
        ("+data.train_batch_size=8", "exists already. To set it, write data.train_batch_size=8"),
        ("+retrieval.topk=3", "exists already. To set it, write retrieval.topk=3"),
        ("+stages.solver.trainer.save_freq=3", "To set it, write stages.solver.trainer.save_freq=3"),
        ("+model=qwen3-8b", "exists already. To set it, write model=qwen3-8b"),
        (
            "+actor_rollout_ref.actor.micro_batch_size_per_gpu=2",
            "Write actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        ),
    ],
)
def test_a_key_or_option_that_does_not_exist_is_refused_with_the_nearest(override, message):
    with pytest.raises(LaunchError) as refused:
        check_keys([override])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        *("trainer.save_freq=5", "watchdog.limits.rollout=9", "stages.solver.trainer.save_freq=5"),
        *("+trainer.foo=1", "++trainer.save_freq=1", "+process_env.A=1", "~trainer.balance_batch"),
        *("loop=demo", "iterations=2", "benchmarks=[a.parquet]", "flow_test.seconds=3"),
        *("from=runs/preview", "from=[a,b]"),
        *("process_env.NCCL_DEBUG=INFO", "hydra.verbose=true", "critic.optim.lr=1", "steps_per_iteration=3"),
        # Only some machines' files have it.
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
    ],
)
def test_what_a_stage_may_have_passes(override):
    check_keys([override])
