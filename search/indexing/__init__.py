"""From a corpus to a Chroma collection or a FAISS index: read, chunk, embed, write; resumable at any point.

How a collection is opened and described is in `search.chroma.store`; queries are answered in
`search.serving`.
"""
