"""Whether calls are right by BFCL's AST match. The rules are `ast_checker`'s, except calls that crash it.

Texts are compared without case, spaces and `,./-_*^`, the calls of a turn in any order.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.bfcl.schema import Language

Answer = Mapping[str, Mapping[str, Sequence[Any]]]  # a function's name, and the right values of each argument
_PYTHON: dict[str, type] = {"string": str, "any": str, "integer": int, "float": float, "number": float}
_PYTHON |= {"boolean": bool, "array": list, "tuple": list, "dict": dict, "object": dict}
_NESTED = ("array", "tuple", "Array", "ArrayList")
_LONGEST, _MOST_BRACKETS = 1000, 16
"""Limits of a text in another language. The package's patterns take twice as long for every bracket."""
_IGNORED = re.compile(r"[ ,./\-_*^]")


@dataclass(frozen=True)
class _Kind:
    outer: type
    inner: type | None  # the elements' type, if it is a list
    convert: Callable[[Any], Any]
    """From the JSON value to the compared one. Raises ValueError for a wrong type."""


def calls_fault(
    documents: Sequence[Mapping[str, Any]],
    calls: Sequence[tuple[str, Mapping[str, Any]]],
    answers: Sequence[Answer],
    language: Language = "Python",
) -> str | None:
    """Why the calls do not match the answers, or None. Each answer takes the first call that fits."""
    if len(calls) != len(answers):
        return f"{len(calls)} calls, not {len(answers)}"
    by_name = {document["name"]: document for document in documents}
    left = list(calls)
    for answer in answers:
        ((name, wanted),) = answer.items()
        if name not in by_name:
            return f"the answer calls {name}, which the task does not declare"
        faults = []
        for index, (called, arguments) in enumerate(left):
            fault = _call_fault(by_name[name], called, arguments, wanted, language)
            if fault is None:
                del left[index]
                break
            faults.append(fault)
        else:
            return f"no call for {name}: {'; '.join(faults)}"
    return None


def type_fault(document: Mapping[str, Any], language: Language = "Python") -> str | None:
    """The fault of a parameter's declared type, or None."""
    try:
        _kind(document, language)
    except (KeyError, TypeError):
        known = f" ({', '.join(_PYTHON)})" if language == "Python" else ""
        return f"{document!r:.120} has no type of BFCL's for {language}{known}; a list's items need one too"
    return None


def _call_fault(
    document: Mapping[str, Any],
    called: str,
    arguments: Mapping[str, Any],
    wanted: Mapping[str, Sequence[Any]],
    language: Language,
) -> str | None:
    if called != document["name"]:
        return f"{called} is called"
    declared = document["parameters"].get("properties", {})
    for name in document["parameters"].get("required", []):
        if name not in arguments:
            return f"{name} is missing"
    for name, value in arguments.items():
        if name not in declared or name not in wanted:
            return f"{name} is not expected"
        fault = _value_fault(declared[name], value, wanted[name], language)
        if fault is not None:
            return f"{name} {fault}"
    for name, right in wanted.items():
        if name not in arguments and "" not in right:
            return f"{name} is missing"
    return None


def _value_fault(
    document: Mapping[str, Any], value: Any, right: Sequence[Any], language: Language
) -> str | None:
    try:
        kind = _kind(document, language)
        value = kind.convert(value)
    # The package's converters may raise anything for a model's text, which then spells no such value.
    except Exception as error:
        return f"is wrong: {error}"
    # Answers of another type than declared are names of variables, and are compared unchanged.
    given = next((type(one) for one in right if one != ""), None)
    variable = given is not None and given is not kind.outer
    if not (type(value) is kind.outer and (kind.inner is None or _elements_fit(value, kind.inner, right))):
        if type(value) is not given or (type(value) is kind.outer and kind.inner is not None):
            return f"is of the wrong type: {value!r:.80}"
        variable = True
    if variable:
        good = value in right
    elif kind.outer is dict:
        good = any(_dict_fits(value, one) for one in right if isinstance(one, dict))
    elif kind.inner is dict:
        good = any(_dicts_fit(value, one) for one in right)
    elif kind.outer is str:
        good = _plain(value) in [_plain(one) for one in right if isinstance(one, str)]
    elif kind.outer is list:
        # An empty text, which makes the argument optional, also allows an empty list.
        good = _plain_all(value) in [_plain_all(one) for one in right if isinstance(one, list | str)]
    else:
        good = value in right
    return None if good else f"is {value!r:.80}"


def _kind(document: Mapping[str, Any], language: Language) -> _Kind:
    """The declared type. Raises KeyError if the language does not have it."""
    if language != "Python":
        return _foreign_kind(document, language)
    outer = _PYTHON[document["type"]]
    inner = _PYTHON[document["items"]["type"]] if document["type"] in _NESTED else None
    # JSON may write 2.0 as 2.
    return _Kind(outer, inner, lambda one: float(one) if (outer, type(one)) == (float, int) else one)


def _foreign_kind(document: Mapping[str, Any], language: Language) -> _Kind:
    """A type of Java or JavaScript. Its values are texts in that syntax, which the package converts."""
    from bfcl_eval.constants.type_mappings import JAVA_TYPE_CONVERSION, JS_TYPE_CONVERSION
    from bfcl_eval.eval_checker.ast_eval.type_convertor.java_type_converter import java_type_converter
    from bfcl_eval.eval_checker.ast_eval.type_convertor.js_type_converter import js_type_converter

    types = JAVA_TYPE_CONVERSION if language == "Java" else JS_TYPE_CONVERSION
    converter = java_type_converter if language == "Java" else js_type_converter
    named = document["type"]
    inner = (document["items"]["type"],) if named in _NESTED else ()

    def convert(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"a text in {language} syntax is wanted, not {value!r:.80}")
        if len(value) > _LONGEST or value.count("[") > _MOST_BRACKETS:
            raise ValueError(f"a text of {len(value)} characters is too long to be taken apart")
        return converter(value, named, *inner)

    return _Kind(types[named], types[inner[0]] if inner else None, convert)


def _elements_fit(value: Any, inner: type, right: Sequence[Any]) -> bool:
    """Whether the elements have the declared type, or the type of a right list's first element."""

    def fits(one: Any) -> bool:
        if not isinstance(one, list):
            return True
        given = next((type(element) for element in one if element != ""), None)
        return all(type(element) in (inner, given) for element in value)

    return any(map(fits, right))


def _dict_fits(value: Mapping[str, Any], right: Mapping[str, Sequence[Any]]) -> bool:
    for name, entry in value.items():
        if name not in right or not isinstance(right[name], list):
            return False
        if _plain(entry) not in [_plain(one) for one in right[name]]:
            return False
    return all(name in value or "" in allowed for name, allowed in right.items())


def _dicts_fit(value: Sequence[Any], right: Any) -> bool:
    if not isinstance(right, list | str) or len(value) != len(right):
        return False
    pairs = zip(value, right, strict=True)
    return all(isinstance(a, dict) and isinstance(b, dict) and _dict_fits(a, b) for a, b in pairs)


def _plain(value: Any) -> Any:
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value


def _plain_all(values: Sequence[Any]) -> list[Any]:
    return [_plain(value) for value in values]
