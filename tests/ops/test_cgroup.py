"""Memory that a process may use: the machine's, or its container's."""

import psutil
import pytest

from drzero.ops.resources.cgroup import memory_free, memory_limit

GIB = 2**30


@pytest.mark.parametrize(
    ("membership", "folder", "files"),
    [
        ("0::/run/job", "run", ("memory.max", "memory.current", "inactive_file")),
        ("0::/", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/job",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2, of the group above", "version 2, in a container", "version 1"],
)
def test_a_containers_limit_is_all_there_is(tmp_path, membership, folder, files):
    (tmp_path / "membership").write_text(membership)
    group = tmp_path / folder
    group.mkdir(parents=True, exist_ok=True)
    limit, used, cache = files
    (group / limit).write_text(str(GIB))
    (group / used).write_text(str(GIB // 2))
    (group / "memory.stat").write_text(f"anon 5\n{cache} {GIB // 4}\n")
    assert memory_limit(tmp_path, tmp_path / "membership") == GIB
    assert memory_free(tmp_path, tmp_path / "membership") == GIB - GIB // 2 + GIB // 4


@pytest.mark.parametrize("limit", ["max", None], ids=["no limit", "unreadable"])
def test_without_a_limit_it_is_the_machines(tmp_path, limit):
    (tmp_path / "membership").write_text("0::/job")
    (tmp_path / "job").mkdir()
    if limit:
        (tmp_path / "job" / "memory.max").write_text(limit)
    assert memory_limit(tmp_path, tmp_path / "membership") == psutil.virtual_memory().total
    assert 0 < memory_free(tmp_path, tmp_path / "membership") <= psutil.virtual_memory().total
