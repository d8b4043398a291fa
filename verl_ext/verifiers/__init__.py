"""Plays the tasksets of the package `verifiers` with a model of this project, token in, token out.

    (played,) = await play(load("textarena", game="Mastermind-v0"), row, model, limits)   # as any environment

The library drives the episode and asks for turns over HTTP; the model answers as for any environment:

    library's environment ─ its program ─ its interception server ─ its train client ─ our `renderer`
        in a thread of its own (`host`)                                    │ POST /inference/v1/generate
    the rollout worker's own loop:  `player` ─ `endpoint` on 127.0.0.1 ◄───┘ ─ `session` ─ veRL's engine

An episode becomes one row a branch of the library's trace: its ids, its mask and its log-probs. Not in these
modules: what a taskset is and where it is found, which is `environments.verifiers`.
"""
