"""Read a person's documents, one at a time: files, folders, globs, hub data sets and Chromas."""
