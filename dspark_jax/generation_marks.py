"""`{% generation %}`: how a chat template itself marks what the assistant writes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

# Unicode reserves these two for use inside a program; no text that is exchanged holds them.
START, END = "\ufdd0", "\ufdd1"


class GenerationMarks(Extension):
    """Lets a template be rendered with its marks, which `unmark` takes out again."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        return f"{START}{caller()}{END}"


def unmark(marked: str, messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """Text without marks, and the spans of characters that were marked.

    Raises:
      ValueError: the messages it was rendered from hold marks of their own, or the marks are not in pairs.
    """
    theirs = json.dumps(list(messages), ensure_ascii=False, default=str)
    if START in theirs or END in theirs:
        raise ValueError("the messages hold U+FDD0 or U+FDD1, which are no characters; remove them.")
    first, *parts = marked.split(START)
    text, spans = first, []
    for part in parts:
        inside, *outside = part.split(END)
        if len(outside) != 1:
            raise ValueError("its generation blocks stand inside one another; expected one after the other.")
        spans.append((len(text), len(text) + len(inside)))
        text += inside + outside[0]
    return text, spans
