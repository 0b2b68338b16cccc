"""What chat templates use beyond jinja2: imported with the first template."""

from __future__ import annotations

from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what is trained on: here, plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> Node | list[Node]:
        """The block's own content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
