"""What the stages make of chroma.shards and of several places."""

from contextlib import nullcontext

import pytest

from drzero.preflight import index_size
from drzero.preflight.finding import PreflightFailed
from drzero.preflight.index_size import require_room
from drzero.preflight.machine import declared_machine
from drzero.recipe.compose import compose_stage, resolve
from drzero.recipe.indices import index_of, places_of, target_of
from drzero.recipe.overrides import OverrideError, assigned
from drzero.stages.services import retrieval_spec
from search.chroma.location import Quota
from search.chroma.sharded_store import chroma_index
from search.errors import StoreError
from search.indexing.shards import Shards
from search.indexing.size import FACTOR, IndexSize, Planned
from search.server import index_of as served
from search.server import parser


def composed(stage, *overrides):
    return resolve(compose_stage(stage, ["hardware=cpu", *overrides]))


def test_the_service_is_started_with_the_places_and_the_shards_that_the_config_names():
    places = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    words = ("retrieval.port=8123", "chroma.shards=3", assigned("chroma.path", places))
    config, index = composed("serve_search", *words), chroma_index(places, "corpus", 3)
    words = retrieval_spec(config).command
    assert index_of(config) == index
    assert served(parser().parse_args(words[words.index("--chroma-path") :])) == index


def test_a_servers_quotas_are_those_of_the_config():
    quotas = ("chroma.quota.reads=10", "chroma.quota.page=300")
    config = composed("serve_search", "retrieval.port=8123", "chroma.path=http://one:1", *quotas)
    (place,) = places_of(config)
    assert place.quota == Quota(page=300, reads=10)
    words = retrieval_spec(config).command
    opened = served(parser().parse_args(words[words.index("--chroma-path") :]))
    assert opened.places[0].quota.reads == 10


@pytest.mark.parametrize(
    ("chunks", "shards", "said"),
    [
        (21_000_000, 4, r"chroma\.shards=5"),
        (21_000_000, 5, None),
        (20_000_000, 4, "up to 5,050,000 per collection"),  # in the largest shard, not the mean one
    ],
)
def test_an_index_beyond_a_servers_quota_is_refused_with_the_shards_that_fit(chunks, shards, said):
    limits = ("chroma.path=http://one:1", f"chroma.shards={shards}", "chroma.quota.records=5000000")
    config, size = composed("prepare_data", *limits), IndexSize(chunks, 1024, chunks * 650)
    planned = Planned(size, size.chunks, size.text_bytes, 1, 0)
    with pytest.raises(PreflightFailed, match=said) if said else nullcontext():
        require_room(planned, config, declared_machine(config, starting=True))


@pytest.mark.parametrize(("free", "fits"), [(0.99, False), (1.01, True)])
def test_an_index_is_built_in_the_memory_that_other_programs_leave(tmp_path, monkeypatch, free, fits):
    size = IndexSize(1_000_000, 384, 10**8)
    monkeypatch.setattr(index_size, "memory_free", lambda: int(free * size.building_bytes / FACTOR))
    config = composed("prepare_data", f"chroma.path={tmp_path}")
    said = r"takes about 4\.16 GiB of memory, and this machine has 2\.75 GiB free: close other programs, "
    with nullcontext() if fits else pytest.raises(PreflightFailed, match=said):
        require_room(Planned(size, 10, 10, 1, 0), config, declared_machine(config, starting=True))


def test_an_index_is_built_in_the_shards_that_the_config_names(tmp_path):
    config = composed("prepare_data", "chroma.shards=4", "indexing.writers=3", f"chroma.path={tmp_path}")
    assert target_of(config) == Shards(chroma_index([str(tmp_path)], "corpus", 4), 3)


@pytest.mark.parametrize("path", ["null", "{a: b}"])
def test_several_places_without_shards_and_what_is_no_place_are_refused(path):
    config = composed("serve_search", "chroma.path=[one,two]")
    with pytest.raises(StoreError, match=r"chroma.path names one, two for chroma.shards=1"):
        index_of(config)
    with pytest.raises(OverrideError, match=r"chroma\.path"):
        composed("serve_search", f"chroma.path={path}")
