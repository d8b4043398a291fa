"""`retrieval.url`: runs that search one service that runs already, over real servers on loopback."""

import asyncio
import functools
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from omegaconf import DictConfig, OmegaConf
from search_parts import (
    COLLECTION,
    PASSAGES,
    QUESTIONS,
    SPEC,
    build_collection,
    read_metric,
    serving_with_token,
)

from drzero.labs.trial import stage_services
from drzero.ops.records import EVENTS_FILE, read_json_lines
from drzero.ops.services.external import ExternalSpec
from drzero.ops.services.services import ServiceGroup, ServiceSpec
from drzero.preflight.context import CheckContext, Readings
from drzero.preflight.external_search import check_external_search
from drzero.preflight.finding import Finding
from drzero.preflight.machine import declared_machine
from drzero.preflight.memory_ledger import retrieval_in_host_memory
from drzero.recipe.compose import compose_stage, resolve, retrieval_url
from drzero.recipe.fingerprint import fingerprint_index
from drzero.stages.services import choose_ports, search_spec
from search.client import SearchClient
from search.index_info import ServiceUnusable
from search.wire import TOKEN_VARIABLE

TOKEN = "sesame-4711"
ELSEWHERE = "https://search.example.com/wiki"


@pytest.fixture(scope="module")
def chroma(tmp_path_factory):
    return build_collection(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def service(chroma):
    """The address of a service that asks for a token."""
    with serving_with_token(chroma, TOKEN) as url:
        yield url


@functools.cache
def composed(stage: str, *groups: str) -> DictConfig:
    return compose_stage(stage, ["hardware=cpu", *groups])


def run_config(
    folder: Path, url: str, changes: Mapping[str, str] | None = None, of: DictConfig | None = None
) -> DictConfig:
    """A run, by default an evaluation, that expects the passages' index and has none of its own."""
    config = (of or composed("evaluate")).copy()
    index = {
        "chroma.path": f"{folder}/none",
        "chroma.collection": COLLECTION,
        "retrieval.embedder": SPEC.name,
    }
    values = {"run.dir": f"{folder}/run", "retrieval.url": url, **index, **(changes or {})}
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    return resolve(config)


def findings(config: DictConfig, starting: bool = True) -> list[Finding]:
    machine = declared_machine(config, starting=starting)
    return list(check_external_search(CheckContext(config, "evaluate", machine, starting, False, Readings())))


def test_tools_rewards_and_environments_search_there(tmp_path):
    challenger = run_config(tmp_path, f"{ELSEWHERE}/", of=composed("challenger"))
    assert challenger.search_tool.tools[0].config.retrieval_url == ELSEWHERE
    assert challenger.reward.custom_reward_function.reward_kwargs.solver.retrieval.url == ELSEWHERE
    environment = run_config(tmp_path, f"{ELSEWHERE}/", of=composed("train", "env=search"))
    assert environment.environment.options.url == ELSEWHERE


def test_a_run_starts_no_retrieval_process_and_takes_no_port_or_memory_for_one(
    tmp_path, service, monkeypatch
):
    config = run_config(tmp_path, service, of=composed("challenger"))
    choose_ports(config)
    retrieval, solver = stage_services(config, "challenger")
    assert isinstance(retrieval, ExternalSpec) and isinstance(solver, ServiceSpec)
    before = psutil.Process().children(recursive=True)
    with ServiceGroup([retrieval]) as group:
        group.check()
        assert psutil.Process().children(recursive=True) == before
    assert config.retrieval.port is None and config.solver.port is not None
    assert retrieval_in_host_memory(config) == {}


def test_its_results_depend_on_the_same_index_as_with_a_service_of_its_own(
    tmp_path, chroma, service, monkeypatch
):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    config = run_config(tmp_path, service, {"chroma.path": str(chroma)})
    there = fingerprint_index(config)
    config.retrieval.url = None
    assert fingerprint_index(config) == there


def test_two_runs_search_one_service(tmp_path, service, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    before, titles = read_metric(service, "retrieval_queries_total"), dict[str, list[str]]()

    def run(config: DictConfig) -> None:
        async def ask() -> list[str]:
            client = SearchClient(retrieval_url(config.retrieval), topk=1)
            found = await client.retrieve(list(QUESTIONS))
            await client.aclose()
            return [passages[0]["title"] for passages in found]

        with ServiceGroup([search_spec(config)]):
            titles[config.run.dir] = asyncio.run(ask())

    folders = [tmp_path / "first", tmp_path / "second"]
    runs = [threading.Thread(target=run, args=(run_config(folder, service),)) for folder in folders]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    assert list(titles.values()) == [list(QUESTIONS.values())] * 2
    assert read_metric(service, "retrieval_queries_total") - before == 2 * len(QUESTIONS)
    for folder in titles:
        first, *_, last = read_json_lines(Path(folder) / "logs" / EVENTS_FILE)
        assert (first["kind"], last["kind"], first["component"]) == ("start", "stopped", "retrieval")


def test_preflight_shows_which_index_a_fitting_service_has(tmp_path, service, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    (found,) = findings(run_config(tmp_path, service))
    assert found.severity == "note" and f"{len(PASSAGES)} documents" in found.why


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("chroma.collection", "news", f"serves '{COLLECTION}'"),
        ("retrieval.embedder", "intfloat/e5-large-v2", "built with packaged-minilm"),
    ],
)
def test_preflight_refuses_a_service_of_another_collection_or_embedder(
    tmp_path, service, monkeypatch, key, value, says
):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    config = run_config(tmp_path, service, {key: value})
    (found,) = (one for one in findings(config) if one.severity == "error")
    assert found.key == key and says in found.why


def test_preflight_refuses_a_service_of_another_version_of_the_index_at_hand(tmp_path, service, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setitem(PASSAGES, "Orrin", "Orrin is a town that has lost its harbour.")
    config = run_config(tmp_path, service, {"chroma.path": str(build_collection(tmp_path))})
    (found,) = (one for one in findings(config) if one.severity == "error")
    assert found.key == "retrieval.url" and "prompts made from one are not about the other" in found.why


def test_preflight_refuses_a_token_that_the_service_does_not_take(tmp_path, service, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong-0815")
    with pytest.raises(ServiceUnusable, match="needs a bearer token: set RETRIEVAL_TOKEN") as refused:
        findings(run_config(tmp_path, service))
    assert "0815" not in str(refused.value)


def test_preflight_warns_of_a_token_that_is_sent_in_the_clear_to_another_machine(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    found = findings(run_config(tmp_path, "http://search.invalid:8000"))
    assert ["can read the token in RETRIEVAL_TOKEN" in one.why for one in found] == [True, False]
    assert [one.severity for one in found] == ["warning", "error"]


def test_a_service_that_only_the_declared_machine_may_reach_is_a_warning_here(tmp_path):
    config = run_config(tmp_path, "https://search.invalid", of=composed("evaluate", "compute=8xh100"))
    (found,) = findings(config, starting=False)
    assert found.severity == "warning" and "no retrieval service answers" in found.why
