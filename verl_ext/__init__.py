"""Everything that veRL loads from this project.

veRL's workers import it, so it imports neither Chroma, Modal, `drzero` above `drzero.ops` nor the CLI.
"""
