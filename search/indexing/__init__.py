"""From a corpus to a Chroma collection or a FAISS index: read, chunk, embed, write, resume."""
