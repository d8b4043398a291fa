"""How a loop treats its finished stages, on hand-made run folders and manifests."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from drzero.loop.identity import identity, input_identities, significant_config
from drzero.loop.manifest import LoopChanged, Manifest
from drzero.loop.plan import compose_loop, plan_loop
from drzero.loop.preflight import preflight_stage
from drzero.loop.state import check_finished, forget, prune, recover, stages_from
from drzero.recipe.compose import compose_plain


class Finished:
    """A loop of two iterations with every stage complete and small files as results."""

    def __init__(self, prepared, folder, *more):
        self.folder = folder
        self.arguments = ["iterations=2", *prepared.overrides(folder)[:-1], *more]
        self.plan = planned(*self.arguments)
        self.configs = {run.name: composed(run) for run in self.plan}
        self.manifest = Manifest(folder / "evolve" / "manifest.json")
        if not self.manifest.entries:
            for run in self.plan:
                self._finish(run)

    def _finish(self, run):
        config = self.configs[run.name]
        inputs = input_identities(run.stage, config)
        self.manifest.begin(run.name, significant_config(run.stage, config, run.overrides), inputs)
        outputs = write_results(run, Path(config.run.dir), Path(config.run.export_dir))
        self.manifest.entry(run.name).outputs = {
            name: {"path": str(path), "identity": identity(path), "pruned": False}
            for name, path in outputs.items()
        }
        self.manifest.end(run.name, "complete")

    def run(self, name):
        return next(run for run in self.plan if run.name == name)

    def check(self):
        check_finished(self.plan, self.configs, self.manifest)

    def prune_all(self):
        for run in self.plan:
            prune(run, self.configs, self.manifest)


@cache
def planned(*arguments):
    """Planning composes the loop; the same one is planned once."""
    return plan_loop(compose_loop(list(arguments)))


@cache
def composed(run):
    """Composing takes a while; the same stage with the same overrides is composed once."""
    return compose_plain(run.stage, run.overrides)


def write_results(run, folder, export):
    """The files that later stages read."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {}
    if run.stage in ("challenger", "solver"):
        outputs["checkpoint"] = folder / "global_step_1"
        (outputs["checkpoint"] / "actor").mkdir(parents=True)
        (outputs["checkpoint"] / "data.pt").write_text(run.name)
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
    if run.stage in ("challenger", "merge"):
        outputs["export"] = export
        export.mkdir()
        (export / "config.json").write_text(json.dumps({"made by": run.name}))
    if run.stage == "synthesize":
        outputs = {name: folder / f"{name}.parquet" for name in ("train", "val")}
        for name, path in outputs.items():
            path.write_text(f"{name} {run.name}")
    return outputs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("loops") / "loop"


@pytest.fixture
def finished(prepared, place):
    yield Finished(prepared, place)
    shutil.rmtree(place)


@pytest.fixture
def reopen(prepared, place):
    return lambda *more: Finished(prepared, place, *more)


@pytest.mark.parametrize("prunes", [False, True])
def test_a_finished_loop_fits_itself_pruned_or_not(finished, reopen, prunes):
    if prunes:
        finished.prune_all()
    reopen().check()


def test_you_can_ask_for_more_iterations_later(finished, reopen):
    finished.prune_all()
    longer = reopen("iterations=3")
    longer.check()
    left = [run.name for run in longer.plan if not longer.manifest.is_complete(run.name)]
    assert left[0] == "challenger_iter3"


def test_pruning_leaves_the_last_challengers_checkpoint_alone(finished):
    finished.prune_all()
    left = sorted(path.parent.name for path in finished.folder.glob("*/global_step_*"))
    assert left == ["challenger_iter2"]


def test_the_next_start_completes_a_killed_pruning(finished, reopen):
    finished.prune_all()
    half = finished.folder / "solver_iter1" / "global_step_1" / "actor"
    half.mkdir(parents=True)
    later = reopen()
    recover(later.manifest, later.configs, later.folder / "evolve")
    later.check()
    assert not half.exists()


def append_to(path):
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("more", "change", "refusal"),
    [
        (["solver.attempts=3"], None, r"challenger_iter1 is complete.*\n.*solver.attempts: 5 → 3"),
        ([], "synthesize_iter1/train.parquet", r"output train: .* has changed"),
        ([], "-synthesize_iter1/val.parquet", r"output val: .* is missing"),
    ],
)
def test_a_finished_stage_that_no_longer_fits_is_refused_with_the_change(
    finished, reopen, more, change, refusal
):
    if change:
        path = finished.folder / change.removeprefix("-")
        path.unlink() if change.startswith("-") else append_to(path)
    with pytest.raises(LoopChanged, match=refusal):
        reopen(*more).check()


def test_changed_prompts_of_the_same_name_are_refused(finished, reopen, prepared):
    prompts = prepared.corpus / "data" / "zero_ratio4321.parquet"
    content = prompts.read_bytes()
    append_to(prompts)
    try:
        with pytest.raises(LoopChanged, match="input prompts: its content has changed"):
            reopen().check()
    finally:
        prompts.write_bytes(content)


def test_an_evaluation_that_no_longer_fits_is_redone_and_nothing_else(finished, reopen, capsys):
    later = reopen("stages.evaluate.questions_per_benchmark=7")
    later.check()
    again = [run.name for run in later.plan if not later.manifest.is_complete(run.name)]
    assert again == ["evaluate_iter0", "evaluate_iter1", "evaluate_iter2"]
    assert "questions_per_benchmark" in capsys.readouterr().out


def test_a_stage_begun_with_other_settings_is_not_resumed(finished, reopen):
    finished.manifest.end("challenger_iter2", "failed", "killed")
    for name in ("synthesize_iter2", "solver_iter2", "merge_iter2", "evaluate_iter2"):
        finished.manifest.entries.pop(name)
    finished.manifest.save()
    changed = reopen("stages.challenger.data.seed=7")
    only_second = [run for run in changed.plan if run.name == "challenger_iter2"]
    with pytest.raises(LoopChanged, match=r"challenger_iter2 was started with other settings"):
        check_finished(only_second, changed.configs, changed.manifest)


def test_another_runs_checkpoint_is_not_taken_over(finished, reopen):
    finished.manifest.entries = {"evaluate_iter0": finished.manifest.entry("evaluate_iter0")}
    finished.manifest.save()
    with pytest.raises(LoopChanged, match="challenger_iter1 holds a run that this loop has not started"):
        reopen().check()


def test_preflight_counts_the_stages_that_from_redoes(finished):
    again = preflight_stage("evolve", ["--from", "merge_iter2", *finished.arguments])[-1]
    assert again.name == "evolve" and again.estimate is not None


def test_a_loop_whose_stage_would_save_nothing_is_refused(finished):
    words = [*finished.arguments, "trainer.save_freq=-1"]
    errors = [str(found) for report in preflight_stage("evolve", words) for found in report.errors]
    assert any("leaves no model for the next stages" in text for text in errors)


def test_preflight_counts_the_loop_of_every_seed_and_knows_that_the_demo_comes_first(tmp_path):
    words = ["loop=demo", f"paths.corpus={tmp_path / 'corpus'}", f"paths.checkpoints={tmp_path}"]
    one, three = (preflight_stage("evolve", [*words, *seeds]) for seeds in ([], ["--seeds", "3"]))
    assert not [str(found) for report in one for found in report.errors]
    assert "evolve makes it first" in str(one[0].findings[-1])
    assert three[-1].estimate.low_s == pytest.approx(3 * one[-1].estimate.low_s)
    full = [f"paths.checkpoints={tmp_path / 'corpus' / 'runs'}", "run.min_free_gb=1000000"]
    errors = [found for report in preflight_stage("evolve", [*words, *full]) for found in report.errors]
    assert {found.key for found in errors} == {"run.min_free_gb"}
    (tmp_path / "corpus").mkdir()
    assert any(report.errors for report in preflight_stage("evolve", words))


def test_a_training_that_ended_before_its_first_checkpoint_may_be_resumed(finished):
    solver = finished.folder / "solver_iter1"
    (solver / "latest_checkpointed_iteration.txt").unlink()
    shutil.rmtree(solver / "global_step_1")
    reports = preflight_stage("evolve", finished.arguments)
    assert "source" not in {finding.key for report in reports for finding in report.findings}


def test_from_redoes_a_stage_and_everything_built_on_it(finished):
    again = stages_from("solver_iter1", finished.plan, finished.manifest)
    assert again[0].name == "solver_iter1" and again[-1].name == "evaluate_iter2"
    forget(again, finished.configs, finished.manifest)
    left = ["challenger_iter1", "challenger_iter1_hf", "evaluate_iter0", "evolve", "synthesize_iter1"]
    assert sorted(path.name for path in finished.folder.iterdir()) == left


def test_nothing_is_built_on_an_evaluation(finished):
    assert stages_from("evaluate_iter0", finished.plan, finished.manifest) == [finished.plan[0]]


@pytest.mark.parametrize("name", ["solver_iter1", "challenger_iter2"])
def test_from_is_refused_if_a_later_stage_needs_a_pruned_checkpoint(finished, name):
    finished.prune_all()
    with pytest.raises(LoopChanged, match="challenger_iter2 needs the checkpoint of challenger_iter1"):
        stages_from(name, finished.plan, finished.manifest)
    assert (finished.folder / "solver_iter1").exists()


def test_the_next_start_completes_a_killed_removal(finished, reopen):
    finished.manifest.entry("evaluate_iter2").state = "forgotten"
    finished.manifest.save()
    later = reopen()
    recover(later.manifest, later.configs, later.folder / "evolve")
    assert "evaluate_iter2" not in later.manifest.entries
    assert not (finished.folder / "evaluate_iter2").exists()


@pytest.mark.parametrize(
    "text", ["", '{"stages": {"a": {"state": "comp', "[]", '{"stages": {"a": {"state": "done"}}}', "{}"]
)
def test_a_damaged_manifest_is_named(tmp_path, text):
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(LoopChanged, match=r"manifest\.json is no loop's manifest"):
        Manifest(path)
