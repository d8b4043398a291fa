"""The keys that an agent takes over from the run that trained it, or from a bundle."""

from drzero.recipe.settings.schema import schema_of

INDEX_KEYS = (
    "index",
    "chroma.path",
    "chroma.collection",
    "chroma.shards",
    "faiss.path",
    "faiss.corpus",
    "retrieval.url",
    "retrieval.embedder",
)
"""What is searched."""
_NOT_TAKEN = ("question_fields.", "solver.engine", "solver.dtype", "solver.server_args", "solver.temperature")
"""What follows from this machine, and the temperature, which is 0 here."""


def answer_keys() -> list[str]:
    """The keys that an answer depends on, besides model, machine and index."""
    keys = schema_of("evaluate").changing_journal()
    return [key for key in keys if not key.startswith(_NOT_TAKEN)]
