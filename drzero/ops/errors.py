"""The three kinds of error that a user may meet. Other exceptions are bugs and keep their traceback."""

import os


class UserError(Exception):
    """The request or the input is unusable. The message names the mistake, its place and the fix."""

    exit_code = 2


class RunFailed(Exception):
    """A valid run has failed. The message names the part at fault."""

    exit_code = 1


class OutOfTime(Exception):
    """A stage stopped, or did not start, because of its stop time. The same command resumes it."""

    exit_code = os.EX_TEMPFAIL
