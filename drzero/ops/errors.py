"""The three ways a command ends other than well; every class that a user may meet inherits from one of them.

    class StoreError(UserError): ...        # `drzero` prints its message, no traceback, and exits with 2

Any other exception is a bug, and keeps its traceback.
"""

import os


class UserError(Exception):
    """What was asked or given cannot be used; the message says what is wrong, where, and what to do."""

    exit_code = 2


class RunFailed(Exception):
    """A run that was asked for rightly has failed; the message names the part that did."""

    exit_code = 1


class OutOfTime(Exception):
    """A stage ended by itself, or was not started, because of its stop time; the same command resumes it."""

    exit_code = os.EX_TEMPFAIL
