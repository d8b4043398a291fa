"""The launcher's error."""

from drzero.ops.errors import UserError


class LaunchError(UserError):
    """A launch is not possible, or has failed; the message says what is wrong, where, and what to do."""
