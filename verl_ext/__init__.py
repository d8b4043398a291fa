"""Everything that veRL loads from this project, through veRL's public extension points.

The method, the reference engine, rollout, trainers, rewards, SGLang support and telemetry. A module that uses
veRL's interfaces names the veRL version that it was written for. veRL's workers import all of this, so
nothing here imports Chroma, Modal, `pipeline` or the command line.
"""
