"""What may be typed after `modal run modal_train.py`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drzero.launch.actions import ACTIONS
from drzero.launch.arguments import parse, parse_modal_run, split_overrides
from drzero.launch.errors import LaunchError


def test_flags_and_any_number_of_overrides_come_in_any_order():
    words = parse(
        [
            *("+trainer.foo=1", "--action", "challenger", "a.b=[1,2]", "--iteration", "2"),
            *("~data.seed", "--model", "qwen3-8b"),
        ]
    )
    assert (words.action, words.iteration, words.model) == ("challenger", 2, "qwen3-8b")
    assert words.overrides == ["+trainer.foo=1", "a.b=[1,2]", "~data.seed"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--action chalenger", "did you mean 'challenger'?"),
        ("--action challenger --modle x", "did you mean '--model'?"),
        ("--action challenger --iteration two", "--iteration"),
        ("--action challenger --steps 0", "--steps 0: must be 1 or more"),
        ("--action merge --steps 3", "--steps: merge does not read it. It is for challenger"),
        (
            "--action train --env wordle --stage solver",
            "--stage: train does not read it: use --action solver",
        ),
        ("--action evolve --iteration 2", "--iteration: evolve does not read it"),
        ("--action evaluate --serve-gpus 2", "--serve-gpus: evaluate does not read it. It is for challenger"),
        ("--action solver --serve-gpus 0", "--serve-gpus 0: must be 1 or more"),
        ("--action solver --trainer-gpu-ids 0,1", "go together, or --serve-gpus alone"),
        ("--action solver --trainer-gpu-ids 0 --inference-gpu-ids 1 --serve-gpus 1", "go together"),
        (
            "--action solver --trainer-gpu-ids a,b --inference-gpu-ids 2",
            "--trainer-gpu-ids a,b: write numbers",
        ),
        (
            "--action solver --trainer-gpu-ids 0,1 --inference-gpu-ids 1,2",
            "--trainer-gpu-ids 0,1 --inference-gpu-ids 1,2: name each GPU of the machine once, 0 to 3",
        ),
        (
            "--action solver --trainer-gpu-ids 0,1 --inference-gpu-ids 2,3 --gpu-count 8",
            "once, 0 to 7; --gpu-count says how many it has",
        ),
        ("--action challenger --follow", "--follow: challenger does not read it. It is for logs"),
        ("--action challenger wordle", "'wordle': challenger takes only flags and overrides"),
        ("challenger", "an action is required: --action smoke, --action prepare-data"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(line, message):
    with pytest.raises(LaunchError) as refused:
        parse(line.split())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@given(
    action=st.sampled_from(sorted(ACTIONS)),
    overrides=st.lists(st.from_regex(r"\+?[a-z]{1,8}(\.[a-z]{1,8}){0,3}=[^\x00]{0,20}", fullmatch=True)),
)
def test_overrides_pass_through_unchanged(action, overrides):
    assert parse(["--action", action, *overrides]).overrides == overrides


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("modal run modal_train.py --action smoke", parse(["--action", "smoke"])),
        ("modal run --detach -q ./modal_train.py --action smoke", parse(["--action", "smoke"])),
        ("modal run modal_train.py::main --action smoke", parse(["--action", "smoke"])),
        ("modal deploy modal_train.py", None),
        ("pytest modal_train.py", None),
    ],
)
def test_only_modal_run_of_the_file_is_parsed(argv, words):
    assert parse_modal_run(argv.split(), "modal_train.py") == words


def function_words(line):
    return parse_modal_run(f"modal run modal_train.py::{line}".split(), "modal_train.py")


def test_the_other_entry_points_take_the_same_flags_and_overrides_in_either_form():
    words = function_words("train --env wordle trainer.save_freq=5 --overrides +a=1")
    assert (words.env, words.overrides) == ("wordle", ["+a=1", "trainer.save_freq=5"])
    words = function_words("train --stage solver --config-path=a.yaml --steps 3")
    assert (words.action, words.config_path, words.steps) == ("solver", "a.yaml", 3)
    assert function_words("evaluate --num-examples 50").num_examples == 50
    # What the environment trains, which is known once the run file is read.
    assert function_words("train_with_config --config-path a.yaml").action == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1 +b=2", ["a=1", "+b=2"]),
        ("+a.b='x y'", ["+a.b='x y'"]),
        ("c=[1, 2] d={e: 'f g'}", ["c=[1, 2]", "d={e: 'f g'}"]),
        ("'c=[1, 2]' a=1", ["c=[1, 2]", "a=1"]),
        ("", []),
    ],
)
def test_overrides_in_one_string_are_separated_outside_of_quotes_and_brackets(text, words):
    assert split_overrides(text) == words


@given(st.lists(st.from_regex(r"[a-z]{1,5}=('[a-z ]{0,5}'|[a-z0-9]{1,5}|\[[a-z, ]{0,8}\])", fullmatch=True)))
def test_overrides_in_one_string_come_out_as_they_went_in(overrides):
    assert split_overrides("  ".join(overrides)) == overrides


def test_a_quote_that_is_not_closed_is_one_line():
    with pytest.raises(LaunchError, match="a quote or bracket is not closed"):
        split_overrides("+a.b='x y")


def test_help_lists_actions_and_flags(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"  {name}  " in shown for name in ACTIONS) and "--gpu-type" in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --stage merge", "--stage merge: use train, challenger, solver or evolve"),
        ("train --stage solvr", "did you mean 'solver'?"),
        ("trian --steps 1", "::trian: no such entry point .did you mean 'train'?"),
        ("train --stpes 1", "--stpes: no such flag .did you mean '--steps'?"),
        ("train --stage train --iteration 3", "--iteration: train does not read it"),
    ],
)
def test_a_mistake_in_an_app_functions_flags_is_one_line(line, message):
    with pytest.raises(LaunchError, match=message):
        function_words(line)
