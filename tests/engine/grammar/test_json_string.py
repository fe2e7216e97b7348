"""Grammars of text within JSON strings."""

import json

import pytest

from engine.core.errors import GrammarError
from engine.grammar.json_string import in_json_string
from engine.grammar.lark import JsonString, Lark, Literal, Repeat, Sequence, to_lark
from tests.engine.grammar.grammars import accepts

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " filename LF change+
filename: /(.+)/
change: ("+" | "-" | " ") /(.*)/ LF -> line
%import common.LF
"""
CODE = r"""
start: pragma_source | SOURCE
pragma_source: PRAGMA_LINE NEWLINE SOURCE
PRAGMA_LINE: /[ \t]*\/\/ @run:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""


def accepted(grammar: str, *texts: str) -> list[str]:
    """Returns those texts whose JSON the grammar accepts."""
    return [text for text in texts if accepts(JsonString(Lark(grammar)), json.dumps(text, ensure_ascii=False))]


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (PATCH, '*** Begin Patch\n*** Update File: a"\\é\n+\t"x\\n"\n \n*** End Patch\n',
         "*** Begin Patch\n*** Update File: a\n*** End Patch\n"),
        (CODE, '// @run: {"a": 1}\nconst a = "b\\n";\x00\x1f\x7f🐙', ""),
        (r'start: /[a-c"]+/ "\n" "\\"', 'ab"\n\\', "abd\n\\"),
        (r'start: /a.b/', 'a"b', "a\nb"),
        (r'start: /a.b/s', "a\nb", "a\n\nb"),
        (r"start: /(?s:.)./", "\n\\", "\n\n"),
        (r"start: /.(?-s:.)/s", "\n\\", "\n\n"),
        (r"start: /a\sb/", "a\x0cb", "a\x1cb"),
        (r'start: /a\sb\Sc\w/', 'a\tb"cd', 'a"b"cd'),
        (r'start: /[^"\\]\D\W/', 'a"\n', '"a\n'),
        (r'start: /x\n|Y"/i', "X\n", "y\\"),
        (r'start: "A\tb"i', "a\tB", "a\tC"),
        (r'start: /\x22\x{5c}\u{e9}\u0009[\x22-\x{24}]/', '"\\é\t#', '"\\é\t!'),
        (r'start: " ".."~" "/"', '"/', "é/"),
        ('?start: _sum -> all\n_sum: term ("+" term)*\n!term: "\\""\n  | "(" a-1 ")"\na-1: A*\nA: "a"',
         '(aa)+"', "(a+"),
        ('start: (A B?)~2..3 // no\nA: "a" # no "\nB: /[\\]"]{2,}/', 'aa]"', 'a"a'),
        ("start: W ESCAPED_STRING Q\n%import common (WS_INLINE, ESCAPED_STRING)\n%import common.WORD -> W\n"
         '%import common.WS -> Q', 'ab"c\\"d" \n', 'ab"c\\"d"'),
        (r'start: /a\/"/', 'a/"', "a/"),
    ],
)  # fmt: skip
def test_the_json_of_texts_that_the_grammar_accepts_is_accepted(grammar: str, right: str, wrong: str) -> None:
    assert accepted(grammar, right, wrong) == [right]
    assert not accepts(JsonString(Lark(grammar)), json.dumps(right) + '"') and not accepts(written(grammar), wrong)


def written(grammar: str) -> str:
    return to_lark(Lark(grammar))


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\t", "a\\u0041", "\x1f"])
def test_what_is_not_escaped_is_not_accepted(text: str) -> None:
    part = JsonString(Lark(r"start: /[\s\S]*/"))
    assert not accepts(part, f'"{text}"') or json.loads(f'"{text}"') != text
    assert accepts(part, json.dumps(text))


def test_an_escape_has_its_case_whatever_the_text_has() -> None:
    part = JsonString(Lark(r"start: /a\n/i"))
    assert accepts(part, r'"A\n"') and not accepts(part, r'"A\N"')


def test_such_a_grammar_is_a_part_of_others() -> None:
    call = Sequence((Literal('{"input": '), JsonString(Lark('start: a+\na: "\\n"')), Literal("}")))
    assert accepts(Repeat(call, 1), r'{"input": "\n\n"}{"input": "\n"}')
    assert not accepts(Repeat(call, 1), r'{"input": "\n\n"}{"input": ""}')


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ('start: %regex {"substring_words": "a b"}', "%regex"),
        ('start: @other', "@other"),
        ('start: ~"a"', "~"),
        ("start: <think>", "<think>"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start[lazy]: /a/", "t[lazy]"),
        ("start: a::3", "::"),
        ('start: "a" }', "}"),
        ('start: "a" { start', "{"),
        (r"start: /\p{L}/", r"\p"),
        (r"start: /[[:alpha:]]/", "[[:alpha:]"),
        (r"start: /[a-z&&[^b]]/", "[a-z&&[^b]"),
        (r"start: /(?=a)b/", "("),
        ("start: /a/x", "flags x"),
        (r"start: /\x{110000}/", r"\x{110000}"),
        (r'start: "\q"', r'"\q"'),
        ('start: /a', "/"),
        ('start: %json {"type": "string"}', "%json"),
    ],
)  # fmt: skip
def test_what_cannot_be_rewritten_is_refused(grammar: str, named: str) -> None:
    with pytest.raises(GrammarError) as error:
        in_json_string(grammar)
    assert named in str(error.value)
