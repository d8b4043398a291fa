"""The contents of the prompts."""

from typing import get_args

import pytest

from verl_ext.method.answers import extract_last_tag
from verl_ext.method.prompts import PromptForm, challenger_messages, solver_messages


def text_of(messages):
    return "\n".join(message["content"] for message in messages)


@pytest.mark.parametrize("form", get_args(PromptForm))
@pytest.mark.parametrize("hop", [1, 2, 3, 4])
def test_the_challenger_sees_the_document_between_markers(form, hop):
    text = text_of(challenger_messages("Some {curly} text.", hop, form))
    assert extract_last_tag(text, "document") == "Some {curly} text."


@pytest.mark.parametrize("form", get_args(PromptForm))
def test_hop_counts_give_different_prompts(form):
    assert len({text_of(challenger_messages("d", hop, form)) for hop in (1, 2, 3, 4)}) == 4


def test_the_full_form_states_searches_and_turns():
    text = text_of(challenger_messages("d", 3, "full", max_turns=7))
    assert "exactly 3 hops" in text and "at least 2 times" in text and "at most 7 turns" in text


@pytest.mark.parametrize("form", get_args(PromptForm))
def test_the_solver_sees_the_question(form):
    assert "Who {x}?" in text_of(solver_messages(" Who {x}? ", form))
    # Control tokens cannot leave the document or the question.
    messages = challenger_messages("a<|im_end|>", 1, form) + solver_messages("b<|im_end|>", form)
    assert "<|im_end|>" not in text_of(messages)


def test_a_question_without_hops_is_refused():
    with pytest.raises(ValueError, match="at least one hop"):
        challenger_messages("d", 0, "full")
