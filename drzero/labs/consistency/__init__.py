"""Compare an engine with Transformers, without configs or services. The engine goes first to free memory."""
