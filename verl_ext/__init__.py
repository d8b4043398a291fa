"""Everything that veRL loads from this project, through veRL's public extension points.

A module that uses veRL's interfaces names the veRL version. veRL's workers import all of this, so nothing
here imports Chroma, Modal, `drzero` above `drzero.ops`, or the command line.
"""
