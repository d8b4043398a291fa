"""Tools you try before or beside a run. Nothing but the command table (`drzero.cli`) may import from here.

A tool's module docstring ends with its worth, the room that owns the tested code, and when it can go. A
tool that no longer finds faults goes, however good it is.
"""
