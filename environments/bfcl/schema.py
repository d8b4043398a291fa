"""BFCL's function documents as tools, in the JSON schema that chat templates show a model.

As on the leaderboard, every argument in Java or JavaScript is a text in that syntax.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from environments.call import ToolSchema

Language = Literal["Python", "Java", "JavaScript"]
# JSON schema's names for the documents' types.
TYPES = {"dict": "object", "float": "number", "double": "number", "tuple": "array", "list": "array"}
TYPES |= {"any": "string", "bool": "boolean"}
_JSON_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_HINTS = {"Java": "Java 8 SDK", "JavaScript": "JavaScript", "Python": "Python 3"}


def language_of(category: str) -> Language:
    """The language of a category's functions."""
    if "javascript" in category:
        return "JavaScript"
    return "Java" if "java" in category else "Python"


def to_tool(document: Mapping[str, Any], language: Language = "Python") -> ToolSchema:
    """A function document as a tool."""
    parameters = document["parameters"]
    properties = parameters.get("properties", {})
    as_schema = _schema if language == "Python" else lambda one: _text_of(one, language)
    return {
        "type": "function",
        "function": {
            "name": document["name"],
            "description": f"{document['description']} Note that the provided function is in "
            f"{_HINTS[language]} syntax.",
            "parameters": {
                "type": "object",
                "properties": {name: as_schema(one) for name, one in properties.items()},
                "required": list(parameters.get("required", [])),
            },
        },
    }


def _schema(document: Mapping[str, Any]) -> dict[str, Any]:
    schema = {name: value for name, value in document.items() if name not in ("optional", "required")}
    named = TYPES.get(schema.get("type", "string"), schema.get("type", "string"))
    schema["type"] = named if named in _JSON_TYPES else "string"
    if isinstance(required := document.get("required"), list):
        schema["required"] = required
    if isinstance(items := schema.get("items"), dict):
        schema["items"] = _schema(items)
    if isinstance(properties := schema.get("properties"), dict):
        schema["properties"] = {name: _schema(one) for name, one in properties.items()}
    return schema


def _text_of(document: Mapping[str, Any], language: str) -> dict[str, Any]:
    kind = document["type"]
    says = [document.get("description", "")]
    if kind == "any":
        says.append(f"This parameter can be of any type of {language} object in string representation.")
    else:
        says.append(f"This is {language} {kind} type parameter in string representation.")
    if isinstance(items := document.get("items"), dict):
        says.append(f"The list elements are of type {items['type']}; they are not in string representation.")
    if kind == "dict" and "properties" in document:
        says.append(
            "The dictionary entries have the following schema; they are not in string representation. "
            + json.dumps(document["properties"])
        )
    return {"type": "string", "description": " ".join(says)}
