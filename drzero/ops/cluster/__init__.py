"""The nodes of the Ray cluster that a run joins: their facts, stacks and losses."""
