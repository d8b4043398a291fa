"""`drzero evolve`: all stages in order, resumable at any point. How a stage works is in `drzero.stages`."""
