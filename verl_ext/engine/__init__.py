"""The reference engine: plain Transformers behind an OpenAI-compatible server, without veRL or search."""
