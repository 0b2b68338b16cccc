"""Extension of jinja2 for chat templates, imported with the first template."""

from __future__ import annotations

from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser


class Generation(Extension):
    """The tag `{% generation %} … {% endgeneration %}`, which marks training targets: ignored."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Return the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
