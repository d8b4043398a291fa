"""Checks before a run costs money. They read files and headers, start nothing and need no GPU."""
