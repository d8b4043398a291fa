"""Token ids of conversations, against veRL's own builder and the whole conversation rendered at once."""

import copy

import pytest
from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

from verl_ext.method.chat import next_turn_ids, render_prompt_ids, tool_turn_ids, turn_end_id
from verl_ext.method.prompts import challenger_messages, solver_messages
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA, render_tool_call

TOOLS = [SEARCH_TOOL_SCHEMA]
CALL_TEXT = f"<think>Look it up.</think>\n{render_tool_call(['Ostrel lighthouse', 'é'])}"

GATHERING_TEMPLATE = """\
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
    {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
  {%- else -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


THINKING_TEMPLATE = GATHERING_TEMPLATE.replace(
    "~ message.content ~ '<|im_end|>\\n'",
    "~ ('<think>' ~ message.reasoning_content ~ '</think>'"
    " if message.role == 'assistant' and (message.reasoning_content or loop.last) else '')"
    " ~ message.content ~ '<|im_end|>\\n'",
)


TEMPLATES = {"the project's": None, "like Qwen's": GATHERING_TEMPLATE, "like Qwen 3's": THINKING_TEMPLATE}


@pytest.fixture(scope="module", params=TEMPLATES.values(), ids=TEMPLATES)
def any_tokenizer(request, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.chat_template = request.param or tokenizer.chat_template
    return other


def encode(tokenizer, text):
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("form", ["short", "full"])
def test_the_first_prompt_is_verls(any_tokenizer, form, tools):
    messages = challenger_messages("A document.", 2, form)
    expected = QwenContinuousTokenBuilder(any_tokenizer).build_initial_tokens(messages, tools=tools)
    assert render_prompt_ids(any_tokenizer, messages, tools) == expected


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("responses", [["one"], ["one", "two\nlines"], [""], ["x <think> é </tool_call>"]])
@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\n", "", " cut o"])
def test_what_follows_a_turn_has_verls_ids(any_tokenizer, role, responses, ending):
    messages = solver_messages("Who?", "short")
    assistant_ids = encode(any_tokenizer, CALL_TEXT + ending)
    so_far = render_prompt_ids(any_tokenizer, messages, TOOLS) + assistant_ids
    previous = [*messages, {"role": "assistant", "content": CALL_TEXT}]
    new = [{"role": role, "content": response} for response in responses]
    builder = QwenContinuousTokenBuilder(any_tokenizer)
    merged = builder.merge_context_tokens(previous, [*previous, *new], so_far, tools=TOOLS)
    assert so_far + next_turn_ids(any_tokenizer, assistant_ids, new) == merged.token_ids
    if role == "tool":
        assert tool_turn_ids(any_tokenizer, assistant_ids, responses) == merged.token_ids[len(so_far) :]


def test_turns_add_up_to_the_ids_of_the_whole_conversation(tokenizer):
    messages = [*solver_messages("Who?", "short")]
    ids = render_prompt_ids(tokenizer, messages, TOOLS)
    for response in ("[1] Oslo: a city.", "[1] Rome: a city.\n[2] Ténès: another."):
        turn = encode(tokenizer, CALL_TEXT + "<|im_end|>")
        ids += turn + tool_turn_ids(tokenizer, turn, [response])
        messages += [{"role": "assistant", "content": CALL_TEXT}, {"role": "tool", "content": response}]
    assert ids == render_prompt_ids(tokenizer, messages, TOOLS)


def test_structured_tool_calls_render_as_text_does(tokenizer):
    function = {"name": "search", "arguments": {"query_list": ["Ostrel lighthouse", "é"]}}
    structured = {"role": "assistant", "content": "<think>Look it up.</think>"}
    structured["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    user, as_text = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": CALL_TEXT}
    expected = render_prompt_ids(tokenizer, [user, as_text], TOOLS)
    assert render_prompt_ids(tokenizer, [user, structured], TOOLS) == expected


def test_the_prompt_names_tools_and_arguments(tokenizer):
    hello = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.decode(render_prompt_ids(tokenizer, hello, TOOLS))
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.startswith("<|im_start|>system\nTools: search(query_list)\nCall: <tool_call>")
    assert prompt.endswith(f"<|im_end|>\n{asked}")
    assert tokenizer.decode(render_prompt_ids(tokenizer, hello, None)) == asked


def test_the_short_challenger_prompt_adds_under_sixty_tokens(tokenizer):
    assert len(render_prompt_ids(tokenizer, challenger_messages("", 4, "short"), TOOLS)) < 60


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[-1].content }}.", "writes '.' after an assistant's text, which is no special token"),
        ("{{ messages[0].content }}", "leaves out what an assistant says"),
    ],
)
def test_a_template_whose_turns_have_no_end_is_refused(tokenizer, template, said):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    with pytest.raises(ValueError, match=said):
        turn_end_id(other)
