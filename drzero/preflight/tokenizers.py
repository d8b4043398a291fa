"""Load the tokenizers of a run's models, and check that they can render our conversations."""

import json
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from jinja2 import TemplateError

from drzero.ops.hub import hub_fault
from drzero.preflight.finding import refusal
from drzero.preflight.growth import CHANGE_TEMPLATE, growth_fault, tools_fault
from drzero.preflight.model_shape import model_config
from verl_ext.method.chat import call_form, decode, next_turn_ids, render_prompt_ids, turn_end_id
from verl_ext.method.search_calls import SEARCH_TOOL_SCHEMA, render_tool_call

_TALK = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Vell."}] * 2
_ASKED = [{"role": "system", "content": "text"}, _TALK[0]]


def load_tokenizer(path: str, key: str) -> Any:
    """A model's tokenizer. Raises PreflightFailed, at `key`, if there is no such model."""
    is_folder = Path(path).is_absolute() or Path(path).is_dir()
    fault = reason = None if is_folder else hub_fault()
    if fault is None or model_config(path) is not None:
        try:
            if not is_folder and fault is None:  # one request, and a clear refusal
                get_hf_file_metadata(hf_hub_url(path, "config.json"))
            return _tokenizer_class(path).from_pretrained(path, local_files_only=is_folder or bool(fault))
        except (OSError, ValueError, httpx.HTTPError) as error:
            reason = str(error).strip().partition("\n")[0]
    raise refusal(
        key,
        f"there is no model at {path}, neither a folder nor on a reachable hub ({reason})",
        "correct it, or download the model first. The demo's models come with `drzero demo-data`",
    )


def _tokenizer_class(path: str) -> Any:
    """AutoTokenizer, or the generic class it would choose, which imports twice as fast."""
    try:
        saved = json.loads((Path(path) / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict):  # AutoTokenizer reports it
        saved = {}
    if saved.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in saved:
        from transformers import TokenizersBackend

        return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def load_chat_tokenizer(path: str, key: str, *, searches: bool = True) -> Any:
    """Raises PreflightFailed about `key` unless the model can hold conversations, with or without tools."""
    tokenizer = load_tokenizer(path, key)
    try:
        if searches:
            flaw = tools_fault(tokenizer, _ASKED, [SEARCH_TOOL_SCHEMA])
            call_form(tokenizer)  # raises ValueError if it is not known
        else:
            flaw = growth_fault(tokenizer, [*_TALK, _TALK[0]])
    except (ValueError, TypeError, TemplateError) as reason:  # of templates: raise_exception, None + text
        flaw = str(reason)
    if flaw:
        held = "a conversation with searches" if searches else "a conversation"
        raise refusal(key, f"the model at {path} cannot hold {held}: {flaw}", CHANGE_TEMPLATE)
    return tokenizer


def token_drift(tokenizer: Any) -> int:
    """How many tokens of a conversation with two calls change when its text is tokenised again."""
    ids = render_prompt_ids(tokenizer, _TALK[:1], None)
    for query in ("town", "river Ø 3"):
        call = f"<think>So.</think>{render_tool_call([query])}"
        turn = [*tokenizer.encode(call, add_special_tokens=False), turn_end_id(tokenizer)]
        ids += turn + next_turn_ids(tokenizer, turn, [{"role": "user", "content": f"[1] {query}\nText."}])
    again = tokenizer.encode(decode(tokenizer, ids), add_special_tokens=False)
    return sum(a != b for a, b in zip(ids, again, strict=False)) + abs(len(ids) - len(again))
