"""The error that checks of the pipeline raise: one class, below every room that raises it."""

from drzero.ops.errors import UserError


class CheckError(UserError):
    """A fault that would have ended the run later, found before the run began."""
