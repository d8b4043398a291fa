"""Every command's tables and lines, in one width and style. Text is text: no markup, no escapes."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from drzero.ops.console import leave_stdout
from drzero.ops.notices import one_line, plain

_PIPE_WIDTH = 118
_UNBOUNDED = 10_000


class _Out(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        objects = tuple(Text(plain(one)) if isinstance(one, str) else one for one in objects)
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as printed:
            super().print(*objects, **options)
        lines = (line.rstrip() for line in printed.get().split("\n"))
        super().print(Text("\n".join(lines)), end="", soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Continue, where rich would end the process."""
        leave_stdout()


class _Table(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(one_line(one)) if isinstance(one, str) else one for one in cells), **options)


def console() -> Console:
    """A console for a command's tables and lines."""
    return _Out(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH)


def new_table(title: str | None, *columns: str, **options: Any) -> Table:
    """An empty table with rich's `options`. A heading that starts with `>` aligns right."""
    lines = box.SIMPLE_HEAD if sys.stdout.isatty() else None
    heading = None if title is None else Text(one_line(title), "table.title")
    table = _Table(title=heading, title_justify="left", box=lines, **options)
    for column in columns:
        is_right = column.startswith(">")
        table.add_column(
            Text(plain(column[is_right:])), justify="right" if is_right else "left", overflow="fold"
        )
    return table


def print_wide(out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table at full width. Columns without room follow in more tables, each with the first column."""

    def of(start: int, end: int) -> Table:
        table = new_table(title if start == 1 else None, columns[0], *columns[start:end])
        for row in rows:
            table.add_row(row[0], *row[start:end])
        return table

    unbounded = out.options.update(max_width=_UNBOUNDED)
    start = 1
    while start < len(columns):
        end = start + 1
        while end < len(columns) and out.measure(of(start, end + 1), options=unbounded).maximum <= out.width:
            end += 1
        out.print(of(start, end))
        start = end
