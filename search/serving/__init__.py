"""The search service: HTTP, batching, encoder processes, cache, metrics.

It reads a finished collection and never writes to one. Its client is `search.client`; the wire format of both
is in `search.wire`.
"""
