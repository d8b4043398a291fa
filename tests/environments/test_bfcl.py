"""BFCL's two environments: right calls, held-out tasks, isolated rollouts, bad input.

`bench/bfcl_scorer.py` compares the scorers with the package's own, which cannot be imported here.
"""

import asyncio
import copy
import inspect
import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import mpmath
import pytest
from told_model import Told
from transformers import AutoTokenizer

from drzero.ops.errors import UserError
from environments.bfcl import multi_turn, single_turn, source
from environments.bfcl.match import calls_fault
from environments.bfcl.multi_turn import MOST_STEPS, MultiTurn, MultiTurnEpisode
from environments.bfcl.replay import CLASSES, Replay, literal_call
from environments.bfcl.schema import language_of, to_tool
from environments.bfcl.single_turn import SingleTurn, SingleTurnEpisode
from environments.bfcl.source import question_key, tasks
from environments.call import parse_calls, tool_name
from environments.conversation import Turn
from environments.fault import EnvironmentUnusable
from environments.registry import find
from verl_ext.episodes import EpisodeLimits, play


def document(name="book", **properties):
    """A function document without required arguments."""
    parameters = {"type": "dict", "properties": properties, "required": []}
    return {"name": name, "description": "Books.", "parameters": parameters}


def calls_of(*made):
    """Calls as a model writes them."""
    written = [{"name": name, "arguments": arguments} for name, arguments in made]
    return "\n".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in written)


def turn_of(episode, text):
    return Turn(text, parse_calls(text, episode.tools()))


RIGHT = [("string", ["New York"], "new-york."), ("integer", [5], 5), ("float", [5.0], 5), ("any", [7], 7)]
RIGHT += [("boolean", [True], True), ("number", [2.0], 2)]
RIGHT += [("integer", ["count"], "count")]  # the answer is the name of a variable
RIGHT += [("dict", [{"size": ["L", "XL"], "colour": ["", "red"]}], {"size": "l"})]
RIGHT += [(["string"], [["a b", "c"]], ["A-B", "C"]), (["integer"], [[1, 2], ""], [])]
RIGHT += [(["dict"], [[{"x": [1]}, {"x": [2]}]], [{"x": 1}, {"x": 2}])]
WRONG = [("string", ["New York"], "York"), ("string", ["5"], 5), ("string", ["x"], None)]
WRONG += [("string", ["x"], {"x": 1}), ("integer", [5], 5.0), ("integer", [1], True), ("integer", [1], [[1]])]
WRONG += [("boolean", [True], 1), ("no such type", [2.0], 2), ("dict", [{"size": ["L"]}], {})]
WRONG += [("dict", [{"size": ["L"]}], {"size": "L", "colour": "red"})]
WRONG += [(["string"], [["a", "c"]], ["c", "a"]), (["integer"], [[1, 2]], [1, "2"])]
WRONG += [(["dict"], [[{"x": [1]}]], [{"x": 1}, {"x": 1}]), (["dict"], [[{"x": [1]}], ""], ["x"])]


class TestMatch:
    @pytest.mark.parametrize("case", [*RIGHT, *WRONG], ids=str)
    def test_a_value_is_right_by_type_and_value_and_a_list_element_by_element(self, case):
        declared, right, value = case
        is_list = isinstance(declared, list)
        kind = {"type": "array", "items": {"type": declared[0]}} if is_list else {"type": declared}
        fault = calls_fault([document(what=kind)], [("book", {"what": value})], [{"book": {"what": right}}])
        assert (fault is None) == any(case is one for one in RIGHT), fault

    def test_an_argument_may_be_left_out_where_the_answer_says_so(self):
        functions = [document(a={"type": "integer"}, b={"type": "integer"})]
        assert calls_fault(functions, [("book", {"a": 1})], [{"book": {"a": [1], "b": [2, ""]}}]) is None
        fault = calls_fault(functions, [("book", {"a": 1})], [{"book": {"a": [1], "b": [2]}}])
        assert fault == "no call for book: b is missing"
        fault = calls_fault(functions, [("book", {"a": 1, "c": 2})], [{"book": {"a": [1]}}])
        assert fault == "no call for book: c is not expected"

    def test_calls_of_one_turn_come_in_any_order_and_each_counts_once(self):
        functions, answers = [document(a={"type": "integer"})], [{"book": {"a": [1]}}, {"book": {"a": [2]}}]
        assert calls_fault(functions, [("book", {"a": 2}), ("book", {"a": 1})], answers) is None
        assert calls_fault(functions, [("book", {"a": 1}), ("book", {"a": 1})], answers) is not None
        assert calls_fault(functions, [("book", {"a": 1})], answers) == "1 calls, not 2"

    def test_java_and_javascript_are_texts_in_their_syntax(self):
        java = [document(ids={"type": "ArrayList", "items": {"type": "integer"}}, far={"type": "long"})]
        right = [{"book": {"ids": [[1, 2]], "far": [5]}}]
        text = {"ids": "new ArrayList<Integer>(Arrays.asList(1, 2))", "far": "5L"}
        assert calls_fault(java, [("book", text)], right, "Java") is None
        assert calls_fault(java, [("book", text | {"far": "5"})], right, "Java") is not None
        assert calls_fault(java, [("book", text | {"far": 5})], right, "Java") is not None
        script = [document(ids={"type": "array", "items": {"type": "integer"}})]
        right = [{"book": {"ids": [[1, 2]]}}]
        assert calls_fault(script, [("book", {"ids": "[1, 2]"})], right, "JavaScript") is None

    def test_a_text_that_would_take_the_packages_patterns_for_ever_is_wrong_at_once(self):
        # They try every way to divide it: a second for 20 brackets, a day for 40.
        script = [document(ids={"type": "array", "items": {"type": "array"}})]
        endless = {"ids": "[[a]" + ",[a]" * 40}
        fault = calls_fault(script, [("book", endless)], [{"book": {"ids": [[1]]}}], "JavaScript")
        assert fault is not None and "too long to be taken apart" in fault


class TestSingleTurn:
    @pytest.fixture(scope="class")
    def of_category(self):
        names = ("simple_python", "parallel", "irrelevance", "live_relevance", "simple_java")
        return {name: SingleTurnEpisode(SingleTurn().row(tasks(name)[0]).data) for name in names}

    def play(self, episode, text):
        episode.respond(turn_of(episode, text))
        score = episode.score()
        assert score.success == (score.reward == 1.0)
        return score.reward, score.parts, episode.fault()

    def test_the_right_call_has_the_reward_one(self, of_category):
        right = calls_of(("calculate_triangle_area", {"base": 10, "height": 5}))
        reward, parts, fault = self.play(of_category["simple_python"], f"I will use the tool.\n{right}")
        assert (reward, fault) == (1.0, None)
        assert parts == {"match": 1.0, "right_tools": 1.0, "valid_calls": 1.0, "badly_typed": 0.0}

    def test_an_undeclared_tool_is_wrong_and_named(self, of_category):
        episode = of_category["simple_python"]
        reward, parts, fault = self.play(episode, calls_of(("triangle", {"base": 10, "height": 5})))
        assert (reward, parts["right_tools"], parts["valid_calls"]) == (0.0, 0.0, 0.0)
        assert fault == "there is no tool 'triangle'; the tools are calculate_triangle_area"

    def test_arguments_of_a_wrong_type_are_counted(self, of_category):
        wrong = calls_of(("calculate_triangle_area", {"base": "ten", "height": [5]}))
        reward, parts, fault = self.play(of_category["simple_python"], wrong)
        assert (reward, parts["valid_calls"], parts["badly_typed"]) == (0.0, 1.0, 1.0)
        assert fault is not None and "base is of the wrong type: 'ten'" in fault

    def test_what_is_no_call_is_wrong_in_words(self, of_category):
        reward, parts, fault = self.play(of_category["simple_python"], "<tool_call>{'base': 10}</tool_call>")
        assert (reward, parts["valid_calls"]) == (0.0, 0.0)
        assert fault == "the call is not a JSON object"

    def test_where_no_function_fits_any_call_is_wrong_even_a_broken_one(self, of_category):
        episode = of_category["irrelevance"]
        assert self.play(episode, "None of the functions helps.")[0] == 1.0
        (tool,) = episode.tools()
        assert self.play(episode, calls_of((tool_name(tool), {})))[0] == 0.0
        assert self.play(episode, "<tool_call>{")[0] == 1.0  # never ended: text like any other
        assert self.play(episode, "<tool_call>{</tool_call>")[0] == 0.0

    def test_where_some_function_fits_a_declared_one_must_be_called(self, of_category):
        episode = of_category["live_relevance"]
        assert self.play(episode, "I cannot.")[0] == 0.0
        assert self.play(episode, calls_of(("no_such_tool", {})))[0] == 0.0
        assert self.play(episode, calls_of((tool_name(episode.tools()[0]), {})))[0] == 1.0

    def test_tools_have_json_schemas_and_java_takes_texts(self, of_category):
        properties = {"x": {"type": "float"}, "y": {"type": "tuple", "items": {"type": "any"}}}
        tool = to_tool(document(where={"type": "dict", "properties": properties}))["function"]["parameters"]
        shown = {"x": {"type": "number"}, "y": {"type": "array", "items": {"type": "string"}}}
        assert tool["type"] == "object"
        assert tool["properties"]["where"] == {"type": "object", "properties": shown}
        (java,) = of_category["simple_java"].tools()
        properties = java["function"]["parameters"]["properties"].values()
        assert {one["type"] for one in properties} == {"string"}
        assert language_of("simple_javascript") == "JavaScript"


def truth_calls(task, calls):
    """The right calls of a turn with every argument by name."""
    made = []
    for text in calls:
        name, positional, named = literal_call(text)
        if positional:
            kinds = [getattr(_module(one), one) for one in task["involved_classes"]]
            method = next(getattr(kind, name) for kind in kinds if hasattr(kind, name))
            named = dict(inspect.signature(method).bind(None, *positional, **named).arguments)
            named.pop("self")
        made.append((name, named))
    return made


def _module(class_name):
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    return import_module(CLASS_FILE_PATH_MAPPING[class_name])


def play_right(task, turns=None):
    """An episode whose model makes the right calls, in the first `turns` of the user's turns."""
    episode = MultiTurnEpisode(MultiTurn().row(task).data)
    for calls in task["ground_truth"][:turns]:
        if calls:
            episode.respond(turn_of(episode, calls_of(*truth_calls(task, calls))))
        episode.respond(Turn("That is done."))
    return episode


def the_task(name):
    return next(task for task in tasks(name.rpartition("_")[0]) if task["id"] == name)


class TestMultiTurn:
    @pytest.mark.parametrize("category", multi_turn.HELD_OUT)
    def test_the_right_calls_have_the_reward_one_and_leave_the_process_as_it_was(self, category):
        modules = {name: vars(_module(name)) for name in CLASSES}
        long_ago = json.dumps(_module_constants(modules), default=repr, sort_keys=True)
        precision = mpmath.mp.prec
        for task in tasks(category)[3::8]:  # all of them held out
            episode = play_right(task)
            assert episode.score().success, (task["id"], episode.fault())
            assert episode.score().reward == 1.0
        assert json.dumps(_module_constants(modules), default=repr, sort_keys=True) == long_ago
        assert mpmath.mp.prec == precision

    def test_the_reward_is_the_share_of_turns_before_the_first_wrong_one(self):
        task = the_task("multi_turn_base_3")
        turns = len(task["ground_truth"])
        episode = play_right(task, turns - 1)
        assert episode.respond(Turn("I leave it at that.")) is None
        score = episode.score()
        assert (score.reward, score.success) == (pytest.approx((turns - 1) / turns), False)
        assert episode.fault() == f"turn {turns}: nothing was called"
        assert play_right(task, 0).score().reward == 0.0

    def test_wrong_state_and_missing_lookups_end_the_episode(self):
        task = the_task("multi_turn_base_0")
        episode = MultiTurnEpisode(MultiTurn().row(task).data)
        answers = episode.respond(turn_of(episode, calls_of(("mkdir", {"dir_name": "tmp"}))))
        assert answers == [{"role": "tool", "content": "None"}]
        assert episode.respond(Turn("Done.")) is None
        assert episode.fault().startswith(
            "turn 1: Model instance for GorillaFileSystem does not match the state"
        )

    def test_what_cannot_be_called_is_told_and_counted(self):
        episode = MultiTurnEpisode(MultiTurn().row(the_task("multi_turn_base_0")).data)
        made = [
            ("rm_rf", {}),
            ("_load_scenario", {"scenario": {}}),
            ("cd", {"folder": 5}),
            ("cd", {"to": "x"}),
        ]
        text = f"{calls_of(*made)}<tool_call>{{cd}}</tool_call>"
        answers = [message["content"] for message in episode.respond(turn_of(episode, text))]
        assert answers[0].startswith("Error: there is no tool 'rm_rf'; the tools are ")
        assert answers[1].startswith("Error: there is no tool '_load_scenario'")
        assert answers[2] == "Error during execution: 'int' object has no attribute 'rstrip'"
        assert answers[3].startswith("Error during execution: GorillaFileSystem.cd() got an unexpected")
        assert answers[4] == "Error: the call is not a JSON object"
        assert episode.score().parts["badly_typed"] == 2.0

    def test_a_text_of_the_model_is_never_evaluated(self, tmp_path):
        trap = f"__import__('pathlib').Path({str(tmp_path / 'made')!r}).touch()"
        episode = MultiTurnEpisode(MultiTurn().row(the_task("multi_turn_base_0")).data)
        made = [(trap, {}), ("mkdir", {"dir_name": trap}), ("ls", {trap: 1}), ("cd", {"folder": trap})]
        episode.respond(turn_of(episode, calls_of(*made)))
        assert not list(tmp_path.iterdir())
        for text in (f"mkdir({trap})", trap):
            with pytest.raises(ValueError, match="is no call with literal arguments"):
                literal_call(text)

    @pytest.mark.parametrize(
        ("name", "arguments"),
        [
            ("power", {"base": 10, "exponent": 10**9}),
            ("power", {"base": 10**4000, "exponent": 1000}),
            ("logarithm", {"value": 10, "base": 2, "precision": 10**9}),
            ("round_number", {"number": 5, "decimal_places": -(10**10)}),
        ],
    )
    def test_a_number_that_would_hold_the_process_up_is_refused(self, name, arguments):
        replay = Replay(["MathAPI"], {}, [[]], long_context=False)
        assert replay.call(name, arguments).endswith(" at most")

    def test_more_steps_than_the_package_allows_end_the_episode(self):
        episode = MultiTurnEpisode(MultiTurn().row(the_task("multi_turn_base_0")).data)
        look = turn_of(episode, calls_of(("ls", {})))
        for _ in range(MOST_STEPS):
            assert episode.respond(look) is not None
        assert episode.respond(look) is None
        assert episode.fault() == f"turn 1: more than {MOST_STEPS} steps"

    def test_a_tool_that_comes_late_is_unknown_until_the_user_shows_it(self):
        task = the_task("multi_turn_miss_func_3")
        ((turn, late),) = task["missed_function"].items()
        episode = MultiTurnEpisode(MultiTurn().row(task).data)
        assert late and not set(late) & set(map(tool_name, episode.tools()))
        for calls in task["ground_truth"][: int(turn)]:
            if calls:
                episode.respond(turn_of(episode, calls_of(*truth_calls(task, calls))))
            told = episode.respond(Turn("I have no function for that."))
        assert told is not None and set(late) < set(map(tool_name, episode.tools()))
        shown, said = told[0]["content"].split("\n")
        assert [one["name"] for one in json.loads(shown)] == late
        assert said == multi_turn.NEW_TOOLS

    def test_a_hundred_rollouts_of_one_task_share_no_state(self):
        # Each marks objects of each kind. The precision and a table belong to the process.
        classes = ["GorillaFileSystem", "TwitterAPI", "VehicleControlAPI", "MathAPI"]
        config = the_task("multi_turn_base_0")["initial_config"]
        together, login = threading.Barrier(100), {"username": "analyst_pro", "password": "Kj8#mP9$vL2"}
        bases = [{"value": value, "base": 10} for value in range(2, 13)]

        def rollout(number, *, alone=False):
            replay = Replay(classes, config, [[]], long_context=True)
            answers = []
            for step in range(3):
                if not alone:
                    together.wait(timeout=60)
                mark = f"mark{number}_{step}"
                answers += [
                    replay.call("mkdir", {"dir_name": mark}),
                    replay.call("ls", {}),
                    replay.call("find", {"name": "mark"}),
                    replay.call("authenticate_twitter", login),
                    replay.call("post_tweet", {"content": mark}),
                    *(replay.call("get_outside_temperature_from_google", {}) for _ in range(number % 3 + 8)),
                    *(replay.call("logarithm", base | {"precision": 9 * number + 1}) for base in bases),
                    replay.call("square_root", {"number": 2, "precision": number + 1}),
                ]
            return answers

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # threads take turns within calls, not only between them
        try:
            with ThreadPoolExecutor(100) as pool:
                found = list(pool.map(rollout, range(100)))
        finally:
            sys.setswitchinterval(before)
        assert found == [rollout(number, alone=True) for number in range(100)]
        assert [answers[2].count("mark") for answers in found] == [1] * 100

    def test_a_payment_of_one_rollout_touches_no_card_of_another_nor_of_the_right_calls(self):
        # Stories with long answers come with credit cards that the package has once for the process.
        from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.long_context import CREDIT_CARD_EXTENSION

        (card, *_), known = CREDIT_CARD_EXTENSION, copy.deepcopy(CREDIT_CARD_EXTENSION)
        stories = tasks("multi_turn_long_context")
        task = next(task for task in stories if "TravelAPI" in task["involved_classes"])
        first, second = (Replay(["TravelAPI"], task["initial_config"], [[]], True) for _ in range(2))
        token = {"access_token": first._model.by_class["TravelAPI"].access_token}
        first.call("set_budget_limit", token | {"budget_limit": 1.0})
        flight = {"from": "SFO", "to": "LAX", "date": "2024-11-11", "class": "first"}
        paid = token | {f"travel_{name}": value for name, value in flight.items()} | {"card_id": card}
        assert json.loads(first.call("book_flight", paid))["booking_status"]
        balances = [
            objects.by_class["TravelAPI"].credit_card_list[card]["balance"]
            for replay in (first, second)
            for objects in (replay._model, replay._right)
        ]
        assert balances[0] < balances[1] == balances[2] == balances[3]
        assert known == CREDIT_CARD_EXTENSION


def _module_constants(modules):
    """Constants of modules, except the weather, which changes with each answer."""
    return {
        f"{name}.{constant}": value
        for name, module in modules.items()
        for constant, value in module.items()
        if constant.isupper() and constant != "LONG_WEATHER_EXTENSION"
    }


class TestHeldOut:
    def test_no_question_that_is_trained_on_is_in_a_held_out_category(self):
        taskset = single_turn.load()
        trained = {row.id for row in taskset.rows("train", None, 0)}
        held_out = [task for name in single_turn.HELD_OUT for task in tasks(name)]
        assert {row.id for row in taskset.rows("eval", None, 0)} == {task["id"] for task in held_out}
        asked = {question_key(task) for task in held_out}
        every = [task for name in single_turn.TRAINED for task in tasks(name)]
        assert trained == {task["id"] for task in every if question_key(task) not in asked}
        assert (len(every), len(trained)) == (1390, 1384)

    def test_no_story_that_is_trained_on_is_evaluated_in_any_category(self):
        taskset = multi_turn.load()
        trained, held_out = (
            [row.id.rpartition("_") for row in taskset.rows(split, None, 0)] for split in ("train", "eval")
        )
        assert {category for category, _, _ in trained} == {"multi_turn_base"}
        assert {category for category, _, _ in held_out} == set(multi_turn.HELD_OUT)
        assert not {story for _, _, story in trained} & {story for _, _, story in held_out}
        assert (len(trained), len(held_out)) == (150, 200)

    def test_rows_travel_as_json(self):
        for taskset in (single_turn.load(), multi_turn.load()):
            row = taskset.rows("eval", 1, 0)[0]
            assert json.loads(json.dumps(row.data)) == row.data

    def test_a_held_out_category_is_not_trained_on_by_name(self):
        with pytest.raises(UserError, match="none of live_simple is for this: training has simple_python, "):
            single_turn.load(categories=["live_simple"]).rows("train", 1, 0)
        with pytest.raises(UserError, match="BFCL has no 'simple' here; trained on are simple_python, "):
            single_turn.load(categories=["simple"]).rows("train", 1, 0)


class TestWithoutThePackage:
    @pytest.fixture(autouse=True)
    def not_installed(self, monkeypatch):
        monkeypatch.setattr(source, "find_spec", lambda name: None)

    @pytest.mark.parametrize("name", ["bfcl-single-turn", "bfcl-multi-turn"])
    def test_one_error_says_how_it_is_installed(self, name):
        with pytest.raises(
            EnvironmentUnusable, match="`make setup`, or `uv pip install --no-deps bfcl-eval=="
        ):
            find(name).load()

    def test_a_file_of_ones_own_in_python_needs_none(self, tmp_path):
        file = own_file(tmp_path, {"id": "own_0"}, {"id": "own_1", "split": "eval"})
        taskset = find("bfcl-single-turn").load(file=str(file))
        rows = {split: [row.id for row in taskset.rows(split, None, 0)] for split in ("train", "eval")}
        assert rows == {"train": ["own_0"], "eval": ["own_1"]}
        episode = taskset.episode(taskset.rows("train", 1, 0)[0])
        assert isinstance(episode, SingleTurnEpisode)
        episode.respond(turn_of(episode, calls_of(("book", {"what": "x"}))))
        assert episode.score().success


OWN = {
    "question": [[{"role": "user", "content": "Book x."}]],
    "function": [document(what={"type": "string"})],
    "ground_truth": [{"book": {"what": ["x"]}}],
}


def own_file(folder, *tasks):
    file = folder / "calls.jsonl"
    file.write_text("".join(json.dumps(OWN | dict(task)) + "\n" for task in tasks))
    return file


class TestAFileOfOnesOwn:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"id": 5}, "the id is a text, not 5"),
            ({"split": "test"}, 'split is "train" or "eval", not \'test\''),
            ({"question": []}, '"question" is a list of turns'),
            ({"question": [[{"role": "user"}]]}, '"question" is a list of turns'),
            ({"function": {}}, '"function" is a list of documents'),
            ({"function": [document(what={"type": "str"})]}, "'str'} has no type of BFCL's for Python (str"),
            ({"function": [document(what={"type": "array"})]}, "'array'} has no type of BFCL's for Python ("),
            ({"ground_truth": None}, '"ground_truth" is a list'),
            ({"ground_truth": [{"buy": {}}]}, "calls a function of the task each"),
            ({"ground_truth": [{"book": {"what": "x"}}]}, "lists the right values of each argument"),
        ],
    )
    def test_what_is_no_task_is_named_with_its_place(self, tmp_path, change, says):
        file = own_file(tmp_path, {"id": "own_0"}, {"id": "own_1"} | change)
        with pytest.raises(EnvironmentUnusable, match=f"^{file}, task 2: .*{re.escape(says)}"):
            single_turn.load(file=str(file)).rows("train", None, 0)

    def test_a_line_that_is_no_json_and_a_file_that_is_none(self, tmp_path):
        file = own_file(tmp_path, {"id": "own_0"})
        file.write_text(file.read_text() + "{id: 1}\n")
        with pytest.raises(EnvironmentUnusable, match=r"calls\.jsonl, line 2: no JSON"):
            single_turn.load(file=str(file)).rows("train", None, 0)
        with pytest.raises(EnvironmentUnusable, match=r"none\.jsonl cannot be read: No such file"):
            single_turn.load(file=str(tmp_path / "none.jsonl")).rows("train", None, 0)
        twice = own_file(tmp_path, {"id": "own_0"}, {"id": "own_0"})
        with pytest.raises(EnvironmentUnusable, match="an earlier task has the id 'own_0' too"):
            single_turn.load(file=str(twice)).rows("train", None, 0)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"involved_classes": ["WebSearchAPI"]}, '"involved_classes" lists some of GorillaFileSystem, '),
            ({"initial_config": []}, "are JSON objects"),
            ({"ground_truth": [[]]}, '"ground_truth" has a list of calls for each of the 2 turns'),
            ({"ground_truth": [[], ["add(a=1, b=os.getpid())"]]}, "is no call with literal arguments"),
            ({"missed_function": {}}, "turn 1 has no message, and no function comes with it"),
        ],
    )
    def test_a_conversation_is_checked_as_well(self, tmp_path, change, says):
        with pytest.raises(EnvironmentUnusable, match=re.escape(says)):
            multi_turn.load(file=str(own_file(tmp_path, SUM | change))).rows("train", None, 0)


SUM = {
    "id": "sum_0",
    "question": [[{"role": "user", "content": "What is 1 + 2?"}], []],
    "involved_classes": ["MathAPI"],
    "initial_config": {},
    "missed_function": {"1": ["add"]},
    "ground_truth": [[], ["add(a=1, b=2)"]],
}


def test_the_player_knows_a_tool_that_came_late(tmp_path, tiny_model):
    taskset = multi_turn.load(file=str(own_file(tmp_path, SUM)))
    taskset.name = "sums"
    (row,) = taskset.rows("train", None, 0)
    add = calls_of(("add", {"a": 1, "b": 2}))
    model = Told(AutoTokenizer.from_pretrained(tiny_model), add, "I cannot.", add, "It is 3.")
    (played,) = asyncio.run(play(taskset, row, model, EpisodeLimits(20_000, 20_000, 5_000)))
    assert played.fault is None and played.token_drift == 0
    assert [call.undeclared for call in played.conversation.calls] == [True, False]
    assert played.conversation.turns[2].answers[0]["content"] == '{"result": 3}'
    assert played.score is not None and played.score.success
