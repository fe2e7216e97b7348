"""A grammar of text -> the grammar of the same text within a JSON string, where some characters are escaped.

Every terminal is rewritten: `/"[^\\n]+/` becomes a regular expression of that text in JSON, with a backslash before
each quote. What cannot be rewritten is refused.

Rules become terminals, so that all of the grammar is one: where an escape begins, it takes the next character to tell
whether a terminal goes on or another begins, and a lexer does not look ahead. So rules must not refer to themselves.
"""

import json
import re
from collections.abc import Iterator

from engine.core.errors import GrammarError

_ESCAPED = [*map(chr, range(0x20)), '"', "\\"]
_PLAIN = r'[^"\\\x00-\x1f]'

_STRING, _REGEX = r'"(?:[^"\\\n]|\\.)*"', r"/(?:[^/\\\n]|\\.)+/"
_TERMINAL = re.compile(
    r"(?P<comment>(?://|\#)[^\n]*)"
    rf"|(?P<range>(?P<low>{_STRING})\s*\.\.\s*(?P<high>{_STRING}))"
    rf"|(?P<string>{_STRING})(?P<case>i?)"
    rf"|(?P<regex>{_REGEX})(?P<flags>[a-z]*)"
    r"|%import\s+common\s*\.\s*(?P<name>\w+)(?:\s*->\s*(?P<alias>\w+))?"
    r"|%import\s+common\s*\(\s*(?P<names>\w+(?:\s*,\s*\w+)*)\s*\)"
)
_REFUSED = re.compile(
    r"%\w*|@\w*|::|~(?!\s*[0-9])|<[^<>\s]+>|\{(?![0-9]*,?[0-9]*\})|(?<![0-9,{])\}|\w\[[^\]\n]*\](?=\s*:)|[\"/]"
)
_ALIAS = re.compile(r"->\s*\w+")
_RULE = re.compile(r"(?<![\w-])[!?]*(_?[a-z][a-z0-9_-]*)")
_COMMON = {
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*([^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}
"""Terminals of Lark's library that may have characters which are escaped."""

_ATOM = re.compile(
    r"(?P<open>\((?:\?(?P<on>[ims]*)(?:-(?P<off>[ims]+))?:|\?P?<\w+>|(?!\?)))"
    r"|(?P<class>\[\^?\]?(?:[^\]\\]|\\.)*\])"
    r"|(?P<escape>\\(?:x[0-9a-fA-F]{2}|x\{[0-9a-fA-F]{1,6}\}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|.))"
    r"|(?P<count>\{[0-9]*,?[0-9]*\})"
    r"|(?P<char>.)",
    re.S,
)
_OF_RUST_ONLY = re.compile(r"(?<!\\)(?:\[|&&|--|~~)|\\[pP]")
_CODE = re.compile(r"\\[xu]\{?([0-9a-fA-F]+)\}?")


def in_json_string(grammar: str) -> str:
    """Returns the grammar in Lark's notation. Raises GrammarError for what cannot be rewritten."""
    pieces, position = ["start: RULE_START\n"], 0
    for found in _TERMINAL.finditer(grammar):
        pieces += [_outside(grammar[position : found.start()]), _terminal(found)]
        position = found.end()
    return "".join([*pieces, _outside(grammar[position:])])


def _outside(text: str) -> str:
    if refused := _REFUSED.search(text):
        raise GrammarError(f"the grammar's {refused[0]} is not supported within a JSON string")
    return _RULE.sub(lambda name: f"RULE_{name[1].upper()}", _ALIAS.sub("", text))


def _terminal(found: re.Match[str]) -> str:
    if found["comment"] is not None:
        return ""
    if found["range"] is not None:
        low, high = (re.escape(_string(found[name])) for name in ("low", "high"))
        return _slashed(f"[{low}-{high}]", "")
    if found["string"] is not None:
        return _slashed(re.escape(_string(found["string"])), found["case"]) if found["string"] != '""' else '""'
    if found["regex"] is not None:
        return _slashed(found["regex"][1:-1].replace("\\/", "/"), found["flags"])
    names = [found["name"]] if found["names"] is None else re.split(r"\s*,\s*", found["names"])
    return "\n".join(_imported(name, found["alias"] or name) for name in names)


def _imported(name: str, alias: str) -> str:
    if name not in _COMMON:
        return f"%import common.{name} -> {alias}"
    return f"{alias}: {_slashed(_COMMON[name], '')}"


def _string(quoted: str) -> str:
    try:
        text: str = json.loads(quoted)
    except ValueError as error:
        raise GrammarError(f"the grammar's {quoted[:40]} is not a string as in JSON") from error
    return text


def _slashed(pattern: str, flags: str) -> str:
    if set(flags) - {"i", "m", "s"}:
        raise GrammarError(
            f"the flags {flags} of the grammar's /{pattern[:40]}/ are not supported within a JSON string"
        )
    written = "".join(_rewritten(pattern, frozenset(flags)))
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", written, flags=re.S) + "/"


def _rewritten(pattern: str, flags: frozenset[str]) -> Iterator[str]:
    """Yields the parts of the pattern as they are in JSON."""
    outer = [flags]
    if flags:
        yield f"(?{''.join(sorted(flags))}:"
    for atom in _ATOM.finditer(pattern):
        if atom["open"] is not None:
            outer.append((outer[-1] | set(atom["on"] or "")) - set(atom["off"] or ""))
            yield atom[0]
        elif atom["count"] is not None or atom[0] in "|*+?^$":
            yield atom[0]
        elif atom[0] == ")":
            outer.pop()
            yield atom[0]
        else:
            yield _one_character(atom, outer[-1] if outer else flags)
    if flags:
        yield ")"


def _one_character(atom: re.Match[str], flags: frozenset[str]) -> str:
    """Returns what matches the same character in JSON."""
    if atom[0] == "(" or _OF_RUST_ONLY.search(atom[0][1:]):
        raise GrammarError(f"the {atom[0][:40]} in a regular expression is not supported within a JSON string")
    text = _CODE.sub(_named_character, atom[0])
    if atom["escape"] is not None and text[1:] in tuple("bBAz"):
        return text  # not a character
    members = [re.escape(json.dumps(each)[1:-1]) for each in _ESCAPED if _compiled(text, flags).fullmatch(each)]
    if not members:
        return text
    escaped = "|".join(members) if "i" not in flags else f"(?-i:{'|'.join(members)})"
    if atom["class"] is None and text not in (".", r"\s", r"\S", r"\D", r"\W"):
        return f"(?:{escaped})"
    return f"(?:{_PLAIN if text == '.' else f'[{text}&&{_PLAIN}]'}|{escaped})"


def _named_character(code: re.Match[str]) -> str:
    try:
        return re.escape(chr(int(code[1], 16)))
    except ValueError as error:
        raise GrammarError(f"the {code[0]} in a regular expression is no character") from error


def _compiled(text: str, flags: frozenset[str]) -> re.Pattern[str]:
    try:
        return re.compile(text, re.A | (re.I if "i" in flags else 0) | (re.S if "s" in flags else 0))
    except re.error as error:
        raise GrammarError(f"the {text[:40]} in a regular expression is not supported within a JSON string") from error
