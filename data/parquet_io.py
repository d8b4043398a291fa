"""Training rows as parquet. The schema is explicit: a column of nulls would get parquet's null type."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data.errors import DataError
from drzero.ops.files import atomic_path

AGENT_NAME = "search_agent"
ABILITY = "fact-reasoning"

TRAINING_SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct(
            {"style": pa.string(), "ground_truth": pa.struct({"target": pa.list_(pa.string())})}
        ),
        "extra_info": pa.struct(
            {
                "index": pa.int64(),
                "split": pa.string(),
                "hop": pa.int64(),
                "doc_id": pa.string(),
                "document": pa.string(),
                "question": pa.string(),
                "need_tools_kwargs": pa.bool_(),
                "tools_kwargs": pa.struct(
                    {"search": pa.struct({"create_kwargs": pa.struct({"data_source": pa.string()})})}
                ),
            }
        ),
        "agent_name": pa.string(),
        "metadata": pa.struct(
            {
                "corpus_id": pa.string(),
                "document_sha256": pa.string(),
                "generator_checkpoint": pa.string(),
                "seed": pa.int64(),
                "trajectory": pa.string(),  # JSON text: its shape differs from row to row
            }
        ),
    }
)

_SOURCE = re.compile(r"search_zero_(?P<hop>[1-9]\d*)|search_zero|searchR1_\w+")


def training_row(
    source: str,
    prompt: Sequence[Mapping[str, str]],
    target: list[str] | None,
    extra: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a row of TRAINING_SCHEMA. `extra` and `metadata` lack the constant fields."""
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": {"target": target}},
        "extra_info": {
            **extra,
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": {"data_source": source}}},
        },
        "agent_name": AGENT_NAME,
        "metadata": {**metadata, "document_sha256": sha256(extra["document"].encode()).hexdigest()},
    }


def write_training_rows(
    path: Path, rows: Sequence[Mapping[str, Any]], check: Callable[[Path], object] | None = None
) -> None:
    """Check `rows` and write them atomically. If `check` rejects the written file, it is removed."""
    if not rows:
        raise DataError(f"no rows to write to {path}: veRL cannot train on an empty file")
    check_training_rows(rows)
    table = pa.Table.from_pylist(list(rows), schema=TRAINING_SCHEMA)
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary)
        if check:
            check(temporary)


def read_parquet(path: Path, columns: Sequence[str] = tuple(TRAINING_SCHEMA.names)) -> pa.Table:
    """Read `columns`, every struct in every row. Raises FileNotFoundError, or DataError for a bad file."""
    if not path.is_file():
        raise FileNotFoundError(f"no parquet file at {path}: prepare the data first or correct the path")
    with arrow_faults(path, "prepare the data again"), pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        if missing := [column for column in columns if column not in schema.names]:
            raise DataError(
                f"{path} lacks the columns {', '.join(missing)} (it has {', '.join(schema.names)}): "
                "prepare the data again or point to a file with these columns"
            )
        wanted = [TRAINING_SCHEMA.field(column) for column in columns]
        faults = [fault for field in wanted for fault in _type_faults(schema.field(field.name).type, field)]
        if not faults:
            table = file.read(columns=list(columns))
            table.validate(full=True)  # texts must be UTF-8
            faults = [fault for field in wanted for fault in _null_faults(table[field.name], field)]
    if faults:
        raise DataError(
            f"{path} has the columns of training rows but not their contents: {'; '.join(faults)}. "
            "Prepare the data again or point to a file of this project"
        )
    return table


@contextmanager
def arrow_faults(path: Path, advice: str) -> Iterator[None]:
    """Turn pyarrow's errors while reading a file into a DataError with the file's name and `advice`."""
    try:
        yield
    # pyarrow raises OSError for a damaged page.
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a parquet file or is damaged ({error}): {advice}") from error


def _type_faults(found: pa.DataType, wanted: pa.Field, prefix: str = "") -> Iterator[str]:
    name, kind = prefix + wanted.name, wanted.type
    if pa.types.is_struct(kind) and pa.types.is_struct(found):
        for inner in kind:
            place = found.get_field_index(inner.name)
            if place < 0:
                yield f"{name}.{inner.name} is missing"
            else:
                yield from _type_faults(found.field(place).type, inner, f"{name}.")
    elif pa.types.is_list(kind) and (pa.types.is_list(found) or pa.types.is_large_list(found)):
        yield from _type_faults(found.value_type, kind.value_field, f"{name}.")
    # Other libraries write wider or narrower types, and a null type for a column of nulls.
    elif not (
        found == kind
        or (pa.types.is_integer(kind) and pa.types.is_integer(found))
        or (pa.types.is_string(kind) and pa.types.is_large_string(found))
        or (pa.types.is_null(found) and not pa.types.is_struct(kind))
    ):
        yield f"{name} is of type {found}, not {'a struct' if pa.types.is_struct(kind) else kind}"


def _null_faults(column: pa.ChunkedArray, wanted: pa.Field, prefix: str = "") -> Iterator[str]:
    if not pa.types.is_struct(wanted.type):
        return
    name = prefix + wanted.name
    if column.null_count:
        yield f"{name} is null in {column.null_count} rows"
        return
    for inner in wanted.type:
        yield from _null_faults(pc.struct_field(column, inner.name), inner, f"{name}.")


def check_training_rows(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise DataError at the first row that breaks the contract, naming row and field."""
    for number, row in enumerate(rows):
        if fault := _fault(row):
            raise DataError(f"training row {number}: {fault}")


def _fault(row: Mapping[str, Any]) -> str | None:
    if missing := _missing_fields(row, TRAINING_SCHEMA):
        return f"missing {', '.join(missing)}"
    source = _SOURCE.fullmatch(str(row["data_source"]))
    hop = source and source["hop"]
    extra = row["extra_info"]
    target = row["reward_model"]["ground_truth"]["target"]
    prompt = row["prompt"] if isinstance(row["prompt"], list) else []
    is_chat = bool(prompt) and all(
        isinstance(message, Mapping) and _is_texts([message.get("role"), message.get("content")])
        for message in prompt
    )
    faults = {
        "data_source must be search_zero_{hop}, search_zero or searchR1_{benchmark}": source is None,
        "prompt must be a non-empty list of {role, content} with text in both": not is_chat,
        f"ability must be {ABILITY!r}": row["ability"] != ABILITY,
        "reward_model.style must be 'rule'": row["reward_model"]["style"] != "rule",
        "reward_model.ground_truth.target must be null or a non-empty list of strings": not (
            target is None or _is_texts(target)
        ),
        "data_source and extra_info.hop must name the same hop": bool(hop) and hop != str(extra["hop"]),
        "a challenger row needs extra_info.document": bool(hop) and not extra["document"],
        "a row without target must be a challenger row": target is None and not hop,
        "extra_info.index must be an integer": not isinstance(extra["index"], int),
        "extra_info.need_tools_kwargs must be true": extra["need_tools_kwargs"] is not True,
        f"agent_name must be {AGENT_NAME!r}": row["agent_name"] != AGENT_NAME,
    }
    wrong = next((message for message, is_wrong in faults.items() if is_wrong), None)
    return f"{wrong}, in a row with data_source {row['data_source']!r}" if wrong else None


def _missing_fields(row: Any, fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    """Schema fields that a row lacks, at any depth. A null is present unless it should be a struct."""
    missing = []
    for field in fields:
        name = prefix + field.name
        if field.name not in row:
            missing.append(name)
        elif pa.types.is_struct(field.type):
            value = row[field.name]
            inner = list(field.type)
            missing += _missing_fields(value, inner, f"{name}.") if isinstance(value, Mapping) else [name]
    return missing


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) and text for text in value)
