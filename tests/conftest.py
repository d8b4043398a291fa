"""Parts that several test files need: a small prepared run, and real HTTP peers on loopback."""

import os
import signal

from loopback_hub import NO_HUB

# Before any library that reads them is imported. The hub is out of reach as it is for users: nobody answers.
# HF_HUB_OFFLINE would hide what then retries.
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{NO_HUB}"
os.environ.pop("HF_HUB_OFFLINE", None)
# Models here are tiny, and with two threads in each of two workers the threads would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's own servers then stay on loopback
# A shell's background job has Ctrl-C ignored, and the commands that tests start would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Ray starts its workers at 15, where they get next to nothing while another test computes.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112, its name for Ray

import functools
import gc
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import omegaconf.base
import pytest
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from filelock import FileLock
from hypothesis import settings
from launched_loop import launched
from omegaconf import OmegaConf
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from data.demo_world import generate_world, write_world
from drzero.cli import main
from drzero.ops.hub import hub_fault
from drzero.preflight.model_shape import _fetch_config

# An example takes long where two workers share two cores with a training run; that is no failure. Every
# run draws new examples, so 50 see what 100 do, in two runs.
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")

Answer = Callable[[dict[str, Any]], Any]
"""From a request's JSON body to the response's, to an HTTP status that says no, or to a whole response."""


@dataclass
class Peer:
    """A server on loopback: its address, the JSON bodies it was sent, and with which keys it was asked."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    """Of all requests; None of one without."""


# Files of whole runs take minutes and some 7 GB each. They run in two lanes of similar length, so that no
# third run competes with two, and neither worker is left alone with one at the end. The files of the first
# lane assert on one launched loop, which a session fixture makes once a worker.
LANES = (
    ("test_modal_loop.py", "test_evolve.py", "test_solver.py", "test_challenger.py"),
    ("test_modal_runs.py", "test_synthesize.py", "test_merge.py"),
)


class Lanes(LoadFileScheduling):
    """Two workers take a lane each, then the other files; a file stays whole because its tests share runs."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        name = file.rpartition("/")[2]
        return next((str(lane) for lane in LANES if name in lane), file)


# Optional: without xdist (`-p no:xdist`) nobody knows this hook.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Lanes:
    """Schedule tests by lanes and files."""
    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the lanes first; else the order stays."""
    place = {name: number for number, name in enumerate(name for lane in LANES for name in lane)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported by now, and run it as seldom as `drzero` does."""
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A one-layer embedder, which builds an index in seconds."""
    from tiny_embedder import save_tiny_embedder  # which imports torch

    return save_tiny_embedder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def encoded(monkeypatch):
    """The passages that a test embeds."""
    from index_builds import record_encoded

    return record_encoded(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def config_files_parsed_once():
    # Copy a shipped config file that is loaded again from the first time: parsing is half of
    # composing. The same goes for the texts of interpolations.
    verl = find_spec("verl")
    assert verl and verl.origin
    shipped = (str(Path(__file__).parent.parent / "config"), str(Path(verl.origin).parent))
    parsed: dict[str, bytes] = {}
    load = OmegaConf.load

    def load_once(file: Any) -> Any:
        name = str(getattr(file, "name", file))
        if not name.startswith(shipped):
            return load(file)
        if name not in parsed:
            parsed[name] = pickle.dumps(load(file))
        return pickle.loads(parsed[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load_once))
        patch.setattr("omegaconf.base.parse", functools.cache(omegaconf.base.parse))
        yield


@pytest.fixture(scope="session", autouse=True)
def tokenizers_read_once():
    # Copy a tokenizer that is loaded again from the first time, which takes a third as long. Most
    # commands load one, and the vocabulary of the tests' models is a real one.
    from transformers import PreTrainedTokenizerBase

    loaded: dict[tuple[Any, ...], bytes] = {}
    load = PreTrainedTokenizerBase.from_pretrained.__func__

    def load_once(own: type, path: Any, *arguments: Any, **options: Any) -> Any:
        files = sorted(Path(path).glob("*.j*"))  # .json and .jinja; none of what is on the hub
        found = [(file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        key = (own, str(path), repr((found, arguments, sorted(options.items()))))
        if not found:
            return load(own, path, *arguments, **options)
        if key not in loaded:
            loaded[key] = pickle.dumps(load(own, path, *arguments, **options))
        return pickle.loads(loaded[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "from_pretrained", classmethod(load_once))
        yield


_ENVIRON = os.environ


@pytest.fixture(autouse=True)
def one_environ():
    # Put back what rich read first: `datasets` 5 leaves a copy in place of `os.environ` when it maps.
    os.environ = _ENVIRON  # noqa: B003, it is the environment itself


@dataclass(frozen=True)
class Prepared:
    """What a challenger run needs, made by the CLI: corpus, index, prompts, a policy."""

    corpus: Path
    model: Path
    documents: list[dict[str, Any]]

    def overrides(self, checkpoints: Path, model: Path | None = None) -> list[str]:
        """The overrides under which the stages find it; `model` stands in for the random one."""
        return [
            "hardware=cpu",
            "model=demo-policy",
            # Of every hop that a prompt can ask for.
            "hop_ratio=[4,3,2,1]",
            f"base_model={model or self.model}",
            f"paths.corpus={self.corpus}",
            f"paths.checkpoints={checkpoints}",
            # As above; the profile would take every core.
            "process_env.OMP_NUM_THREADS=1",
            "run.name=tiny",
        ]


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, save: Callable[[Path], Path]) -> Path:
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    shared = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.getbasetemp()
    folder = shared / name
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            save(shared / f"{name}.building").rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from tiny_model import save_tiny_model  # imports Transformers, which many test files need nothing of

    return made_once(tmp_path_factory, "tiny", save_tiny_model)


@pytest.fixture(scope="session")
def smollm2_tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def tokenizer(smollm2_tokenizer):
    return smollm2_tokenizer


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory, smollm2_tokenizer):
    # A two-layer model that knows the protocol by heart; it takes half a minute.
    from tiny_model import save_speaking_model

    return made_once(
        tmp_path_factory, "speaking", lambda folder: save_speaking_model(folder, tokenizer=smollm2_tokenizer)
    )


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, tiny_model):
    return make_prepared(tmp_path_factory.mktemp("corpus"), tiny_model)


def make_prepared(corpus: Path, model: Path) -> Prepared:
    write_world(generate_world(0, "run", passages=60), corpus)
    documents = [json.loads(line) for line in (corpus / "corpus.jsonl").read_text().splitlines()]
    made = Prepared(corpus, model, documents)
    source = f"source={corpus / 'corpus.jsonl'}"
    assert main(["prepare-data", *made.overrides(corpus), source, "rows=60", "heldout_rows=0"]) == 0
    return made


@pytest.fixture(scope="session")
def launched_loop(tmp_path_factory, prepared, speaking_model):
    with launched(tmp_path_factory.mktemp("launched"), prepared.corpus, speaking_model) as loop:
        yield loop


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    from modal_checkout import make_checkout

    return make_checkout(tmp_path_factory.mktemp("checkout"), dotenv=True)


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    from modal_plane import ControlPlane

    with ControlPlane(tmp_path_factory.mktemp("plane")) as plane:
        yield plane


@pytest.fixture(scope="session")
def towns_index(tmp_path_factory):
    from scripted_endpoint import write_towns
    from search_parts import COLLECTION, SPEC

    from search.indexing.shards import build_index

    folder = tmp_path_factory.mktemp("towns")
    build_index(write_towns(folder), folder / "chroma", COLLECTION, SPEC)
    return folder / "chroma"


@pytest.fixture(scope="module")
def towns(towns_index):
    from search_parts import serving

    with serving(towns_index) as server:
        yield server.url


@pytest.fixture(scope="session")
def sglang_python():
    # The Python of an environment with SGLang, for tests that run it; they fail where there is none.
    python = os.environ.get("DRZERO_SGLANG_PYTHON")
    assert python, "run them by `make test-sglang`, or set DRZERO_SGLANG_PYTHON to .venv-sglang/bin/python"
    return python


@pytest.fixture
def fresh_hub(tmp_path, monkeypatch):
    # What was found of the hub is forgotten before and after, and its cache is empty.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for found in (hub_fault, _fetch_config):
        found.cache_clear()
    yield
    for found in (hub_fault, _fetch_config):
        found.cache_clear()


@pytest.fixture(scope="module")
def queue():
    import ray
    import transfer_queue as tq

    with pytest.MonkeyPatch.context() as patch:
        # With Ray's niceness of 15, workers would starve next to other tests.
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False)
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield
        tq.close()
        ray.shutdown()


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve an application in a thread. Yields the base address of its model."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture
def start_peer():
    # Start servers that answer POST requests at one path by a function, and GET requests by fixed
    # JSON.
    running = ExitStack()

    def start(path: str, answer: Answer, fixed: Mapping[str, Any] | None = None) -> Peer:
        peer = Peer()

        async def endpoint(request: Request) -> Response:
            peer.requests.append(await request.json())
            answered = answer(peer.requests[-1])
            if isinstance(answered, int):
                return JSONResponse({"error": "scripted"}, status_code=answered)
            return answered if isinstance(answered, Response) else JSONResponse(answered)

        def note_key(request: Request) -> None:
            peer.keys.add(request.headers.get("authorization"))

        app = FastAPI(dependencies=[Depends(note_key)])
        app.add_api_route(path, endpoint, methods=["POST"])
        for other_path, content in (fixed or {}).items():
            app.add_api_route(other_path, _always(content))
        peer.url = running.enter_context(served(app)).removesuffix("/v1")
        return peer

    with running:
        yield start


def _always(content: Any) -> Callable[[], Any]:
    return lambda: content


_given: set[int] = set()


def unused_port() -> int:
    """A port on which nothing listens, and that no earlier call has given."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port
