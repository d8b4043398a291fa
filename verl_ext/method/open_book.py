"""The open book: the solver answers once, greedily, from what the challenger read, without searching.

A different answer refuses the question: its label may be wrong (Search Self-Play, arXiv 2510.18821).
"""

from verl_ext.method.answers import exact_match
from verl_ext.method.passages import format_passages
from verl_ext.method.prompts import Message, PromptForm, solver_messages
from verl_ext.method.tool_calls import render_tool_call
from verl_ext.method.trajectory import Trajectory


def open_book_messages(
    question: str,
    document: str,
    trajectory: Trajectory,
    form: PromptForm,
    max_turns: int,
    response_limit: int,
) -> list[Message]:
    """The question, followed by the document and the challenger's searches as the solver's own turns."""
    title, _, text = document.partition("\n")
    shown = format_passages([title], [[{"title": title, "text": text}]], response_limit)
    read: list[tuple[tuple[str, ...], str]] = [((title,), shown)]
    read += [(call.queries or (), call.response or "") for call in trajectory.searches]
    messages = solver_messages(question, form, max_turns)
    for queries, response in read:
        call = f"<think>I will search {', '.join(queries)}.</think>\n{render_tool_call(queries)}"
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": response}]
    return messages


def open_book_fault(read: str | None, answer: str) -> str | None:
    """Why the answer that was `read` contradicts the challenger's, or None."""
    if exact_match(read, [answer]):
        return None
    return f"from what the challenger read, the solver answers {read!r}"
