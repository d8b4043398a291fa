"""Errors of an index: fix it, wait for it at start, or retry the query."""

from drzero.ops.errors import UserError


class StoreError(UserError):
    """An index that cannot be used as asked. The message says what to do."""


class StoreNotReady(StoreError):
    """An index that is missing, damaged or not answering, but may be ready later."""


class StoreUnavailable(Exception):
    """An open index cannot answer now. The next query tries again."""
