"""The one kind of error that `data` raises for what a user gave it."""


class DataError(ValueError):
    """Data or a setting that cannot be used; the message says what, where, and what to do."""
