"""The parameters of the HNSW index behind each collection, and why they are what they are.

The target is recall@3 of at least 0.995 against exact search on the same vectors, at every size that was
measured: passages that the index loses cannot be found by any number of searches. Of the sixteen sets in
bench/README.md (HNSW) this and 48 neighbours are the cheapest that keep it at 20,000 and at 100,000
vectors, and this is built sooner: 0.9993 and 0.9964, at 1.0 and 1.5 ms of a core a query in batches, next
to 4 ms for its embedding. Chroma takes them when a collection is made; a collection that exists keeps its
own until it is built anew.
"""

from chromadb.api.collection_configuration import HNSWConfiguration

from search.store import DISTANCE

# Neighbours a vector is linked to: with Chroma's own 16 recall stays at 0.993 and below unless twice as many
# candidates are looked at, which costs more.
MAX_NEIGHBORS = 32
# Candidates looked at when a vector is inserted, paid once: 76 s for 100,000 vectors on two cores.
EF_CONSTRUCTION = 200
# Candidates looked at by a query, paid at each search: Chroma's own 100 loses one passage in ninety there.
EF_SEARCH = 200


def hnsw_configuration() -> HNSWConfiguration:
    """Return what Chroma wants to know when a collection is made."""
    return {
        "space": DISTANCE,
        "max_neighbors": MAX_NEIGHBORS,
        "ef_construction": EF_CONSTRUCTION,
        "ef_search": EF_SEARCH,
    }
