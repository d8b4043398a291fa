"""The launcher's error."""

from drzero.ops.errors import UserError


class LaunchError(UserError):
    """A launch is impossible or has failed."""
