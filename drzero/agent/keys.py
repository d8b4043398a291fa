"""The keys that an agent takes over from the run that trained it, or from a bundle."""

from drzero.recipe.settings.schema import schema_of

INDEX_SETTINGS = ("index", "chroma.collection", "chroma.shards", "retrieval.embedder")
"""An index besides its place."""
INDEX_PATHS = ("chroma.path", "faiss.path", "faiss.corpus")
INDEX_KEYS = (*INDEX_SETTINGS, *INDEX_PATHS, "retrieval.url")
PLACES = ("chroma.", "faiss.", "index", "retrieval.url")
"""Beginnings of keys that say where the index lies."""
_NOT_TAKEN = ("question_fields.", "solver.engine", "solver.dtype", "solver.server_args", "solver.temperature")
"""They follow from this machine, and the temperature is 0 here."""


def answer_keys() -> list[str]:
    """The keys that an answer depends on, besides model, machine and index."""
    keys = schema_of("evaluate").changing_journal()
    return [key for key in keys if not key.startswith(_NOT_TAKEN)]
