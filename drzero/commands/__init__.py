"""Commands of `drzero` that are neither a stage nor the loop.

preflight, status, config, check-services, flow-test, compare-rollouts, diagnose, stacks, serve-search,
serve-model, agent-bench, and those for models. They change no results. What a stage needs as well belongs in
`drzero.stages` or below.
"""
