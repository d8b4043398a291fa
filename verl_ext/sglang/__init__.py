"""What depends on SGLang's internals: the names a run uses, and how to find them without importing SGLang."""
