"""How agents ask a model besides OpenAI's chat completions: one module an API, the same names in each.

asked, request = messages.read(content)          # `turn.Asked`, and the request's own fields
messages.whole(answer, "policy", request)        # the body of a `turn.Answer`
messages.events(answer, "policy", request)       # the same as a stream
"""
