"""Models behind HTTP servers, and the agents that play conversations and episodes with them."""
