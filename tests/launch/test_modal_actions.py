"""Every action by the unmodified client against the control plane: the requests it makes.

The tests answer the functions, so none runs. tests/launch/test_modal_runs.py runs them.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from modal.exception import FunctionTimeoutError
from modal_checkout import (
    FINISHED,
    PLANTED,
    SHARED,
    answer_as_usual,
    make_checkout,
    run_action,
    run_function,
    start_action,
)
from modal_plane import ControlPlane
from modal_plane.state import Call

ROOTS = ["paths.corpus={corpus}", "paths.checkpoints={checkpoints}"]
VOLUMES = {"/corpus": "dr-zero-corpus", "/checkpoints": "dr-zero-checkpoints", "/cache": "dr-zero-cache"}


@pytest.fixture(autouse=True, scope="module")
def usual_answers(plane):
    answer_as_usual(plane)


@pytest.fixture(autouse=True)
def usual_answers_afterwards(plane):
    yield
    answer_as_usual(plane)


def calls_of(plane: ControlPlane) -> list[Call]:
    return [call for call in plane.calls if call.app_id == plane.app.id]


def stage_of(plane: ControlPlane) -> Call:
    (call,) = [call for call in calls_of(plane) if call.function in ("cpu_stage", "gpu_stage")]
    return call


STAGES = [
    (["prepare-data", "source=/corpus/a.jsonl"], "cpu_stage", None, "prepare-data compute=cpu"),
    (["smoke"], "gpu_stage", ("A10G", 2), "challenger compute=2xa10g"),
]
"""One of each kind. tests/launch/test_request.py has every stage in process."""


@pytest.mark.parametrize(("words", "function", "gpu", "command"), STAGES)
def test_a_stage_requests_its_machine_after_the_checks(plane, checkout, words, function, gpu, command):
    done = run_action(plane, checkout, *words).succeeded()
    *checks, call = calls_of(plane)
    assert {check.function for check in checks} <= {"ask", "check_gpu_image"}
    assert all(check.spec.gpu is None for check in checks)
    # On a CPU, before its machine is requested.
    asked = [check.args[1][:2] for check in checks if check.function == "ask"]
    assert ["preflight", command.split()[0]] in asked
    assert (call.function, call.spec.gpu, call.spawned) == (function, gpu, True)
    assert " ".join(call.args[0].command).startswith(command)
    assert "it cost $1.50" in done.stdout


def test_a_check_of_a_stage_is_preflighted_and_not_retried(plane, checkout):
    words = ["check-services", "solver", "--with-trainer", "--model", "qwen2.5-3b"]
    run_action(plane, checkout, *words).succeeded()
    first, *_, call = calls_of(plane)
    assert first.args[1][:2] == ["preflight", "solver"] and "--with-trainer" not in first.args[1]
    request = call.args[0]
    assert call.function == "gpu_stage" and "--with-trainer" in request.command
    assert " ".join(request.command).startswith("check-services solver compute=8xh100")
    assert request.compute.retries == 0


@pytest.mark.parametrize(
    ("words", "module", "asked"),
    [
        (["status"], "drzero.launch.status", []),
        (
            ["preflight", "solver"],
            "drzero.cli",
            ["preflight", "solver", *ROOTS, "compute=8xh100", "compute.max_usd=900"],
        ),
    ],
)
def test_looks_take_a_cpu_and_nothing_else(plane, checkout, words, module, asked):
    run_action(plane, checkout, *words).succeeded()
    (call,) = calls_of(plane)
    assert (call.function, call.args, call.spec.gpu) == ("ask", (module, asked), None)
    assert "gpu_stage" not in plane.functions


def test_a_partly_sent_folder_is_completed(plane, checkout, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    first = run_action(plane, checkout, "upload", str(folder), "models/cut")
    (folder / "model.safetensors").write_bytes(b"weights")
    second = run_action(plane, checkout, "upload", str(folder), "models/cut")
    assert "1 files sent, 0 already present" in first.stdout, first.stderr
    assert "1 files sent, 1 already present" in second.stdout, second.stderr
    sent = plane.volume("dr-zero-corpus").committed() / "models" / "cut"
    assert (sent / "model.safetensors").read_bytes() == b"weights"


def test_an_interrupted_download_fetches_the_incomplete_file(plane, checkout, tmp_path):
    there, here = plane.volume("dr-zero-checkpoints").committed() / "run", tmp_path / "run"
    there.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (there / name).write_text(name)
    words = ["download", "run", str(here)]
    assert "2 files fetched" in run_action(plane, checkout, *words).stdout
    (here / "b.jsonl").rename(here / ".b.jsonl.partial")
    (here / ".b.jsonl.partial").write_text("b.")
    done = run_action(plane, checkout, *words)
    assert "1 files fetched, 1 already present" in done.stdout, done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["a.jsonl", "b.jsonl"]


class TestOneLaunch:
    @pytest.fixture(scope="class")
    def done(self, plane, checkout):
        plane.secrets["huggingface-secret"] = {"HF_TOKEN": "x"}
        flags = ["--iteration", "2", "--model", "qwen2.5-7b", "--steps", "9", "--gpu-count", "4"]
        return run_action(
            *(plane, checkout, "challenger", *flags, "--gpu-type", "a100-80gb"),
            *("+trainer.foo=1", "trainer.save_freq=5", "compute.timeout=7200", "compute.region=us-east"),
        )

    @pytest.fixture(scope="class")
    def call(self, plane, done):
        done.succeeded()
        return stage_of(plane)

    def test_the_machine_is_applied_by_options_of_the_call(self, plane, call):
        spec = call.spec
        assert (spec.gpu, spec.cpu, spec.memory, spec.timeout) == (("A100-80GB", 4), 16, 262144, 7200)
        assert spec.regions == ("us-east",)
        assert plane.functions["gpu_stage"].gpu is None

    def test_volumes_are_where_the_guide_says(self, call):
        mounted = {path: volume.name for path, volume in call.spec.volumes.items()}
        assert mounted == VOLUMES

    def test_the_dotenv_is_sent_as_modals_own_secret_and_replaces_the_named_ones(self, call):
        assert set(PLANTED) in [set(secret.values) for secret in call.spec.secrets]
        assert not [secret.name for secret in call.spec.secrets if secret.name]

    def test_flags_and_overrides_reach_the_stage_in_order(self, call):
        command = list(call.args[0].command)
        assert command[0] == "challenger"
        assert command[command.index("model=qwen2.5-7b") :] == [
            *("model=qwen2.5-7b", "iteration=2", "steps_per_iteration=9"),
            *("+trainer.foo=1", "trainer.save_freq=5"),
        ]
        assert "compute.timeout=7200" in command

    def test_a_cpu_runs_preflight_on_the_same_command_and_then_fetches_its_models(self, plane, call):
        checks = [other for other in calls_of(plane) if other.function == "ask"]
        said = [*ROOTS, *call.args[0].command[1:]]
        assert [check.args for check in checks] == [
            ("drzero.cli", [verb, "challenger", *said]) for verb in ("preflight", "fetch-models")
        ]
        assert {(check.spec.gpu, check.spec.timeout) for check in checks} == {(None, 1800)}

    def test_the_resolved_launch_is_printed(self, done):
        assert "type: A100-80GB" in done.stdout
        assert "command: drzero challenger" in done.stdout
        assert "usd_per_hour:" in done.stdout

    def test_nothing_secret_is_printed_and_no_request_leaves_the_machine(self, plane, done):
        assert not [value for value in PLANTED.values() if value in done.stdout + done.stderr]
        assert plane.left_machine == []


def test_packages_and_scripts_of_the_users_own_go_into_the_image(plane, checkout):
    (checkout / "tools").mkdir()
    (checkout / "tools" / "mine.py").write_text("MINE = 1\n")
    (checkout / "run.yaml").write_text("image: {pip: [sympy==1.14.0], apt: [graphviz], scripts: [tools]}\n")
    run_action(plane, checkout, "challenger", "--config-path", "run.yaml").succeeded()
    text = "\n".join(stage_of(plane).spec.image.commands)
    assert "sympy==1.14.0" in text and "graphviz" in text
    assert [path for path in plane.mounted_files if path.endswith("mine.py")]


def test_a_launch_that_ctrl_c_ends_has_not_succeeded(plane, checkout):
    released = threading.Event()
    plane.answer("cpu_stage", lambda request: released.wait(60) and FINISHED)
    try:
        client = start_action(plane, checkout, "merge")
        plane.wait_for(lambda: "may be closed now" in client.stdout, "that the stage is requested")
        client.interrupt()
        done = client.wait(60)
    finally:
        released.set()
    assert done.code == 130
    assert "interrupted: the app ends with it" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_detached_stage_continues_without_its_client_and_is_not_launched_again(plane, checkout):
    released = threading.Event()

    def stage(request: Any) -> dict[str, Any]:
        released.wait(60)
        return FINISHED

    plane.answer("cpu_stage", stage)
    try:
        client = start_action(plane, checkout, "merge", detach=True)
        plane.wait_for(lambda: "may be closed now" in client.stdout, "that the terminal may be closed")
        client.kill()
        app, call = plane.app, stage_of(plane)
        assert app.detached
        again = run_action(plane, checkout, "merge")
        assert again.code == 1
        assert f"another launch of this run is running (call {call.function_call_id})" in again.stderr
        assert f"modal app stop {app.id}" in again.stderr
        assert calls_of(plane) == []
        released.set()
        plane.wait_for(lambda: app.state == "stopped", "the end of the app")
    finally:
        released.set()
    assert call.status == "success"


def test_train_takes_the_guides_flags(plane, checkout):
    flags = ["--env", "demo", "--steps", "20", "--gpu-count", "1", "--gpu-type", "A10G"]
    run_function(
        plane, checkout, "train", *flags, "--overrides", "trainer.save_freq=5 +trainer.foo=1"
    ).succeeded()
    call = stage_of(plane)
    assert call.spec.gpu == ("A10G", 1)
    assert {"env=demo", "steps_per_iteration=20", "trainer.save_freq=5", "+trainer.foo=1"} <= set(
        call.args[0].command
    )


def test_a_launch_that_is_refused_is_one_line_without_a_traceback_or_a_retry(plane, checkout):
    plane.answer("ask", lambda module, words: 2)
    done = run_function(plane, checkout, "evaluate", "+a.b='x y'")
    assert done.code == 1
    assert done.stderr == "modal_train: preflight found errors (see above); no machine was requested\n"
    assert "Traceback" not in done.stdout
    (preflight,) = calls_of(plane)
    assert "+a.b='x y'" in preflight.args[1]


def test_train_with_config_reads_a_run_file_anywhere(plane, checkout, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("compute: a100-40gb")
    run_function(plane, checkout, "train_with_config", "--config-path", str(file)).succeeded()
    assert stage_of(plane).spec.gpu == ("A100-40GB", 1)


@pytest.mark.parametrize(
    ("words", "env", "why"),
    [
        (["challenger", "--model", "qwen3-9b"], {}, "did you mean 'qwen3-8b'?"),
        (["merge"], {"EXPERIMENT_NAME": "wide"}, "EXPERIMENT_NAME=wide without EXPERIMENTER"),
    ],
)
def test_a_mistake_is_one_line_before_anything_reaches_modal(plane, checkout, words, env, why):
    before = len(plane.requests)
    done = plane.modal("run", "modal_train.py", "--action", *words, cwd=checkout, env=SHARED | env)
    assert done.code == 2
    (line,) = done.stderr.strip().splitlines()
    assert why in line
    assert "AppCreate" not in plane.requests[before:]


def test_a_model_that_cannot_be_fetched_ends_the_launch(plane, checkout):
    plane.answer("ask", lambda module, words: 2 * (words[0] == "fetch-models"))
    done = run_action(plane, checkout, "challenger")
    assert done.code == 1
    assert "a model could not be fetched" in done.stderr
    preflight, fetched = calls_of(plane)
    assert fetched.args[1] == ["fetch-models", *preflight.args[1][1:]]


def test_a_call_that_modal_ends_is_one_line_of_error(plane, checkout):
    def time_out(request: Any) -> None:
        raise FunctionTimeoutError("Task's current input hit its timeout of 86400s")

    plane.answer("gpu_stage", time_out)
    done = run_action(plane, checkout, "challenger")
    assert done.code == 1
    assert "modal_train: Modal: FunctionTimeoutError: Task's current input" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_gpu_half_of_smoke_waits_for_the_cpu_half(plane, checkout):
    plane.answer("check_gpu_image", lambda: 1)
    done = run_action(plane, checkout, "smoke")
    assert done.code == 1
    (call,) = calls_of(plane)
    assert (call.function, call.spec.gpu) == ("check_gpu_image", None)
    assert call.spec.image.commands[0].startswith("FROM lmsysorg/sglang@sha256:")


def test_named_secrets_that_exist_are_used_and_missing_ones_reported(plane, tmp_path):
    bare = make_checkout(tmp_path, dotenv=False)
    plane.secrets["huggingface-secret"] = {"HF_TOKEN": "x"}
    plane.secrets.pop("wandb-secret", None)
    done = run_action(plane, bare, "merge").succeeded()
    assert [secret.name for secret in stage_of(plane).spec.secrets if secret.name] == ["huggingface-secret"]
    (check,) = [call for call in calls_of(plane) if call.function == "ask"]
    assert "huggingface-secret" in [secret.name for secret in check.spec.secrets]
    assert stage_of(plane).args[0].secrets == ("huggingface-secret",)
    assert "no secret wandb-secret (WANDB_API_KEY): metrics are logged offline" in done.stdout
