"""The two images: pinned versions, layers, and checks before a build and in a container."""
