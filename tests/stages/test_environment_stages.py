"""Stages in an environment: the one that the docs page writes, its mistakes before a start, an evaluation.

The model of an evaluation is an endpoint that plays a script; a run of the trainer is in the second tier.
"""

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from docs_environment import write_environment
from families import family
from stage_run import RUN_LIMIT_S
from transformers import AutoTokenizer

from drzero.cli import main
from drzero.ops.errors import UserError
from drzero.preflight.run import preflight
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.environment import load_taskset
from drzero.recipe.metrics import read_metrics
from drzero.recipe.overrides import OverrideError
from drzero.runs.report.conversation import render
from drzero.runs.report.trajectories import read_trajectories
from drzero.runs.report.write import write_report
from drzero.runs.run_folder import RunFolder
from drzero.stages.evaluate.run import run_evaluate
from drzero.stages.result import read_result
from drzero.stages.train import write_rows
from environments.fault import EnvironmentUnusable

MODELS = {"/v1/models": {"data": [{"id": "served-model"}]}}
BROKEN = """
from environments.conversation import user_message
from environments.episode import Episode
from environments.row import Row
from environments.score import Score
from environments.taskset import Taskset
import time

WRONG = "{wrong}"

class One(Episode):
    def __init__(self, n): self.n = n
    def messages(self):
        long = {{"long": True, "one long": self.n == 4, "half long": self.n % 4 == 2}}
        system = [{{"role": "system", "content": "Add."}}] if "system" in WRONG else []
        return [*system, user_message("hello " * (3000 if long.get(WRONG) else 1))]
    def tools(self):
        add = {{"type": "function", "function": {{"name": "add", "parameters": {{}}}}}}
        return {{"tool": ["add"], "tools": 5, "call": [add], "system and call": [add]}}.get(WRONG, ())
    def respond(self, turn):
        if WRONG == "raises" or (WRONG == "some" and self.n % 100 == 2): raise KeyError("key")
        if WRONG == "hangs": time.sleep(30)
        return None
    def score(self):
        rewards = {{"reward": float("inf"), "huge": 10**400}}
        return Score(rewards.get(WRONG, 0.5), WRONG == "given", {{}})

class Broken(Taskset):
    timeout_s = 0.3
    max_turns = "3" if WRONG == "turns" else 1
    def rows(self, split, n, seed):
        if WRONG == "rows": return []
        if WRONG == "ids": return [Row("a"), Row("a")]
        if WRONG == "types": return ["a"]
        if WRONG == "number ids": return [Row(0)]
        if WRONG == "json": return [Row("a", {{"n": self}})]
        if WRONG == "raise rows": raise OSError("no file")
        first = 100 if split == "eval" and WRONG != "same" else 0
        return [Row(f"{{split}}-{{n}}", {{"n": first + n, "split": split}}) for n in range(64)][:n]
    def episode(self, row): return One(row.data["n"])

def load(): return Broken()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The environment of the docs page."""
    return write_environment(tmp_path_factory.mktemp("docs"))


@pytest.fixture
def compose(own, tiny_model, tmp_path):
    """A stage's config over that environment and a tiny model."""

    def composed(stage, *overrides):
        places = [f"paths.environments={own}", f"paths.checkpoints={tmp_path}", f"base_model={tiny_model}"]
        return compose_stage(stage, ["hardware=cpu", "model=demo-policy", *places, *overrides])

    return composed


# --- what is typed ------------------------------------------------------------------------------------------


def test_env_names_an_environment_a_corpus_or_ones_own_code(compose):
    train, evaluate = compose("train", "env=vf_wordle", "steps=7"), compose("evaluate", "env=vf-wordle")
    assert (train.environment.name, train.run.name) == ("wordle", "train_wordle")
    assert train.trainer.total_training_steps == 7
    assert (evaluate.environment.name, evaluate.run.name) == ("wordle", "evaluate_wordle")
    assert evaluate.solver.model_path == evaluate.base_model
    config = compose("train", "env=number", "+environment.options.largest=9")
    assert (config.environment.name, dict(config.environment.options)) == ("number", {"largest": 9})
    assert compose("evaluate", "env=demo").environment.name is None
    assert compose("evaluate").run.name == "evaluate_iter1"
    with pytest.raises(OverrideError, match="config group 'env' has no option 'wordle'"):
        compose("challenger", "env=wordle")


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_agent_names_ones_own_with_its_tasks_and_arguments(compose, sign, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"{sign}agent=my/own.py:answer", f"{sign}tasks=q.jsonl", f"{sign}agent_options.k=4"]
    for stage in ("train", "evaluate"):
        config = compose(stage, *words)
        assert config.environment.name == f"agent:{tmp_path}/my/own.py:answer"
        assert config.run.name == f"{stage}_agent-own.py-answer"
        options = config.environment.options
        assert (options.data, dict(options.arguments)) == (f"{tmp_path}/q.jsonl", {"k": 4})
    assert compose("train", "agent=package.module:answer").environment.name == "agent:package.module:answer"


AGENTS = """
from openai import AsyncOpenAI

async def answer(task, endpoint):
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        asked = {"model": endpoint.model, "messages": [{"role": "user", "content": task["question"]}]}
        said = (await client.chat.completions.create(**asked)).choices[0].message.content
    return {"reward": float("Vell" in said)}

async def fails(task, endpoint):
    await answer(task, endpoint)
    raise LookupError("it said nothing")
"""


@pytest.fixture
def agents(tmp_path, monkeypatch):
    """A working folder with two agents and their tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(AGENTS)
    (tmp_path / "q.jsonl").write_text('{"question": "Where is Orrin?"}\n' * 100)


@pytest.mark.parametrize(
    ("words", "severity", "said"),
    [
        ("own.py:answer", "note", r"own.py:answer: 90 rows; \d+ tokens at the start; saying nothing earns 0"),
        ("own.py:fails", "warning", "with a model that says nothing, the agent fails: .* it said nothing"),
        (
            "own.py:answer environment.options.weights={f1:1}",
            "warning",
            "the weights name .* returned no such",
        ),
    ],
)
def test_preflight_plays_an_agent_with_silence(compose, words, severity, said, agents):
    report = preflight(compose("train", *f"agent={words} tasks=q.jsonl".split()), "train")
    assert found(report) == "" and re.search(said, found(report, severity))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("agent=own.py:answer", "name its tasks, tasks=FILE"),
        ("agent=own.py:answer tasks=none.jsonl", "none.jsonl cannot be read"),
        ("agent=own.py:answer tasks=q.jsonl agent_options.k=1", "unexpected keyword argument 'k'"),
        ("agent=own.py:answer tasks=q.jsonl environment.options.depth=1", "there is no option 'depth'"),
    ],
)
def test_an_agent_that_cannot_be_played_is_refused(compose, words, said, agents):
    assert said in found(preflight(compose("train", *words.split()), "train"))


# --- before a start -----------------------------------------------------------------------------------------


def found(report, severity="error"):
    return "\n".join(str(finding) for finding in report.findings if finding.severity == severity)


def test_preflight_plays_an_episode_without_model_or_index(compose):
    report = preflight(compose("train", "env=number"), "train")
    assert found(report) == ""
    said = (
        r"number: 25 rows; \d+ tokens at the start; saying nothing earns 0 \(exact 0, near 0\) after 6 turns"
    )
    assert re.search(said, found(report, "note"))
    keys = {finding.key for finding in preflight(compose("evaluate", "env=number"), "evaluate").findings}
    assert not keys & {"chroma.path", "retrieval.embedder", "benchmarks"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("raises", "broken: Episode.respond raised KeyError: 'key'"),
        ("hangs", "broken: Episode.respond did not return within 0.3 s"),
        ("reward", "broken: Episode.score: a reward is a finite number, not inf (float)"),
        ("huge", "broken: Episode.score: a reward is a finite number, not 1000"),
        (
            "tool",
            """broken: Episode.tools: a tool is {"type": "function", "function": {"name": …}}, not 'add'""",
        ),
        ("tools", "broken: Episode.tools: tools are a list, not 5"),
        ("turns", "max_turns is a number of turns, 1 or more, not '3'"),
        ("rows", "broken: Taskset.rows('train') gave no rows"),
        ("ids", "broken: Taskset.rows('train') gave two rows of the id 'a'"),
        ("types", "broken: Taskset.rows('train') gave list, not a list of Row"),
        ("json", "broken: Taskset.rows('train'): the data of row 'a' is no JSON"),
        ("raise rows", "broken: Taskset.rows('train') raised OSError: no file"),
        ("long", "more than data.max_prompt_length=512"),
        ("half long", "data.max_prompt_length: the first messages of 16 of 32 rows are longer, up to 30"),
        ("number ids", "broken: Taskset.rows('train'): the id of a row is a text, not 0"),
    ],
)
def test_what_an_environment_does_wrong_is_one_line_before_a_start(compose, tmp_path, wrong, said):
    (tmp_path / "broken.py").write_text(BROKEN.format(wrong=wrong))
    said_all = found(preflight(compose("train", "env=broken", f"paths.environments={tmp_path}"), "train"))
    assert said in said_all and len(said_all.splitlines()) == 1


NO_SYSTEM, OUT = "System role not supported", "correct the environment, such as a system message, or"
MOVED = r"writes messages 1–2 \(system, user\) as .* once message 4 \(tool\) follows"


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("llama3", "system and call", None),
        ("mistral", "call", None),
        ("mistral", "system and call", f"broken cannot be played with .*/model: its chat template {MOVED}"),
        ("gemma", "no call", None),
        ("gemma", "call", "broken cannot be played with .*: its chat template does not render tools"),
        ("gemma", "system", rf"not take its messages: TemplateError: {NO_SYSTEM} \[row train-0\]: {OUT}"),
    ],
)
def test_a_models_family_plays_what_its_chat_template_lets_grow(
    compose, tmp_path, tiny_model, smollm2_tokenizer, name, kind, said
):
    shutil.copytree(tiny_model, tmp_path / "model")
    family(smollm2_tokenizer, name).save_pretrained(tmp_path / "model")
    (tmp_path / "broken.py").write_text(BROKEN.format(wrong=kind))
    places = [f"paths.environments={tmp_path}", f"base_model={tmp_path / 'model'}"]
    told = found(preflight(compose("train", "env=broken", *places), "train"))
    assert told == "" if said is None else re.search(said, told)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("given", "saying nothing solves the task"),
        ("same", "64 of 64 rows of the split eval are also in the split train"),
        ("one long", "the first messages of 1 of 32 rows are longer"),
    ],
)
def test_what_is_odd_is_a_warning(compose, tmp_path, wrong, said):
    (tmp_path / "broken.py").write_text(BROKEN.format(wrong=wrong))
    report = preflight(compose("train", "env=broken", f"paths.environments={tmp_path}"), "train")
    assert said in found(report, "warning") and not found(report)


@pytest.mark.parametrize(("lengths", "fits"), [([], True), (["data.max_prompt_length=3072"], False)])
def test_bfcls_conversations_fit_the_length_of_their_config_and_no_half_of_it(
    compose, tiny_model, tmp_path, lengths, fits
):
    """With a template that shows tools whole, as those of models that call functions do."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    template = model / "chat_template.jinja"
    named = "function.name ~ '(' ~ function.parameters.properties | join(', ') ~ ')'"
    assert named in template.read_text()
    template.write_text(template.read_text().replace(named, "tool | tojson"))
    typed = ["env=bfcl-multi-turn", f"base_model={model}", *lengths]
    said = found(preflight(compose("evaluate", *typed), "evaluate"))
    assert ("the first messages" in said) == (not fits)


def test_more_rows_a_step_than_there_are_is_an_error(compose):
    report = preflight(compose("train", "env=number", "data.train_batch_size=30"), "train")
    assert "the environment has 25 rows, less than one batch" in found(report)


@pytest.mark.parametrize("stage", ["train", "evaluate"])
def test_an_unknown_name_or_none_is_answered_with_those_there_are(compose, stage):
    said = found(preflight(compose(stage, "env=nunber"), stage))
    assert "no environment 'nunber' (did you mean 'number'?). There are: " in said
    known = said.partition("There are: ")[2]
    assert all(name in known for name in ("number, ", "wordle", "bfcl-single-turn, "))
    with pytest.raises(
        EnvironmentUnusable, match=r"name an environment, env=NAME\. There are: .*number, .*wordle"
    ):
        load_taskset(compose("train"))


def test_the_rows_of_a_run_are_the_tasksets_and_the_same_at_each_start(compose, tmp_path):
    config = resolve(compose("train", "env=number", "train_rows=8", "val_rows=3"))
    taskset = load_taskset(config)
    write_rows(config, taskset)
    first = [Path(path).read_bytes() for path in (config.data.train_files, config.data.val_files)]
    rows = pq.read_table(config.data.train_files).to_pylist()
    assert [json.loads(row["extra_info"]["task"])["number"] % 2 for row in rows] == [0] * 8
    assert pq.read_table(config.data.val_files).num_rows == 3
    write_rows(config, taskset)
    assert first == [Path(path).read_bytes() for path in (config.data.train_files, config.data.val_files)]


# --- an evaluation ------------------------------------------------------------------------------------------


@pytest.fixture
def evaluated(compose, start_peer, tiny_model):
    """Evaluate an endpoint that finds numbers by halving; gives the config and the endpoint."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def complete(body):
        text = tokenizer.decode(body["prompt"], skip_special_tokens=True)
        low, high, guess = 1, 50, 25
        for answer in re.findall("Higher|Lower", text):
            low, high = (guess + 1, high) if answer == "Higher" else (low, guess - 1)
            guess = (low + high) // 2
        ids = [*tokenizer.encode(str(guess), add_special_tokens=False), tokenizer.eos_token_id]
        return {"choices": [{"text": str(guess), "finish_reason": "stop", "token_ids": ids}]}

    def evaluate(name, *chosen, env="number"):
        peer = start_peer("/v1/completions", complete, MODELS)
        endpoint = [f"endpoint={peer.url}/v1", f"tokenizer={tiny_model}", "solver.concurrency=4"]
        named = [f"env={env}"] if env else []
        config = compose("evaluate", *named, f"run.name={name}", *endpoint, *chosen)
        run_evaluate(config)
        return config, peer

    return evaluate


def report_of(config):
    return json.loads((Path(config.run.dir) / "report.json").read_text())


def test_a_model_is_scored_on_held_out_rows_with_parts_and_intervals(evaluated, capsys):
    config, peer = evaluated("halving", "num_examples=10")
    score = report_of(config)["benchmarks"]["number"]
    assert (score["n"], score["em"], score["failed"], score["token_drift"]) == (10, 1.0, 0, 0)
    assert score["em_low"] == pytest.approx(0.722, abs=1e-3) and score["em_high"] == 1.0
    assert score["parts"] == {"exact": 1.0, "near": 0.2}
    assert read_result(Path(config.run.dir)).figures == {"solved": 1.0, "reward": 1.2, "failed": 0}
    # A rerun plays nothing again.
    played = len(peer.requests)
    run_evaluate(config)
    assert len(peer.requests) == played
    assert "10 rows, 0 of them still to play" in capsys.readouterr().out


def test_two_evaluations_of_the_same_rows_are_compared_in_pairs(evaluated, tmp_path, capsys):
    for name, turns in (("before", 2), ("after", 6)):
        evaluated(name, "num_examples=25", f"environment.max_turns={turns}")
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"number +25 +0\.\d+ +1\.000 +\+0\.\d+ +\[\+0\.\d+, \+0\.\d+\] +\S+ +2\d +0", said)
    assert "Wilcoxon" in said and "note: environment was" in said


def test_its_report_shows_every_episode_with_what_the_environment_said(evaluated):
    config, _ = evaluated("shown", "num_examples=3")
    run, unreadable = RunFolder(Path(config.run.dir)), list[str]()
    shown = list(read_trajectories(run, unreadable))
    assert len(shown) == 3 and unreadable == []
    for trajectory in shown:
        assert trajectory.parts == {"exact": 1.0, "near": 0.2} and trajectory.failures == []
        assert re.fullmatch(r"eval-\d+: .*number.*", trajectory.question) and trajectory.answer.isdecimal()
        page = render(trajectory)
        assert trajectory.key in page and "exact" in page
        assert ("Higher." in page or "Lower." in page) == (len(trajectory.conversation.turns) > 1)
    assert write_report(run.folder).is_file()


def test_episodes_that_fail_are_counted_and_are_in_no_score(evaluated, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN.format(wrong="some"))
    config, _ = evaluated("some", f"paths.environments={tmp_path}", "num_examples=5", env="broken")
    report = report_of(config)
    assert (report["benchmarks"]["broken"]["n"], report["benchmarks"]["broken"]["failed"]) == (4, 1)
    assert report["benchmarks"]["broken"]["reward"] == 0.5
    (reason,) = report["failures"]
    assert reason.startswith("broken: Episode.respond raised KeyError") and "[row eval-2]" in reason


GUESSING = """
from openai import AsyncOpenAI

async def guess(task, endpoint):
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages = [{"role": "user", "content": "Guess."}]
        for turn in range(6):
            asked = {"model": endpoint.model, "messages": messages}
            said = (await client.chat.completions.create(**asked)).choices[0].message
            if int(said.content) == task["number"]:
                return {"exact": 1.0, "turns": turn + 1.0, "reward": 1.0}
            if task["number"] == 13:
                raise KeyError("unlucky")
            messages.append(said.model_dump(exclude_none=True))
            told = "Higher." if task["number"] > int(said.content) else "Lower."
            messages.append({"role": "user", "content": told})
"""


def test_an_agent_of_ones_own_is_scored_and_an_edited_one_is_another(evaluated, tmp_path):
    (tmp_path / "mine.py").write_text(GUESSING)
    (tmp_path / "q.jsonl").write_text("".join(f'{{"number": {n}}}\n' for n in (25, 13, 12, 40)))
    words = [f"agent={tmp_path}/mine.py:guess", f"tasks={tmp_path}/none.jsonl"]
    words += [f"environment.options.eval_data={tmp_path}/q.jsonl"]
    config, peer = evaluated("mine", *words, env=None)
    report = report_of(config)
    score = report["benchmarks"]["agent:mine.py:guess"]
    assert (score["n"], score["em"], score["failed"], score["token_drift"]) == (3, 1.0, 1, 0)
    assert score["parts"]["exact"] == score["reward"] == 1.0 and score["parts"]["turns"] > 1
    (reason,) = report["failures"]
    assert "it raised KeyError: 'unlucky' (" in reason and "mine.py" in reason
    played = len(peer.requests)
    run_evaluate(config)
    assert len(peer.requests) == played + 4, "only the failed episode: two tries in each of two passes"
    (tmp_path / "mine.py").write_text(GUESSING.replace("Guess.", "Guess now."))
    with pytest.raises(UserError, match="files"):
        run_evaluate(config)


def test_compare_says_what_is_no_evaluation(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "is no finished evaluation" in capsys.readouterr().err
    assert main(["compare", str(tmp_path)]) == 2


# --- a run of the trainer -----------------------------------------------------------------------------------


def train_two_steps(checkpoints, model, *chosen):
    """Train by the command. Returns the metrics of both steps."""
    places = [f"paths.checkpoints={checkpoints}", f"base_model={model}", "process_env.OMP_NUM_THREADS=1"]
    sizes = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "rollout.max_tokens_per_turn=8"]
    assert main(["train", *chosen, "hardware=cpu", "model=demo-policy", "steps=2", *places, *sizes]) == 0
    (run,) = checkpoints.glob("train_*/metrics")
    steps = read_metrics(run.parent)
    assert sorted(steps) == [1, 2]
    return steps


@pytest.mark.slow("a start of the trainer")
@pytest.mark.timeout(2 * RUN_LIMIT_S)
def test_the_environment_of_the_docs_page_trains_two_steps(own, tiny_model, tmp_path):
    chosen = ["env=number", f"paths.environments={own}", "environment.filter_groups=false"]
    steps, run = train_two_steps(tmp_path, tiny_model, *chosen), tmp_path / "train_number"
    for step in steps.values():
        assert step["drzero/rollout/rows"] == 16 and step["drzero/rollout/token_drift_rate"] == 0
        assert step["drzero/failures/share"] == 0
        assert 0 <= step["drzero/reward/part/near"] <= 0.2
    lines = [json.loads(line) for line in (run / "dumps" / "step_0001.jsonl").read_text().splitlines()]
    assert len(lines) == 16 and lines[0]["trajectory"]["turns"][0]["observation"]
    assert (tmp_path / "train_number_hf" / "config.json").is_file()
    assert (run / "summary.json").is_file()


TWICE = """
import random
from openai import AsyncOpenAI

begun = set()

async def ask_twice(task, endpoint):
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for word in ("one", "two"):
            asked = [{"role": "user", "content": word}]
            await client.chat.completions.create(model=endpoint.model, messages=asked)
    if task["number"] not in begun:
        begun.add(task["number"])
        raise LookupError("not yet")
    return [random.random(), random.random()]
"""


@pytest.mark.slow("a start of the trainer")
@pytest.mark.timeout(2 * RUN_LIMIT_S)
def test_an_agent_of_ones_own_trains_two_steps_with_two_rows_an_episode(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "twice.py").write_text(TWICE)
    (tmp_path / "q.jsonl").write_text("".join(f'{{"number": {n}}}\n' for n in range(40)))
    for step in train_two_steps(tmp_path, tiny_model, "agent=twice.py:ask_twice", "tasks=q.jsonl").values():
        assert step["drzero/rollout/rows"] == 32 and step["drzero/rollout/token_drift_rate"] == 0
        assert (step["drzero/agent/rows"], step["drzero/agent/calls"]) == (2, 2)
        assert step["drzero/failures/share"] == 0 and step["drzero/agent/begun_again"] > 0
        assert step["actor/ppo_kl"] == pytest.approx(0, abs=1e-5) and step["actor/grad_norm"] > 0
