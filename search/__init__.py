"""Retrieval: embedders, the stores (Chroma and FAISS), and the client of the search service.

`indexing` builds collections (`python -m search.index`), `serving` answers queries (`python -m
search.server`). No rewards, rollouts or training rows here. veRL's workers import `search.client`, so it must
not import Chroma or FAISS.
"""
