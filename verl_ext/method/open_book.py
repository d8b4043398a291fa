"""The open book: the solver answers a question from what the challenger read, without searching.

Words alone do not show a right label from a wrong one that stands in the same passage. Here the solver gets
the question, the challenger's document and the results of its searches as if it had searched itself, and
answers once, greedily; another answer than the challenger's refuses the question (Search Self-Play, arXiv
2510.18821). It costs an answer for each question, and is worth what the solver's reading is worth.
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
    """The question, then the document and the challenger's searches as turns of the solver's own."""
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
    """Why what the solver has `read` speaks against the challenger's answer; None if it does not."""
    if exact_match(read, [answer]):
        return None
    return f"from what the challenger read, the solver answers {read!r}"
