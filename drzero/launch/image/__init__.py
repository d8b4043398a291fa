"""The two images: pinned versions, layers, and the checks of both.

One table of versions, the layers built from it, and what is checked before a build and in a container.
"""
