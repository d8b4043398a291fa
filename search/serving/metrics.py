"""Prometheus metrics of one retrieval server, in their own registry."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Metrics:
    """Metrics of a server. The hit rate is hits / (hits + misses). Joins are misses that cost nothing."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="retrieval", registry=self.registry)
        gauge = partial(Gauge, namespace="retrieval", registry=self.registry)
        histogram = partial(Histogram, namespace="retrieval", registry=self.registry)
        self.requests = counter("requests", "Requests to /retrieve")
        self.queries = counter("queries", "Queries in accepted requests")
        self.errors = counter("errors", "Requests to /retrieve that failed, by status", ["status"])
        self.rejected = counter("rejected", "Requests refused because the queue was full")
        self.gone = counter("gone", "Requests whose client left before the answer")
        self.cache_hits = counter("cache_hits", "Queries answered from the cache")
        self.cache_misses = counter("cache_misses", "Queries not in the cache")
        self.joins = counter("single_flight_joins", "Misses that joined an identical query in progress")
        self.encoder_restarts = counter("encoder_restarts", "Encoder processes that died")
        self.encoders_ready = gauge("encoders_ready", "Encoder processes that answer")
        self.queue_depth = gauge("queue_depth", "Queries that wait for an encoder")
        self.cache_bytes = gauge("cache_bytes", "Bytes in the cache")
        self.batch = histogram("batch_queries", "Queries per batch", buckets=BATCH_BUCKETS)
        self.seconds = histogram("request_seconds", "Time of a request to /retrieve", buckets=SECONDS_BUCKETS)
        self.encode = histogram("encode_seconds", "Embedding time of a batch", buckets=SECONDS_BUCKETS)
        self.index = histogram("index_seconds", "Index time of a batch", buckets=SECONDS_BUCKETS)
