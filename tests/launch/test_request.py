"""A launch resolved: run file < environment default < flag."""

import dataclasses
import pickle

import pytest
import yaml

from drzero.launch.actions import ACTIONS
from drzero.launch.arguments import parse
from drzero.launch.compute import CONFIG
from drzero.launch.errors import LaunchError
from drzero.launch.request import DEFAULT_MODEL, resolve
from drzero.recipe.compose import compose_stage


def launch(line, tmp_path=None, file=""):
    words = line.split()
    if file:
        (tmp_path / "run.yaml").write_text(file)
        words += ["--config-path", str(tmp_path / "run.yaml")]
    return resolve(parse(["--action", *words]))


def test_a_stage_becomes_the_words_that_are_typed_locally():
    request = launch("challenger --iteration 2 --model qwen2.5-7b --steps 3 +trainer.foo=1")
    assert " ".join(request.command) == (
        "challenger compute=8xh100 compute.max_usd=900 model=qwen2.5-7b iteration=2 steps_per_iteration=3 "
        "+trainer.foo=1"
    )
    assert (request.name, request.preflight) == ("challenger_iter2", True)


@pytest.mark.parametrize(
    ("line", "file", "model"),
    [
        ("challenger", "model: qwen3-8b", "model=qwen3-8b"),
        ("challenger", "{model: qwen3-8b, env: own}", "model=qwen3-8b"),
        ("challenger --env demo", "model: qwen3-8b", None),
        ("challenger --env demo", "{model: qwen3-8b, models_by_env: {demo: qwen2.5-3b}}", "model=qwen2.5-3b"),
        ("challenger --env demo --model qwen3-14b", "{models_by_env: {demo: qwen2.5-3b}}", "model=qwen3-14b"),
        ("challenger --model Qwen/Qwen3-8B", "", "model=qwen3-8b"),
    ],
)
def test_the_flags_model_takes_precedence_over_the_environments_and_that_over_the_files(
    tmp_path, line, file, model
):
    chosen = [w for w in launch(line, tmp_path, file).command if w.startswith(("model=", "base_model="))]
    assert chosen == ([model] if model else [])


@pytest.mark.parametrize("flags", ["", "--env demo", "--gpu-count 0"])
def test_a_named_model_is_what_is_evaluated_with_its_own_prompts_and_turns(flags):
    # The demo's environment and the CPU's profile bring the demo policy's short ones.
    request = launch(f"evaluate --model Qwen/Qwen2.5-0.5B-Instruct {flags}")
    config = compose_stage("evaluate", request.command[1:])
    assert config.solver.model_path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.prompts.form, config.solver.max_tokens_per_turn) == ("full", 1024)
    assert config.run.name == request.name == "evaluate_Qwen_Qwen2.5-0.5B-Instruct"


def test_the_group_that_a_hub_id_stands_on_sets_nothing_but_the_id():
    values = yaml.safe_load((CONFIG / "model" / f"{DEFAULT_MODEL}.yaml").read_text())
    assert list(values) == ["base_model"]


@pytest.mark.parametrize(
    "action", [name for name, one in ACTIONS.items() if one.is_job and not one.of_stage and name != "evolve"]
)
def test_a_launch_has_the_name_of_its_run_folder(action):
    more = {"train": "--env wordle", "warm-start": "from=/corpus/preview", "agent-bench": "agent.py:solve"}
    request = launch(f"{action} {more.get(action, '')}")
    stage, *overrides = request.command
    assert compose_stage(stage.replace("-", "_"), overrides).run.name == request.name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("evaluate", "evaluate_iter1"),
        ("evaluate --model qwen2.5-3b --iteration 2", "evaluate_iter2"),
        ("evaluate --model qwen2.5-3b iteration=2", "evaluate_iter2"),
        ("evaluate --model qwen2.5-3b run.name=mine", "mine"),
    ],
)
def test_an_evaluation_has_the_name_of_its_run_folder(line, name):
    request = launch(line)
    assert (request.name, compose_stage("evaluate", request.command[1:]).run.name) == (name, name)


@pytest.mark.parametrize(
    ("line", "machine"),
    [
        ("challenger", "8xh100"),
        ("evaluate --model Qwen/Qwen2.5-0.5B-Instruct", "8xh100"),
        ("preflight evaluate --model me/mine", "8xh100"),
        ("preflight merge", "cpu"),
        ("challenger --gpu-count 1", "single_h100"),
        ("challenger --gpu-type A100-40GB", "a100-40gb"),
        ("challenger --gpu-type A100-80GB --gpu-count 4", "4xa100-80gb"),
        ("challenger --model me/mine --gpu-type L40S", "single_h100"),
        # A rehearsal gets the smallest that holds its model.
        ("challenger --env demo", "a10g"),
        ("challenger --env demo --model qwen2.5-3b", "single_h100"),
        ("evolve loop=demo", "a10g"),
        ("evolve loop=demo model=qwen2.5-7b", "4xa100-80gb"),
        ("evaluate --env demo base_model=me/mine-7B", "single_h100"),
        ("evaluate --env demo solver.model_path=/checkpoints/solver_iter3_hf", "a10g"),
        ("challenger --env demo compute=8xh100", "8xh100"),
    ],
)
def test_the_recipes_machine_is_requested_unless_it_is_a_rehearsal_or_another_is_named(line, machine):
    assert launch(line).compute.name == machine


@pytest.mark.parametrize("stage", ["challenger", "synthesize", "solver", "evaluate", "train"])
def test_hydras_default_machine_and_modals_are_one_with_sglang(stage):
    of_hydra = yaml.safe_load((CONFIG / f"{stage}.yaml").read_text())["defaults"]
    assert {"hardware": launch("challenger").compute.hardware} in of_hydra
    words = launch(f"{stage}{' --env wordle --gpu-count 8' if stage == 'train' else ''}").command[1:]
    config = compose_stage(stage, words)
    assert config.solver.engine == "sglang" and config.machine.gpus == 8


@pytest.mark.parametrize(
    ("line", "file", "because"),
    [
        ("solver", "", "compute=single_h100 at $5.73 an hour holds qwen2.5-3b too, with the slower"),
        ("solver --model me/mine", "", "another is one flag: --gpu-type, --gpu-count or compute="),
        ("solver --gpu-type H200", "", "--gpu-type and --gpu-count choose it"),
        ("solver compute=t4", "", "compute=t4 names it"),
        ("solver", "compute: t4", "run.yaml names it"),
        ("train --env wordle", "", "config/runs/general.yaml names it"),
        ("train --env wordle", "{compute: {memory: 65536}}", "config/runs/general.yaml names it"),
        ("merge", "", "merge runs on it by default"),
    ],
)
def test_the_choice_of_a_machine_is_printed_with_its_reason_and_price(tmp_path, line, file, because):
    shown = yaml.safe_load(launch(line, tmp_path, file).as_yaml())
    assert because in shown["because"] and shown["usd_per_hour"] > 0


@pytest.mark.parametrize(
    ("line", "machine", "engine", "usd"),
    [
        ("compare-rollouts", "a10g", "sglang", 1.74),
        ("compare-rollouts --model qwen3-8b", "a100-40gb", "sglang", 3.18),
        ("compare-rollouts rollout=reference --gpu-type L40S", "single_h100", "reference", 3.73),
        ("compare-rollouts --gpu-count 0", "cpu", "reference", 0.63),
        ("agent-bench my.py:Asking", "a10g", "sglang", 1.74),
        ("agent-bench my.module:Asking endpoint=https://example.com/v1", "cpu", "reference", 0.63),
        ("serve-model --model me/mine", "single_h100", "sglang", 5.73),
        ("serve-model compute.timeout=7200", "a10g", "sglang", 3.47),
    ],
)
def test_what_is_tried_on_a_gpu_has_sglang_and_an_hour_of_a_machine_that_holds_it(line, machine, engine, usd):
    request = launch(line)
    assert (request.compute.name, round(request.usd_at_most, 2)) == (machine, usd)
    assert (request.preflight, request.resumes, request.compute.retries) == (True, False, 0)
    config = compose_stage(request.command[0].replace("-", "_"), request.command[1:])
    assert config.solver.engine == engine and config.run.name == request.name


def test_short_names_of_a_labs_keys_are_its_keys_and_a_served_models_address_is_the_tunnels():
    command = launch("compare-rollouts data=/corpus/a.parquet n=8").command
    assert {"compare.data=/corpus/a.parquet", "compare.n=8"} <= set(command)
    served = compose_stage("serve_model", launch("serve-model background=true host=127.0.0.1").command[1:])
    assert (served.host, served.port, served.background) == ("0.0.0.0", 8080, False)
    with pytest.raises(LaunchError, match="port=null: a tunnel leads to a numbered port"):
        launch("serve-model port=null")


@pytest.mark.parametrize("words", ["", "wordle", "my.py:One my.py:Two", "my.py:One agent=my.py:Two"])
def test_one_agent_of_ones_own_is_benched(words):
    with pytest.raises(LaunchError, match="name one agent of yours"):
        launch(f"agent-bench {words}")
    command = launch("agent-bench agent=my.py:One mode=concurrent tasks=/corpus/a.jsonl").command
    assert command[-4:] == ("agent=my.py:One", "serve=true", "run_mode=concurrent", "tasks=/corpus/a.jsonl")


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_an_agent_of_ones_own_is_trained_and_evaluated_under_its_name(stage):
    request = launch(f"{stage} agent=my_own.py:answer tasks=/corpus/tasks.jsonl")
    assert request.name.startswith(f"{stage}_agent-my_own.py-answer")
    assert {"agent=my_own.py:answer", "tasks=/corpus/tasks.jsonl"} <= set(request.command)
    assert not [word for word in request.command if word.startswith("env=")]


@pytest.mark.parametrize(
    ("line", "form", "prompts", "embedder"),
    [
        ("prepare-data", "full", [4, 3, 2, 1], "intfloat/e5-large-v2"),
        ("prepare-data --gpu-type L4", "full", [4, 3, 2, 1], "intfloat/e5-large-v2"),
        ("prepare-data --model qwen3-8b", "full", [4, 3, 2, 1], "intfloat/e5-large-v2"),
        ("prepare-data base_model=me/mine", "full", [4, 3, 2, 1], "intfloat/e5-large-v2"),
        ("prepare-data --model demo-policy", "short", [1, 1], "packaged-minilm"),
        ("synthesize --gpu-count 0", "full", [4, 3, 2, 1], "intfloat/e5-large-v2"),
        ("challenger", "full", [4, 3, 2, 1], "intfloat/e5-large-v2"),
        ("challenger --gpu-count 0", "full", [4, 3, 2, 1], "intfloat/e5-large-v2"),
        ("challenger --model demo-policy", "short", [1, 1], "packaged-minilm"),
        ("challenger --env demo", "short", [1, 1], "packaged-minilm"),
        ("challenger --env demo --model qwen3-8b", "full", [4, 3, 2, 1], "packaged-minilm"),
    ],
)
def test_prompts_wording_and_embedder_follow_the_model_whatever_the_machine(line, form, prompts, embedder):
    command = launch(line).command
    config = compose_stage(command[0].replace("-", "_"), command[1:])
    assert (config.prompts.form, config.hop_ratio, config.retrieval.embedder) == (form, prompts, embedder)


@pytest.mark.parametrize(
    ("line", "file", "kept"),
    [
        ("train --config-path config/runs/general.yaml --gpu-count 4", "", (40, 14400, 344064)),
        ("train --env bfcl-single-turn --gpu-count 2", "", (80, 14400, 344064)),
        ("challenger --gpu-count 4", "compute: {base: a10g, max_usd: 7, timeout: 600}", (7, 600, 344064)),
        ("challenger --gpu-type H100", "compute: {base: a10g, memory: 50000}", (45, 86400, 50000)),
        ("train --env wordle", "compute: {count: 4, timeout: 60}", (40, 60, 344064)),
        # The environment's need is the least.
        ("train --env bfcl-single-turn", "compute: {memory: 32768, max_usd: 9}", (9, 14400, 40960)),
        ("train --env bfcl-single-turn", "compute: {memory: 65536}", (80, 14400, 65536)),
    ],
)
def test_a_files_limits_are_kept_and_memory_grows_with_gpus_and_environment(tmp_path, line, file, kept):
    machine = launch(line, tmp_path, file).compute
    assert (machine.max_usd, machine.timeout, machine.memory) == kept


@pytest.mark.parametrize(
    ("line", "file", "limit"),
    [
        ("challenger --env demo", "", 5),
        ("challenger --env demo --gpu-type H100", "", 5),
        ("challenger --env demo compute.max_usd=45", "", 45),
        ("challenger --env demo", "compute: {base: t4, max_usd: 2}", 2),
        ("smoke", "", 2),
        ("challenger", "", 900),
    ],
)
def test_a_rehearsal_has_a_small_limit_unless_another_is_given(tmp_path, line, file, limit):
    request = launch(line, tmp_path, file)
    assert request.compute.max_usd == limit
    overrides = [word for word in request.command[1:] if line != "smoke" or word.startswith("compute")]
    assert compose_stage("merge", overrides).compute.max_usd == limit


def test_a_run_files_machine_is_changed_by_flags_and_overrides(tmp_path):
    file = "compute: {base: a100-40gb, timeout: 7200, max_usd: 30}"
    request = launch("challenger --gpu-type L40S compute.max_usd=5", tmp_path, file)
    assert request.compute.modal_options()["gpu"] == "L40S:1"
    assert (request.compute.timeout, request.compute.max_usd) == (7200, 5)
    assert "compute.max_usd=5" in request.command


def test_another_compute_file_changes_the_machine_and_nothing_else(tmp_path):
    line = "challenger --iteration 2 trainer.save_freq=5"
    one, two = (launch(line, tmp_path, f"compute: {name}") for name in ("single_h100", "a10g"))
    assert one.compute != two.compute
    assert [w for w in one.command if "compute" not in w] == [w for w in two.command if "compute" not in w]
    assert (one.name, one.preparations) == (two.name, two.preparations)


def test_smoke_ends_after_half_an_hour_by_default():
    assert launch("smoke").compute.timeout == 1800
    assert launch("smoke --gpu-type L4").compute.timeout == 1800
    assert launch("smoke compute.timeout=3600").compute.timeout == 3600


def test_a_machine_named_among_a_run_files_overrides_is_taken_unless_another_is_typed(tmp_path):
    file = "overrides: [compute=a10g]"
    assert launch("challenger", tmp_path, file).compute.name == "a10g"
    assert launch("challenger compute=t4", tmp_path, file).compute.name == "t4"


def test_smoke_is_three_steps_through_sglang_with_two_gpus_an_engine():
    request = launch("smoke")
    assert request.compute.modal_options()["gpu"] == "A10G:2"
    assert {"rollout=sglang", "solver.tp_size=2", "trainer.total_training_steps=3"} <= set(request.command)
    assert request.preparations == (("demo-data",),) and request.preflight


def test_smoke_on_other_gpus_splits_no_engine_over_one_and_takes_the_model_that_is_named():
    one, none, named = (
        launch(line).command
        for line in ("smoke --gpu-type A10G --gpu-count 1", "smoke compute=cpu", "smoke --model qwen2.5-3b")
    )
    assert "rollout=sglang" in one and not [word for word in one if word.startswith("solver.tp_size=")]
    assert "rollout=sglang" not in none and "trainer.total_training_steps=3" in none
    assert "model=qwen2.5-3b" in named and not [word for word in named if word.startswith("base_model=")]


@pytest.mark.parametrize(
    ("line", "usd"),
    [
        ("smoke", 1.58),  # half an hour of two A10G: it does not continue in another call
        ("smoke --gpu-type H100", 2),
        ("smoke compute=2xa10g", 1.58),
        ("challenger compute.timeout=3600", 900),
        ("check-services", 35.79),  # an hour of the stage's machine
        ("flow-test compute.timeout=60", 0.01),
        ("challenger compute.max_usd=null", None),
    ],
)
def test_the_most_that_a_launch_costs_is_printed(line, usd):
    assert yaml.safe_load(launch(line).as_yaml())["usd_at_most"] == usd


def test_the_demo_environment_makes_its_world_first():
    assert launch("challenger --env demo").preparations == (("demo-data",),)
    assert launch("challenger").preparations == ()
    assert launch("prepare-data --env demo").command == ("demo-data",)


@pytest.mark.parametrize("action", ["prepare-data", "challenger", "synthesize", "evolve"])
def test_hop_ratio_names_the_prompts_that_are_written_and_those_that_are_read(action):
    assert "hop_ratio=[1,1]" in launch(f"{action} --hop-ratio 1:1").command


@pytest.mark.parametrize(
    ("line", "file", "message"),
    [
        ("challenger --model qwen3-9b", "", "did you mean 'qwen3-8b'"),
        ("challenger --env dem", "", "did you mean 'demo'"),
        ("prepare-data --hop-ratio four", "", "give the weights"),
        ("solver --hop-ratio 1:1", "", "not solver"),
        ("challenger", "modle: x", "modle: no such key (did you mean 'model'?)"),
        ("challenger", "steps: many", "steps: 'many' is not int"),
        ("challenger", "image: {pypi: [x]}", "image.pypi"),
        ("challenger", "compute: {base: a10g, tmeout: 3}", "did you mean 'timeout'"),
        ("challenger", "a: [", "not YAML"),
        ("challenger", "compute: {base: a10g, timeout: 4h}", "'4h', not a whole number of seconds"),
        ("challenger", "compute: {base: a10g, max_usd: lots}", "max_usd is 'lots'"),
        ("challenger", "overrides: [{a: 1}]", "overrides: {'a': 1} is not text"),
        ("challenger", "image: {pip: [{a: 1}]}", "image.pip: {'a': 1} is not text"),
        ("challenger", "models_by_env: {demo: 3}", "models_by_env: 3 is not text"),
        ("challenger compute.cpu=many", "", "cpu is 'many', not a number of cores"),
        ("challenger compute.cpu=[", "", "no value of a machine"),
        ("challenger", "overrides: [trainer.save_frek=5]", "did you mean 'trainer.save_freq'?"),
        ("preflight solvr", "", "did you mean 'solver'?"),
        ("preflight --stage smoke", "", "no such stage"),
        ("check-services synthesize", "", "no such stage"),
        ("check-services train", "", "no such stage"),
        ("challenger run.name=../x", "", "run.name=../x: it names a folder"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path, line, file, message):
    with pytest.raises(LaunchError) as refused:
        launch(line, tmp_path, file)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "gpus", "trains", "serves"),
    [
        ("solver --serve-gpus 4", 8, 4, 4),
        ("solver --serve-gpus 1 --gpu-count 4", 4, 3, 1),
        ("solver --trainer-gpu-ids 0,1,2,3 --inference-gpu-ids 4,5,6,7", 8, 4, [4, 5, 6, 7]),
        ("train --env wordle --trainer-gpu-ids 2,3 --inference-gpu-ids 0,1", 4, 2, [0, 1]),
        ("evolve --serve-gpus 4 loop=full", 8, None, 4),
    ],
)
def test_flags_say_which_gpus_serve_and_the_machine_has_them_all(line, gpus, trains, serves):
    request = launch(line)
    split = [word for word in request.command if "serve_gpus" in word]
    assert request.compute.count == gpus and split == [f"machine.serve_gpus={serves}".replace(" ", "")]
    if trains is not None:
        config = compose_stage(request.command[0], request.command[1:])
        assert (config.trainer.n_gpus_per_node, config.machine.serve_gpus) == (trains, serves)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("solver --serve-gpus 8", "has 8 GPUs, and none would be left to train: let 7 serve at most"),
        ("solver --serve-gpus 2 --gpu-count 2", "has 2 GPUs, and none would be left to train: let 1 serve"),
        ("solver machine.serve_gpus=[0,1] --gpu-count 2", "let 1 serve at most"),
        ("train --env wordle --serve-gpus 2", "has 1 GPU, and none would be left to train: rent"),
    ],
)
def test_a_split_that_leaves_no_gpu_to_train_is_refused_before_anything_starts(line, message):
    with pytest.raises(LaunchError) as refused:
        launch(line)
    assert message in str(refused.value)


def test_without_a_flash_attention_wheel_the_actor_gets_torchs_own(monkeypatch):
    monkeypatch.setattr("drzero.launch.image.pins.FLASH_ATTN_WHEELS", ())
    config = compose_stage("challenger", launch("challenger").command[1:])
    assert config.actor_rollout_ref.model.override_config.attn_implementation == "drzero_packed"


def test_a_request_survives_the_wire_and_the_next_call_is_of_its_id_and_secrets():
    request = dataclasses.replace(launch("evolve --env demo loop=demo"), secrets=("wandb-secret",))
    sent = pickle.loads(pickle.dumps(request))
    assert sent == request
    assert (sent.next_part().id, sent.next_part().secrets) == (request.id, ("wandb-secret",))


def test_a_check_of_a_stage_has_the_stages_machine_and_a_folder_of_its_own():
    request = launch("check-services solver --with-trainer --model qwen2.5-7b")
    assert (request.name, request.compute.name, request.compute.retries) == ("check_services", "8xh100", 0)
    assert request.command[:2] == ("check-services", "solver")
    assert {"--with-trainer", "run.name=check_services"} <= set(request.command)
    assert request.checked[0] == "solver" and "--with-trainer" not in request.checked
    assert launch("check-services").checked[0] == "challenger"
    played = launch("check-services train --with-trainer --env wordle").command
    assert [word for word in played if word.startswith("run.name=")] == ["run.name=check-services_wordle"]


def test_a_flow_test_needs_no_gpu_and_no_model():
    request = launch("flow-test --seconds 60 --stage challenger --workers")
    assert {"flow_test.seconds=60", "flow_test.stage=challenger", "flow.workers=true"} <= set(request.command)
    assert (request.name, request.compute.type, request.loads_a_model) == ("flow_test", None, False)
    assert request.checked == request.command and request.command[0] == "flow-test"
