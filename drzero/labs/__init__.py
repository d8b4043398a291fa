"""Tools you try before or beside a run. Nothing but the command table (`drzero.cli`) may import from here.

Every tool's module docstring ends with three facts: its worth, the room that owns the tested code, and when
the tool can go. A tool that no longer finds faults goes, however good it is.
"""
