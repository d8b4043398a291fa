"""The stages and the loop: compose a config, check it, start services, run veRL, gather what came out."""
