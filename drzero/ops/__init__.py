"""What keeps a run alive and explains how it ended.

Child processes, services, stalls, queues and memory; what a run prints; also the three kinds of error,
atomic files and the pinned versions, which all packages use. `ops` knows processes, files and metrics, and
nothing of the recipe: phases, queues and services are passed in by `drzero.stages`. It imports no other
package of this project.
"""
