"""The family `agent`: an agent of your own as an environment. `agent=my_agent.py:answer` names one."""

from inspect import signature

from drzero.ops.text import did_you_mean
from environments.agent.taskset import AgentTaskset
from environments.fault import EnvironmentUnusable


def names() -> list[str]:
    """None are listed: an agent is named by its file or module."""
    return []


def load(name: str, **options: object) -> AgentTaskset:
    """The taskset of an agent (docs/agents.md). Raises EnvironmentUnusable."""
    known = [*signature(AgentTaskset).parameters][1:]
    for option in options.keys() - {*known}:
        why = f"there is no option {option!r}{did_you_mean(option, known)}"
        raise EnvironmentUnusable(f"agent:{name}: {why}; there are {', '.join(known)}")
    return AgentTaskset(name, **options)  # type: ignore[arg-type]
