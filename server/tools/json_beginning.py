"""Whether text that arrives in pieces can still become JSON."""

import re

from pydantic_core import from_json

_ESCAPE = r"\\(?:[^u]|u(?![dD][89abAB])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})"
_WHOLE = re.compile(rf'"[^"\\]*+(?:{_ESCAPE}[^"\\]*+)*+')  # of a string, as far as no character is cut
_TOKEN = re.compile(rf'[{{}}\[\],:]|[ \t\n\r]+|{_WHOLE.pattern}"|".*|[^{{}}\[\],:" \t\n\r]+', re.DOTALL)
_OPENING = {"}": "{", "]": "["}
_VALUE = '""'  # which nothing that follows can change
_NEVER_JSON = ",\0\0\0\0"  # wherever it comes, be it where four digits are awaited


class JsonBeginning:
    """Checks whether pieces of text together are still a prefix of JSON.

    A piece at the end of a long text costs no more than one at its beginning: beyond `kept_chars`, what can make no
    difference any more is forgotten. A number is looked at again as long as it goes on."""

    def __init__(self, kept_chars: int = 1024) -> None:
        self._kept_chars = self._max_chars = kept_chars
        self._text = ""  # as good a prefix of JSON as all the pieces, whatever follows

    def add(self, piece: str) -> bool:
        """Whether all pieces together are a prefix of JSON. No piece may be added once they are not."""
        self._text += piece
        if not begins_json(self._text):
            return False
        if len(self._text) > self._max_chars:
            self._text = shortened(self._text)
            self._max_chars = max(self._kept_chars, 2 * len(self._text))
        return True


def begins_json(text: str) -> bool:
    try:
        from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return False
    return True


def shortened(text: str) -> str:
    """Returns a shorter text that is as good a prefix of JSON as `text`, which must be one, whatever follows. Of a list
    or an object only what stands behind its last comma is kept; a string or a closed value leaves an empty string."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    if begins_json(text + _NEVER_JSON):  # behind its end, or a comma that lacks, the parser looks at nothing
        return "{}"
    kept: list[str] = []
    opened: list[int] = []  # where in `kept`
    for token in _TOKEN.findall(text):
        match token[0]:
            case "{" | "[":
                opened.append(len(kept))
                kept.append(token)
            case "}" | "]":
                while kept[opened[-1]] != _OPENING[token]:  # to the parser one bracket closes those within, too
                    opened.pop()
                kept[opened.pop() :] = [_VALUE]
            case ",":
                member = _VALUE if kept[opened[-1]] == "[" else f"{_VALUE}:{_VALUE}"
                kept[opened[-1] + 1 :] = [member, token]
            case '"':
                kept.append(_shortened_string(token))
            case " " | "\t" | "\n" | "\r":
                kept.append(" ")
            case _:
                kept.append(token)
    return "".join(kept)


def _shortened_string(token: str) -> str:
    whole = _WHOLE.match(token)
    assert whole is not None
    return '"' + token[whole.end() :]
