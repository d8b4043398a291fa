"""The error that checks raise, in the lowest room that needs it."""

from drzero.ops.errors import UserError


class CheckError(UserError):
    """A fault found before the run, which would have ended it later."""
