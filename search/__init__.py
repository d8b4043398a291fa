"""Retrieval: embedders, the Chroma store, and the client of the search service.

`indexing` builds collections and `serving` answers queries; `index` and `server` are their command lines. No
rewards, rollouts or training rows here. veRL's workers import `search.client`, so it must not import Chroma.
"""
