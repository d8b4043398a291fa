"""Does an index fit its server's memory and its builder's memory and disk? Estimates may be off by FACTOR."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from omegaconf import DictConfig

from drzero.ops.resources.cgroup import memory_free
from drzero.ops.resources.gpu import gpus_here
from drzero.ops.text import counted
from drzero.preflight.context import CheckContext
from drzero.preflight.cost import hours
from drzero.preflight.finding import Finding, error, refusal
from drzero.preflight.machine import Machine
from drzero.preflight.memory_ledger import index_files
from drzero.recipe.indices import index_of, places_of, target_of
from search.chroma.location import ChromaPlace
from search.indexing.size import FACTOR, TOKEN_BYTES, IndexSize, Planned
from search.sources.files import COMPRESSED, files_of
from search.sources.hub import is_data_set

GIB = 2**30
LEAST_DIMENSION = 384  # dimension of the smallest embedders, assumed before a model is loaded
COUNTED = 100_000  # at most so many files of a source are sized
CORE_SPEEDS = (60e9, 20e9)
"""Fast and slow operations a second of a core embedding in float32 (packaged embedder: 39e9, measured)."""
GPU_SHARES = (0.3, 0.05)  # The same as shares of a GPU's bfloat16 peak. Assumed, not measured.
_UNEVEN = 1.01  # the largest shard over the mean one, for hashed shards of more than 100,000 records
_SMALLER_SERVED = {
    "chroma": "it from another one (chroma.path=http://…)",
    "faiss": "one of codes (indexing.kind=ivfpq)",
}
_SMALLER_BUILT = {
    "chroma": "in shards (chroma.shards=…, indexing.writers=1), in a Chroma server (chroma.path=http://…)",
    "faiss": "as codes (indexing.kind=ivfpq)",
}


def check_served_index(ctx: CheckContext) -> Iterator[Finding]:
    """The index must fit its server's memory. A Chroma server has another machine."""
    config, host_gib = ctx.config, ctx.machine.host_gib
    if index_of(config).folder is None or host_gib is None:
        return
    info = ctx.index_info()
    if config.index == "faiss":  # its file is mapped
        least = needed = sum(path.stat().st_size for path in index_files(config))
    else:
        needed = IndexSize(info.chunks, info.dimension, 0).serving_bytes
        least = round(needed / FACTOR)
    if least / GIB > host_gib:
        why = (
            f"serving its {info.chunks:,} vectors of {info.dimension} numbers takes about "
            f"{needed / GIB:,.0f} GiB of memory, and the machine has {host_gib:,.0f}"
        )
        fix = f"declare a larger machine, or serve {_SMALLER_SERVED[config.index]}"
        yield error(index_of(config).setting, why, fix)


def source_bytes(ctx: CheckContext) -> int:
    """The size of the source's files, without compressed ones."""
    source, known = str(ctx.config.source), ctx.readings.source_bytes
    if source not in known:
        known[source] = 0
        with suppress(OSError):  # another check, or the reading itself, reports it
            for file in islice(files_of(Path(source), lambda path: None), COUNTED):
                is_packed = file.path.suffix.lower() in COMPRESSED
                known[source] += 0 if is_packed else file.path.stat().st_size
    return known[source]


def check_source_size(ctx: CheckContext) -> Iterator[Finding]:
    """A source must not be too large by its files' sizes alone."""
    config = ctx.config
    target = target_of(config)
    if config.source is None or target.folder is None or not (ctx.machine.is_local or ctx.starting):
        return
    if is_data_set(config.source) or ChromaPlace.parse(config.source).folder is None:
        return
    text_bytes = source_bytes(ctx)
    chunks = text_bytes // (TOKEN_BYTES * config.indexing.chunk_tokens)
    size = target.size(chunks, LEAST_DIMENSION, text_bytes)
    embeds_only = ctx.stage == "prepare_data" and config.indexing.embed_only
    for why, fix in _lacking(config, size, 0, embeds_only):
        yield error("source", f"by the size of its files {why}", fix)


def require_room(planned: Planned, config: DictConfig, machine: Machine, embeds_only: bool = False) -> str:
    """The index's sizes, hours and dollars. Raises PreflightFailed if it cannot fit this machine."""
    size = planned.size
    _require_quota(config, size.chunks)
    for why, fix in _lacking(config, size, planned.there, embeds_only):
        raise refusal("source", why, fix)
    low_s, high_s = (0.0, 0.0) if embeds_only else size.graph_seconds
    speeds = _speeds(config, machine)
    if speeds is not None:
        fast, slow = (planned.embedding_seconds(speed) for speed in speeds)
        low_s, high_s = low_s + fast, high_s + slow
    line = (
        f"{counted(size.chunks, 'chunk')} of {size.text_bytes // size.chunks:,} bytes, {planned.chunks:,} to "
        f"embed, {size.dimension} numbers a vector: about {gib(size.serving_bytes)} of memory to serve and "
        f"{gib(size.building_bytes)} to build, {gib(size.disk_bytes)} of disk and "
        f"{gib(size.journal_bytes)} more while building"
    )
    if speeds is None and embeds_only:
        return f"{line}; embedding time is unknown for this GPU"
    line += f", {hours(low_s)} to {hours(high_s)}"
    if speeds is None:
        line += " without the embedding (unknown GPU)"
    if machine.usd_per_hour:
        low, high = (seconds / 3600 * machine.usd_per_hour for seconds in (low_s, high_s))
        line += f", ${low:,.2f} to ${high:,.2f} on the declared machine"
    return line


def _require_quota(config: DictConfig, chunks: int) -> None:
    if config.index != "chroma" or all(place.folder for place in places_of(config)):
        return
    most, shards = config.chroma.quota.records, config.chroma.shards
    needed = chunks if shards == 1 else math.ceil(_UNEVEN * chunks / shards)
    if most is not None and needed > most:
        why = f"{chunks:,} chunks make up to {needed:,} per collection, and {most:,} are allowed"
        raise refusal("chroma.quota.records", why, f"chroma.shards={math.ceil(_UNEVEN * chunks / most)}")


def gib(size: float) -> str:
    """Bytes in three digits as GiB, or as MiB or KiB if they are few."""
    for unit, bytes_each in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if (value := size / bytes_each) >= 0.995 or unit == "KiB":
            break
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _lacking(config: DictConfig, size: IndexSize, there: int, embeds_only: bool) -> Iterator[tuple[str, str]]:
    """Why this machine cannot build the index, and the fix. The disk holds `there` bytes of it already."""
    index = index_of(config)
    if (folder := index.folder) is None:
        return
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    disk, memory = shutil.disk_usage(place).free, memory_free()
    smaller = "index a part of the corpus"
    needed = (size.journal_bytes if embeds_only else size.disk_while_building) - there
    if needed / FACTOR > disk:
        yield (
            f"{'embedding' if embeds_only else 'building'} {size.chunks:,} chunks takes about {gib(needed)} "
            f"of disk, and {place} has {gib(disk)} free",
            f"make room, choose another place ({index.setting}=…), or {smaller}",
        )
    if not embeds_only and size.building_bytes / FACTOR > memory:
        yield (
            f"building {size.chunks:,} chunks takes about {gib(size.building_bytes)} of memory, and this "
            f"machine has {gib(memory)} free",
            "close other programs, build it on a larger machine (indexing.embed_only=true embeds it here), "
            f"{_SMALLER_BUILT[config.index]}, or {smaller}",
        )


def _speeds(config: DictConfig, machine: Machine) -> tuple[float, float] | None:
    """Fast and slow operations a second of the embedder; None on an unknown GPU."""
    workers = config.indexing.workers
    if config.indexing.device == "cpu" or not gpus_here():
        cores = len(os.sched_getaffinity(0))
        return CORE_SPEEDS[0] * cores, CORE_SPEEDS[1] * cores
    if machine.gpu is None:
        return None
    peak = machine.gpu.bf16_tflops * 1e12 * workers
    return GPU_SHARES[0] * peak, GPU_SHARES[1] * peak
