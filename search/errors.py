"""What can be wrong with an index: for a user to mend, for a start to wait for, for a query to try again."""

from drzero.ops.errors import UserError


class StoreError(UserError):
    """An index that cannot be used as asked, and what to do about it."""


class StoreNotReady(StoreError):
    """An index that is missing, damaged or does not answer now: the same address may work later."""


class StoreUnavailable(Exception):
    """An open index cannot answer now; the next query tries again."""
