"""The agent as a service: OpenAI's chat completions, MCP, and a page, over one desk that admits questions."""
