"""Trains agents of your own: they talk to a model's API, and their calls become rows as they were sampled.

    (row,) = await play(load("my_agent.py:answer", data="questions.jsonl"), row, model, limits)

your agent, in a thread (`player`) ── any client ──► `server` on 127.0.0.1, one address an episode
                                                        │ `chat`, `responses`, `messages`: three APIs
                              `rows` ◄── recorded ── `session` ── token ids ──► veRL's engine
"""
