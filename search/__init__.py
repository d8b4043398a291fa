"""The retrieval service: embedders, the Chroma store, index building, the server and its client."""
