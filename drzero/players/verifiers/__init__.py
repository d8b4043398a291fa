"""Plays the tasksets of the package `verifiers` with a model of this project, token in, token out.

(played,) = await play(load("textarena", game="Mastermind-v0"), row, model, limits)   # as any environment

library's environment ─ its program ─ its interception server ─ its train client ─ our `renderer`
    in a separate thread (`host`)                                      │ POST /inference/v1/generate
the rollout worker's own loop:  `player` ─ `endpoint` on 127.0.0.1 ◄───┘ ─ `session` ─ veRL's engine
"""
