"""Data sets: the demo world, challenger prompts, benchmarks, synthesized pairs and their gates.

Everything that reads, writes or checks training rows in parquet. Functions over rows and files: no model, no
service, no config; an embedder is passed in as a function. Of this project it imports `verl_ext.method` and
`ops` only; `search_taskset`, which makes questions an environment, besides `environments` and the search
client.
"""
