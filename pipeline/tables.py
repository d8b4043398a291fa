"""Tables and lines, of one width and style in every command's output."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Where a command prints its tables."""
    return Console(width=118)


def new_table(title: str | None, *columns: str, **options: Any) -> Table:
    """An empty table; a column whose heading starts with `>` is aligned right. `options` are rich's."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, **options)
    for column in columns:
        is_right = column.startswith(">")
        table.add_column(column[is_right:], justify="right" if is_right else "left", overflow="fold")
    return table
