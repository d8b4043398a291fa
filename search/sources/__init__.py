"""Read a person's documents: files, folders, globs, hub data sets and Chromas, one at a time.

`corpus.Corpus` is the source as a whole, `records` reads tables, `texts` documents with headings.
"""
