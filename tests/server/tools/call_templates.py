"""Chat templates of the tests' own, one for each way in which models write calls, and how each is spelled."""

from collections.abc import Sequence
from typing import Any

from engine.core.errors import InvalidParameterError
from engine.text.chat_template import ChatTemplate, Conversation
from server.tools.formats import CallFormat, learned_format
from server.tools.learning import Render, learn_spelling

_TURN = """\
{{- tools | tojson if tools }}
{%- for m in messages %}
{{- '<|turn|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content %}THOUGHT{% endif %}
{{- m.content or '' }}
{%- if m.tool_calls %}CALLS{% endif %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
_THOUGHT = "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}"
_EACH = "{%- for call in m.tool_calls %}{% set f = call.function %}ONE{% endfor %}"
_PAIRS = "{%- for key, value in f.arguments | items %}PAIR{% endfor %}"
_TEXT_OR_JSON = "(value if value is string else value | tojson)"


def template(calls: str, thought: str = _THOUGHT) -> str:
    return _TURN.replace("CALLS", calls).replace("THOUGHT", thought)


def each_call(one: str, before: str = "", after: str = "") -> str:
    """Returns template code that writes `one` for each call `f`."""
    return before + _EACH.replace("ONE", one) + after


def _pairs(pair: str) -> str:
    return _PAIRS.replace("PAIR", pair)


OBJECTS = template(
    each_call(
        """{{- '\\n<call>\\n{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\\n</call>' }}"""
    )
)
LIST = template(
    each_call(
        """{{- ', ' if not loop.first }}{{- '{"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' + f.name
        + '", "parameters": ' + f.arguments | tojson + '}' }}""",
        "{{- '<|actions|>[' }}",
        "{{- ']<|/actions|>' }}",
    )
)
NAMED = template(
    each_call(
        "{{- '<|call|>functions.' + f.name + ':' ~ loop.index0 }}"
        "{{- '<|args|>' + f.arguments | tojson + '<|/call|>' }}",
        "{{- '<|calls|>' }}",
        "{{- '<|/calls|>' }}",
    )
)
IDS = template(each_call("{{- '[CALLS]' + f.name + '[ID]' + call.id + '[ARGS]' + f.arguments | tojson }}"))
NAMED_IDS = template(
    each_call(
        "{{- '<|call|>' + call.id + '<|args|>' + (f.arguments if f.arguments is string else f.arguments | tojson) }}"
        "{{- '<|/call|>' }}",
        "{{- '<|calls|>' }}",
        "{{- '<|/calls|>' }}",
    )
)
"""As Kimi K2's."""
KEYED = template(
    each_call(
        """{{- ', ' if not loop.first }}{{- '{"' + f.name + '": ' + f.arguments | tojson + '}' }}""",
        "{{- '<|tools|>[' }}",
        "{{- ']<|/tools|>' }}",
    )
)
PARAMETERS = template(
    each_call(
        "{{- '\\n<do>\\n<function=' + f.name + '>\\n' }}"
        + _pairs("{{- '<parameter=' + key + '>\\n' ~ value ~ '\\n</parameter>\\n' }}")
        + "{{- '</function>\\n</do>' }}"
    )
)
PAIRS = template(
    each_call(
        "{{- '<do>' + f.name }}"
        + _pairs("{{- '\\n<key>' + key + '</key>\\n<value>' + " + _TEXT_OR_JSON + " + '</value>' }}")
        + "{{- '\\n</do>' }}"
    )
)
ATTRIBUTES = template(
    each_call(
        "{{- '<¦invoke name=\"' + f.name + '\">\\n' }}"
        + _pairs(
            """{{- '<¦parameter name="' + key + '" string="' + ('true' if value is string else 'false') + '">' + """
            + _TEXT_OR_JSON
            + " + '</¦parameter>\\n' }}"
        )
        + "{{- '</¦invoke>\\n' }}",
        "{{- '\\n\\n<¦calls>\\n' }}",
        "{{- '</¦calls>' }}",
    )
)
PYTHON = template(
    each_call(
        "{{- ', ' if not loop.first }}{{- f.name + '(' }}"
        + _pairs(
            """{{- ', ' if not loop.first }}{{- key + '=' }}{{- "'" + value + "'" if value is string else value }}"""
        )
        + "{{- ')' }}",
        "{{- '<|py|>[' }}",
        "{{- ']<|/py|>' }}",
    )
)
BRACES = template(
    each_call(
        "{{- '<|tool>call:' + f.name + '{' }}"
        + _pairs(
            """{{- ',' if not loop.first }}{{- key + ':' }}"""
            """{{- '<|"|>' + value + '<|"|>' if value is string else value | tojson }}"""
        )
        + "{{- '}<tool|>' }}"
    )
)
ALL = {
    "objects": OBJECTS,
    "list": LIST,
    "named": NAMED,
    "ids": IDS,
    "keyed": KEYED,
    "parameters": PARAMETERS,
    "pairs": PAIRS,
    "attributes": ATTRIBUTES,
    "python": PYTHON,
    "braces": BRACES,
}


def rendering(source: str) -> Render:
    """Returns a function that renders with the template."""
    compiled = ChatTemplate(source)

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str | None:
        try:
            return compiled.render(Conversation(messages=list(messages), tools=list(tools)), {})
        except InvalidParameterError:
            return None

    return render


def learned(source: str) -> CallFormat:
    """Returns the format that is learned from the template."""
    spelling = learn_spelling(rendering(source))
    assert spelling is not None
    return learned_format(spelling, None, None)


LEARNED = {name: learned(source) for name, source in ALL.items()}
