"""What keeps a run alive and explains how it ended, and small helpers for every room.

This room knows processes, files and metrics, but nothing of the recipe: `drzero.stages` passes in phases,
queues and services. It imports no other package of this project.
"""
