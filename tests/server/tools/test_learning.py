"""Formats of calls and thoughts are learned from what a chat template writes; what cannot be told is no format."""

import pytest

from server.tools.formats import HARMONY, HERMES, JSON, MISTRAL_NAMED
from server.tools.learning import learn_spelling
from server.tools.model_format import DialectSettings
from server.tools.spelling import HOLE, LiteralArguments, Spelling, TaggedArguments
from server.tools.thinking import HARMONY_ANALYSIS, THINK, ThinkingMarks, learn_marks, marks_in
from tests.server.tools.call_templates import ALL, NAMED_IDS, OBJECTS, each_call, rendering, template

SPELLINGS = {
    "objects": Spelling('<call>\n{"name": "', '", "arguments": ', "}\n</call>", "\n"),
    "list": Spelling(
        f'{{"tool_call_id": "{HOLE}", "tool_name": "', '", "parameters": ', "}", ", ", "<|actions|>[", "]<|/actions|>"
    ),
    "named": Spelling("<|call|>functions.", f":{HOLE}<|args|>", "<|/call|>", "", "<|calls|>", "<|/calls|>"),
    "ids": Spelling("[CALLS]", f"[ID]{HOLE}[ARGS]", "", ""),
    "keyed": Spelling('{"', '": ', "}", ", ", "<|tools|>[", "]<|/tools|>"),
    "parameters": Spelling(
        *("<do>\n<function=", ">\n", "\n</function>\n</do>", "\n"),
        arguments=TaggedArguments("<parameter=", ">\n", "\n</parameter>", "\n", has_python_constants=True),
    ),
    "pairs": Spelling(
        *("<do>", "\n", "\n</do>", ""), arguments=TaggedArguments("<key>", "</key>\n<value>", "</value>", "\n")
    ),
    "attributes": Spelling(
        *('\n<¦invoke name="', '">\n', "\n</¦invoke>", "", "<¦calls>", "\n</¦calls>"),
        arguments=TaggedArguments(
            *('<¦parameter name="', '" string="true">', "</¦parameter>", "\n"), after_key_of_other='" string="false">'
        ),
    ),
    "python": Spelling(*("", "", "", ", ", "<|py|>[", "]<|/py|>"), arguments=LiteralArguments("(", "=", ")", "'")),
    "braces": Spelling(*("<|tool>call:", "", "<tool|>", ""), arguments=LiteralArguments("{", ":", "}", '<|"|>')),
}


@pytest.mark.parametrize("name", ALL)
def test_the_spelling_of_calls_is_learned(name: str) -> None:
    assert learn_spelling(rendering(ALL[name])) == SPELLINGS[name]


@pytest.mark.parametrize("name", ["objects", "pairs"])
def test_a_template_that_takes_one_call_only_is_learned_as_that(name: str) -> None:
    source = ALL[name].replace(
        "{%- for call", "{{- raise_exception('One.') if m.tool_calls | length > 1 }}{%- for call"
    )
    spelling = learn_spelling(rendering(source))
    assert spelling is not None and spelling.is_single
    assert spelling.before_name == SPELLINGS[name].before_name
    assert spelling.after_arguments == SPELLINGS[name].after_arguments


def test_arguments_may_have_to_be_a_string_and_content_null() -> None:
    source = template(
        "{{- raise_exception('No.') if m.content is not none }}{%- for call in m.tool_calls %}"
        "{{- '<do>' + call.function.name + '\\n' + call.function.arguments + '</do>' }}{% endfor %}"
    )
    assert learn_spelling(rendering(source)) == Spelling("<do>", "\n", "</do>", "")


@pytest.mark.parametrize(
    "calls",
    [
        "",
        "{{- m.tool_calls[0].function.name }}",
        "{{- m.tool_calls | length }}",
        "{{- raise_exception('No calls.') }}",
        "{{- '<do>' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments | string | upper + '</do>' }}",
        "{%- for k, v in m.tool_calls[0].function.arguments | items %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}",
        "{%- for c in m.tool_calls %}<do>{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
        "<p={{ k }}>{{ v | e }}</p>{% endfor %}</do>{% endfor %}",
    ],
)
def test_what_cannot_be_told_is_not_learned(calls: str) -> None:
    source = template(calls)
    assert learn_spelling(rendering(source)) is None
    assert DialectSettings().dialect_of(source, rendering(source)).calls is None


def test_a_format_of_another_kind_is_not_taken_for_the_one_whose_mark_it_has() -> None:
    source = template("{{- '<tool_call>' + m.tool_calls[0].function.name + '!' }}")
    assert DialectSettings().dialect_of(source).calls is HERMES
    assert DialectSettings().dialect_of(source, rendering(source)).calls is None


def test_a_named_format_keeps_its_reader_where_calls_begin_alike() -> None:
    source = template(each_call("{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}"))
    calls = DialectSettings().dialect_of(source, rendering(source)).calls
    assert calls is not None and (calls.name, calls.read) == ("mistral", MISTRAL_NAMED.read)


def test_calls_that_are_plain_json_are_read_as_such() -> None:
    one = """{{- '{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}\\n' }}"""
    source = template(each_call(one))
    calls = DialectSettings().dialect_of(source, rendering(source)).calls
    assert calls is not None and (calls.name, calls.read, calls.opening) == ("json", JSON.read, None)


def test_names_that_stand_in_ids_only_are_learned() -> None:
    assert learn_spelling(rendering(NAMED_IDS)) is None
    calls = DialectSettings().dialect_of(NAMED_IDS, rendering(NAMED_IDS)).calls
    assert calls is not None and calls.spelling == SPELLINGS["named"]


def test_the_only_length_of_ids_is_learned() -> None:
    source = ALL["ids"].replace(
        "{%- for call", "{{- raise_exception('9!') if m.tool_calls[0].id|length != 9 }}{%- for call"
    )
    lengths = [DialectSettings().dialect_of(each, rendering(each)).calls for each in (source, ALL["ids"])]
    assert [each and each.id_length for each in lengths] == [9, None]


def test_channels_are_those_of_harmony() -> None:
    source = "{{- '<|start|>assistant<|channel|>final<|message|>' if tools }}" + OBJECTS
    dialect = DialectSettings().dialect_of(source, rendering(source))
    assert dialect.calls is HARMONY and dialect.thinking is HARMONY_ANALYSIS and dialect.message is HARMONY.read


@pytest.mark.parametrize(
    ("opening", "closing"),
    [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("<|in>inner", "<in|>")],
)
@pytest.mark.parametrize("space", ["", "\\n"])
def test_marks_of_thoughts_are_learned(opening: str, closing: str, space: str) -> None:
    thought = f"{{{{- '{opening}{space}' + m.reasoning_content + '{space}{closing}' }}}}"
    assert learn_marks(rendering(template("", thought))) == ThinkingMarks(opening, closing)


def test_the_marks_of_a_turn_are_none_of_a_thought() -> None:
    assert learn_marks(rendering(template("", "{{- m.reasoning_content + '<|sep|>' }}"))) is None
    assert learn_marks(rendering(template("", "{{- m.reasoning_content + '</think>' }}"))) == THINK


@pytest.mark.parametrize(
    ("source", "closing"),
    [
        ("[THINK]", "[/THINK]"),
        ("'[/THINK]'", "[/THINK]"),
        ("<seed:think>", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought", "<channel|>"),
        ("Here is my thought process:", "Here is my response:"),
    ],
)
def test_known_marks_are_found_in_the_source(source: str, closing: str) -> None:
    marks = marks_in(source)
    assert marks is not None and marks.closing == closing
