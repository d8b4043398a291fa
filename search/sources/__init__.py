"""Reading a person's documents as they are: files, folders, globs, hub data sets and Chromas, one at a time.

`corpus.Corpus` is the source as a whole; `document`, `fields`, `faults` and `decoding` are what all formats
share; `records` reads tables, `texts` reads documents with headings, by `rst` and `markdown`. No chunks and
no vectors here (`search.indexing`).
"""
