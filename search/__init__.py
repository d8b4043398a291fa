"""Retrieval. veRL's workers import `search.client`, so that module must not import Chroma or FAISS."""
