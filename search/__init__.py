"""Retrieval: embedders, the Chroma and FAISS stores, and the client of the search service.

`python -m search.index` builds an index (`indexing`), `python -m search.server` serves it (`serving`). veRL's
workers import `search.client`, so that module must not import Chroma or FAISS.
"""
