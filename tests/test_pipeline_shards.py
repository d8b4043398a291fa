"""What the stages make of chroma.shards and of several places."""

from pathlib import Path

import pytest
from omegaconf import DictConfig

from pipeline.compose import compose_stage, resolve
from pipeline.indices import index_of, target_of
from pipeline.overrides import OverrideError
from pipeline.stages.services import retrieval_spec
from search.errors import StoreError
from search.indexing.shards import Shards
from search.server import index_of as served
from search.server import parser
from search.shard_layout import ShardLayout
from search.sharded_store import ShardedIndex
from search.store import ChromaIndex


def composed(stage: str, *overrides: str) -> DictConfig:
    return resolve(compose_stage(stage, ["hardware=cpu", *overrides]))


def test_one_shard_is_the_index_of_before(tmp_path: Path) -> None:
    config = composed("serve_search", f"chroma.path={tmp_path}")
    assert isinstance(index_of(config), ChromaIndex)
    assert "--shards" not in retrieval_spec(config).command


def test_the_service_is_started_with_the_places_and_the_shards_that_the_config_names() -> None:
    config = composed(
        "serve_search",
        "retrieval.port=8123",
        "chroma.shards=3",
        'chroma.path=["http://127.0.0.1:1","http://127.0.0.1:2"]',
    )
    layout = ShardLayout.parse(["http://127.0.0.1:1", "http://127.0.0.1:2"], "corpus", 3)
    words = retrieval_spec(config).command
    assert index_of(config) == ShardedIndex(layout)
    assert served(parser().parse_args(words[words.index("--chroma-path") :])) == ShardedIndex(layout)


def test_an_index_is_built_in_the_shards_that_the_config_names(tmp_path: Path) -> None:
    config = composed("prepare_data", "chroma.shards=4", "indexing.writers=3", f"chroma.path={tmp_path}")
    assert target_of(config) == Shards(ShardLayout.parse([str(tmp_path)], "corpus", 4), 3)


def test_several_places_without_shards_are_refused() -> None:
    config = composed("serve_search", "chroma.path=[one,two]")
    with pytest.raises(StoreError, match=r"chroma.path names one, two for chroma.shards=1"):
        index_of(config)


@pytest.mark.parametrize("path", ["null", "{a: b}"])
def test_what_is_no_place_is_refused_by_its_key(path: str) -> None:
    with pytest.raises(OverrideError, match=r"chroma\.path"):
        composed("serve_search", f"chroma.path={path}")
