"""Errors of the data package, for bad files, rows and settings."""

from drzero.ops.errors import UserError


class DataError(UserError):
    """A file, row or setting that cannot be used; the message says what, where, and what to do."""


class PairingError(DataError):
    """Question, answer, document and trajectory of one row do not belong together."""
