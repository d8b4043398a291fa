"""The search service: HTTP (`app`), cache and deadline (`service`), batches (`batching`), encoder processes.

It reads a finished collection and never writes to one. Its client is `search.client`; the wire format of both
is in `search.wire`.
"""
