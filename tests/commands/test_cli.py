"""The command line: its errors, its imports, its help."""

import os
import subprocess
import sys
from importlib import import_module

import pytest

from drzero import cli
from drzero.ops.errors import OutOfTime, RunFailed, UserError
from drzero.recipe.settings.schema import own_keys, schema_of


@pytest.mark.parametrize(("error", "code"), [(UserError, 2), (RunFailed, 1), (OutOfTime, 75)])
def test_one_of_our_errors_is_one_line_and_its_exit_code(error, code, monkeypatch, capsys):
    def fail(command, arguments):
        raise error("what is wrong")

    monkeypatch.setattr(cli.CliCommand, "__call__", fail)
    assert cli.main(["status"]) == code
    assert capsys.readouterr().err == "drzero status: what is wrong\n"


def test_a_mistyped_key_is_reported_before_anything_large_is_imported():
    code = (
        "import sys; from drzero.cli import main; code = main(['challenger', 'data.train_batch_sise=8']); "
        "print(code, sorted({'verl', 'ray', 'transformers', 'chromadb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n" and "data.train_batch_size" in done.stderr


def test_no_help_imports_a_large_package():
    code = (
        "import sys; from drzero.cli import COMMANDS, main; main(['--help'])\n"
        "for name in COMMANDS: main([name, '--help'])\n"
        "large = {'torch', 'verl', 'hydra', 'omegaconf', 'httpx', 'psutil', 'rich', 'numpy'}\n"
        "print(sorted(large & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("\n[]\n"), done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--help"], 0, "KEY=VALUE | +KEY=VALUE"),
        (["preflight", "--help"], 0, "drzero preflight"),
        (["preflight", "serve-model", "solver.model_path=/nowhere/é–…"], 2, "/nowhere/é–…"),
        (["config", "é–…"], 2, "'é–…'"),
    ],
)
def test_output_that_is_not_utf_8_shows_all_that_it_can(words, code, shown, encoding):
    done = subprocess.run(
        [sys.executable, "-m", "drzero.cli", *words],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert (done.returncode, b"Traceback" in output) == (code, False)
    assert shown.encode(encoding, "replace") in output


def test_the_help_fits_a_screen_and_names_every_command(capsys):
    assert cli.main(["--help"]) == cli.main([]) == 0
    out = capsys.readouterr().out
    lines = out[: len(out) // 2].splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    for name, command in cli.COMMANDS.items():
        assert 0 < len(command.about) <= 30 and any(f"  {name} " in f"{line} " for line in lines)


def test_a_dotenv_file_sets_only_known_names(tmp_path, monkeypatch):
    (tmp_path / ".env").write_text(f"PYTHONPATH={tmp_path}\nLD_PRELOAD=x.so\nHF_TOKEN=planted\n")
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "LD_PRELOAD", "HF_TOKEN"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    assert cli.main(["config", "retrieval.topk"]) == 0
    assert os.environ["HF_TOKEN"] == "planted"
    assert not {"PYTHONPATH", "LD_PRELOAD"} & set(os.environ)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_of_its_own_and_a_function_that_exists(name, capsys):
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"    drzero {name}" in out, "an example"
    for words in ([name, "loop=demo", "--help"], [name, "-h"], ["help", name]):
        assert cli.main(words) == 0 and capsys.readouterr().out == out
    module, _, function = cli.COMMANDS[name].function.partition(":")
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("name", [name for name, command in cli.COMMANDS.items() if command.reports])
def test_the_help_of_a_stage_has_each_of_its_own_keys_with_type_default_and_doc_line(name, capsys):
    command = cli.COMMANDS[name]
    assert command.config is not None
    assert cli.main([name, "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    keys = own_keys(command.config)
    if command.keys:
        keys = [key for key in schema_of(command.config).keys.values() if key.name.startswith(command.keys)]
    assert keys
    for key in keys:
        assert f" {key.name} ({key.allowed}; default " in out and key.limits.doc in out


def test_the_help_of_a_stage_shows_the_default_that_its_file_sets(capsys, monkeypatch):
    monkeypatch.setattr("drzero.commands.help.own_keys", lambda stage: [schema_of(stage)["run.min_free_gb"]])
    assert cli.main(["evaluate", "--help"]) == 0
    assert "run.min_free_gb  (a number at least 0; default 1)" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert cli.main(["evalute", "iteration=1"]) == cli.main(["evalute", "--help"]) == 2
    assert "no command 'evalute' (did you mean 'evaluate'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "bogus=1"], "there is no key 'bogus'"),
        (["evolve", "--from=solver_itr1", "loop=demo"], "did you mean 'solver_iter1'?"),
        (["preflight", "chalenger"], "there is no stage 'chalenger' (did you mean 'challenger'?"),
        (["fetch-models", "chalenger"], "there is no stage 'chalenger' (did you mean 'challenger'?"),
        (["check-services", "solvr"], "not of 'solvr' (did you mean 'solver'?"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_made(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
