"""Whether a chat template is Jinja at all, seen before any model is loaded. What it renders shows with a request."""

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


def check_chat_template(template: str) -> None:
    """Raises ValueError, which names the line, unless the text is a template as transformers takes them."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    try:
        environment.parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat_template: line {error.lineno}: {error.message}") from error


class _GenerationTag(Extension):
    """`{% generation %}`, with which templates mark the assistant's words."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
