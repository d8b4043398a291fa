"""From a corpus to a Chroma collection: read, chunk, embed, write; resumable at any point.

How a collection is opened and described is in `search.store`; queries are answered in `search.serving`.
"""
