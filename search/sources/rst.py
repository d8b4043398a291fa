"""reStructuredText as html, by docutils. Sphinx's roles are registered, else their errors are in the text."""

import re
from collections import defaultdict
from typing import Any, ClassVar

_ROLE = re.compile(r":([A-Za-z][\w.+-]*(?::[\w.+-]+)*):`")
_DIRECTIVE = re.compile(r"^[ \t]*\.\.[ \t]+([A-Za-z][\w.+-]*(?::[\w.+-]+)*)::", re.MULTILINE)
# Sphinx's roles with words as text. The others' text is code.
_WORDS = {"ref", "doc", "term", "any", "abbr", "guilabel", "menuselection", "dfn", "numref", "eq"}
_CODE = {"doctest", "testcode", "testoutput", "testsetup", "prompt", "productionlist", "graphviz", "mermaid"}
# They concern other pages, or the build.
_NO_TEXT = {
    "toctree",
    "index",
    "highlight",
    "module",
    "currentmodule",
    "literalinclude",
    "only",
    "tabularcolumns",
}
_SETTINGS: dict[str, Any] = {
    "report_level": 5,  # above all that docutils would print into the text
    "halt_level": 5,
    "raw_enabled": False,
    "file_insertion_enabled": False,
    "doctitle_xform": False,
    "initial_header_level": 1,
    "syntax_highlight": "none",
}


def rst_to_html(text: str) -> str:
    """Return a text's html. Raises ValueError if it cannot be parsed."""
    from docutils import core
    from docutils.utils import SystemMessage

    _register(text)
    try:
        parts = core.publish_parts(text, writer="html5", settings_overrides=_SETTINGS)
    except (SystemMessage, RecursionError) as error:
        raise ValueError(f"not reStructuredText: {error}") from error
    return f"<main>{parts['body']}</main>"


def _register(text: str) -> None:
    from docutils.frontend import get_default_settings
    from docutils.parsers.rst import Parser, directives, roles
    from docutils.parsers.rst.languages import get_language
    from docutils.utils import new_document

    document = new_document("", get_default_settings(Parser))
    document.reporter.report_level = 5
    language = get_language("en", document.reporter)
    for name in set(_ROLE.findall(text)):
        if roles.role(name, language, 0, document.reporter)[0] is None:
            roles.register_local_role(name.lower(), _shown)
    for name in set(_DIRECTIVE.findall(text)):
        if directives.directive(name.lower(), language, document)[0] is None:
            directives.register_directive(name.lower(), _contents())


def _shown(name: str, raw: str, text: str, *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
    """A role of Sphinx: `title <target>` shows its title, `~module.name` its name."""
    from docutils import nodes

    title = re.sub(r"\s*<[^<>]+>$", "", text.replace("\x00", "\\")).lstrip("!")
    title = title.rpartition(".")[2] if title.startswith("~") else title
    kind = nodes.inline if name.lower() in _WORDS else nodes.literal
    return [kind(raw, title)], []


def _contents() -> type:
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives

    class Contents(Directive):
        optional_arguments = 1
        final_argument_whitespace = True
        has_content = True
        # Any option. An empty mapping would mean none.
        option_spec: ClassVar[Any] = defaultdict(lambda: directives.unchanged, name=directives.unchanged)

        def run(self) -> list[Any]:
            if self.name in _NO_TEXT:
                return []
            if self.name in _CODE:
                lines = "\n".join(self.content)
                return [nodes.literal_block(lines, lines)] if lines else []
            shown = nodes.container()
            if self.arguments:
                shown += nodes.paragraph("", self.arguments[0])
            self.state.nested_parse(self.content, self.content_offset, shown)
            return [shown]

    return Contents
