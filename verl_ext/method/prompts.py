"""The prompts of the challenger and the solver. The chat template explains tool calls from the tool's schema.

`full` explains the task (3B to 32B). `short` only names it, for a small model warm-started on these words.
"""

from typing import Literal

from verl_ext.method.passages import defuse

PromptForm = Literal["full", "short"]
Message = dict[str, str]

MAX_TURNS = 5  # assistant turns per conversation, with the last one (paper, table 5)

_CHALLENGER_SYSTEM = """\
You write questions that test how well a research assistant can search. You have a search tool over the \
same corpus the assistant will use."""

_CHALLENGER_USER = """\
Here is one document of the corpus.

<document>
{document}
</document>

Write one question that takes exactly {hops} to answer, starting from this document, together with its answer.

What counts as a hop: one fact that must be looked up. {hop_rule}

A good question
- stands on its own: it names what it is about and never mentions "the document", "the text" or "the passage";
- has exactly one right answer, and that answer is short: a name, a date, a number, at most five words;
- is in the language of the document, and so is its answer;
- does not contain its answer, nor words that give it away;
- is answered by what is written in the document or in a search result, not by guessing or general knowledge;
- needs every one of its hops: no single search should reveal the answer if more than one hop is asked for;
- is hard enough that a capable assistant sometimes fails, yet clear enough that it can succeed.

How to proceed
- You have at most {max_turns} turns. Start each with your reasoning inside <think> and </think>.
- To search, end the turn with a call of the search tool; its results come back before your next turn.
- {search_rule}
- In your last turn, after the reasoning, write exactly this and nothing more:

<question>your question</question>
<answer>its short answer</answer>"""

_ONE_HOP_RULE = "With one hop, the question asks for a fact that this document states."
_MANY_HOPS_RULE = """\
With {hop} hops, {hop} facts form a chain: each leads to the thing the next one is about, the first comes \
from this document, and the answer is what the last one says. What lies between is described, not named."""
_ONE_HOP_SEARCH = "No search is needed for a one-hop question."
_MANY_HOPS_SEARCH = """\
Search at least {searches}: look up something the document mentions, and build on what you find."""

_SOLVER_SYSTEM = "You answer questions by searching a corpus."

_SOLVER_USER = """\
Answer this question.

{question}

- You have at most {max_turns} turns. Start each with your reasoning inside <think> and </think>.
- To look something up, end the turn with a call of the search tool; its results come back before your next \
turn. Search as often as the question has unknown links, and use what one search tells you in the next.
- When you know the answer, give it inside <answer> and </answer>, as short as it can be: a name, a date, a \
number, without a sentence around it. For example: <answer>Marie Curie</answer>"""

_SHORT_CHALLENGER = "Write a {hop}-hop question from this document.\n<document>\n{document}\n</document>"
_SHORT_SOLVER = "Answer the question. Use search.\n\n{question}"


def challenger_messages(
    document: str, hop: int, form: PromptForm, max_turns: int = MAX_TURNS
) -> list[Message]:
    """Ask for one question of `hop` hops about the document. Raises ValueError for fewer than one."""
    if hop < 1:
        raise ValueError(f"a question has at least one hop, not {hop}")
    document = defuse(document.strip())
    if form == "short":
        return [{"role": "user", "content": _SHORT_CHALLENGER.format(hop=hop, document=document)}]
    search = _MANY_HOPS_SEARCH.format(searches=_count(hop - 1, "time"))
    text = _CHALLENGER_USER.format(
        document=document,
        hops=_count(hop, "hop"),
        hop_rule=_ONE_HOP_RULE if hop == 1 else _MANY_HOPS_RULE.format(hop=hop),
        search_rule=_ONE_HOP_SEARCH if hop == 1 else search,
        max_turns=max_turns,
    )
    return [{"role": "system", "content": _CHALLENGER_SYSTEM}, {"role": "user", "content": text}]


def solver_messages(question: str, form: PromptForm, max_turns: int = MAX_TURNS) -> list[Message]:
    """Ask for the answer to a question."""
    question = defuse(question.strip())
    if form == "short":
        return [{"role": "user", "content": _SHORT_SOLVER.format(question=question)}]
    text = _SOLVER_USER.format(question=question, max_turns=max_turns)
    return [{"role": "system", "content": _SOLVER_SYSTEM}, {"role": "user", "content": text}]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
