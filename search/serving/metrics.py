"""Prometheus metrics of one retrieval server, in a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """Metrics of a server. The hit rate is hits / (hits + misses); joins are misses that cost nothing."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests to /retrieve")
        self.queries = self._counter("queries", "Queries in accepted requests")
        self.errors = self._counter("errors", "Requests to /retrieve that failed, by status", "status")
        self.rejected = self._counter("rejected", "Requests refused because the queue was full")
        self.gone = self._counter("gone", "Requests whose client left before the answer")
        self.cache_hits = self._counter("cache_hits", "Queries answered from the cache")
        self.cache_misses = self._counter("cache_misses", "Queries not in the cache")
        self.joins = self._counter("single_flight_joins", "Misses that joined an identical query in progress")
        self.encoder_restarts = self._counter("encoder_restarts", "Encoder processes that died")
        self.encoders_ready = self._gauge("encoders_ready", "Encoder processes that answer")
        self.queue_depth = self._gauge("queue_depth", "Queries that wait for an encoder")
        self.cache_bytes = self._gauge("cache_bytes", "Bytes in the cache")
        self.batch = self._histogram("batch_queries", "Queries per batch", BATCH_BUCKETS)
        self.seconds = self._histogram("request_seconds", "Time of a request to /retrieve", SECONDS_BUCKETS)
        self.encode = self._histogram("encode_seconds", "Embedding time of a batch", SECONDS_BUCKETS)
        self.index = self._histogram("index_seconds", "Index time of a batch", SECONDS_BUCKETS)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"retrieval_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"retrieval_{name}", help, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"retrieval_{name}", help, buckets=buckets, registry=self.registry)
