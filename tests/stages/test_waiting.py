"""What the processes that only wait have loaded, and the children that check for them."""

import json
import subprocess
import sys
import time

import psutil
import pytest
from chaos import small_loop
from search_parts import lives, wait_for

HEAVY = {"chromadb", "torch", "transformers", "ray", "verl", "tensordict", "scipy", "pandas", "sklearn"}
STOP = f"""
import sys
from drzero.cli import main
from drzero.loop import evolve
from drzero.stages import training
def wait(*_, **__):
    print("LOADED", sorted({HEAVY} & sys.modules.keys()))
    raise SystemExit(3)
training.ServiceGroup = wait
evolve._run_child = wait
sys.exit(main(sys.argv[1:]))
"""
CHILDREN = """
import json, os, signal, sys
from drzero.ops.process.isolated import in_child
from drzero.preflight.finding import refusal
def answer(value): import chromadb; return value
def refuse(): raise refusal("memory", "too little", "close others")
def fail(): {}["x"]
def die(): os.kill(os.getpid(), signal.SIGKILL)
said = [in_child(answer, 7), "chromadb" in sys.modules]
for function in (refuse, fail, die):
    try: in_child(function)
    except Exception as error: said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""


def ran(script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("challenger", marks=pytest.mark.slow("evolve's process checks as it does")),
        "evolve",
    ],
)
def test_what_only_waits_has_loaded_nothing_heavy(command, prepared, tmp_path):
    arguments = prepared.overrides(tmp_path)
    if command == "evolve":
        arguments = small_loop(prepared.corpus, prepared.model, tmp_path)
    done = ran(STOP, command, *arguments)
    assert done.returncode == 3, done.stderr
    assert "[preflight]" in done.stdout, "the child checks as before"
    assert "LOADED []" in done.stdout


def test_a_childs_answer_error_and_death_reach_the_caller():
    answer, loaded, refused, failed, killed = json.loads(ran(CHILDREN).stdout)
    assert (answer, loaded) == (7, False)
    assert refused == ["PreflightFailed", "memory: too little: close others"]
    assert failed == ["KeyError", "'x'"]
    assert killed[0] == "RunFailed" and "die ended abruptly" in killed[1]


def test_the_agent_s_commands_leave_what_their_checks_need_to_a_child():
    imported = "import json, sys, drzero.agent.ask, drzero.agent.serve; print(json.dumps(list(sys.modules)))"
    assert not HEAVY & set(json.loads(ran(imported).stdout))


def test_a_child_ends_with_the_process_that_waits_for_it():
    script = "import time; from drzero.ops.process.isolated import in_child; in_child(time.sleep, 600)"
    parent = subprocess.Popen([sys.executable, "-c", script])
    waiting = psutil.Process(parent.pid)
    wait_for(waiting.children, 60)
    [child] = waiting.children()
    time.sleep(1)  # until it has begun
    parent.kill()
    parent.wait()
    wait_for(lambda: not lives(child), 10)
