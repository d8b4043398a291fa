"""A module that only the image's local folder brings into the container."""

TEXT = "from the mounted folder"
