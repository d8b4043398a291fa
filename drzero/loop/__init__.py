"""`drzero evolve`: all stages in order, resumable at any point.

`plan` lists the stages, `manifest` records finished ones, `identity` compares their settings and inputs,
`state` refuses, redoes and prunes. How a stage works is in `drzero.stages`.
"""
