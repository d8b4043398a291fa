"""Errors of bad files, rows and settings."""

from drzero.ops.errors import UserError


class DataError(UserError):
    """A file, row or setting is unusable. The message says what, where, and what to do."""


class PairingError(DataError):
    """Question, answer, document and trajectory of a row do not belong together."""
