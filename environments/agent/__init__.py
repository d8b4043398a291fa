"""The family `agent`: an agent of your own as an environment. `agent=my_agent.py:answer` names one."""

from environments.agent.taskset import AgentTaskset


def names() -> list[str]:
    """None are listed: an agent is named by its file or module."""
    return []


def load(name: str, **options: object) -> AgentTaskset:
    """The taskset of an agent (docs/agents.md). Raises EnvironmentUnusable."""
    return AgentTaskset(name, **options)  # type: ignore[arg-type]
