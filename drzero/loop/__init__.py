"""`drzero evolve`: all stages in order, resumable at any point.

The plan of stages, the manifest of finished ones, the identity of a stage's results, pruning, preflight of
the whole loop, and its tables. The loop runs each stage as a child process; how a stage works is in
`drzero.stages`.
"""
