"""The search service: HTTP (`app`), cache and deadline (`service`), batches (`batching`), encoders."""
