"""The formats of calls, and which of them a model was trained on, as its chat template tells."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from server.tools.readers import (
    HERMES_CLOSE,
    HERMES_OPEN,
    LLAMA_TAG,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    MISTRAL_ID,
    Reader,
    read_hermes,
    read_json,
    read_llama,
    read_mistral,
)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written where this program decides it, so that their reader finds them."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    begin: str = ""
    end: str = ""

    def of(self, calls: Iterable[tuple[str, str]]) -> str:
        """The text of calls, each a name and JSON."""
        spelled = (f"{self.before_name}{name}{self.before_arguments}{arguments}" for name, arguments in calls)
        return self.begin + self.between.join(call + self.after_arguments for call in spelled) + self.end


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    name: str
    read: Reader
    spelling: Spelling
    opening: str | None
    """The mark without which text is no call; None where calls are messages that begin with a brace."""
    marks: tuple[str, ...] = ()
    """Texts that the reader looks for. Where they are special tokens, those must be in the text."""
    id_length: int | None = None
    """For templates that refuse ids of any other length; they also want letters and digits only."""


HERMES = CallFormat(
    "hermes",
    read_hermes,
    Spelling(f'{HERMES_OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{HERMES_CLOSE}", "\n"),
    HERMES_OPEN,
    (HERMES_OPEN, HERMES_CLOSE),
)
LLAMA = CallFormat(
    "llama3",
    read_llama,
    Spelling('{"name": "', '", "parameters": ', "}", "; "),
    None,
    (LLAMA_TAG,),
)
_MISTRAL_MARKS = (MISTRAL_CALLS, MISTRAL_ARGUMENTS, MISTRAL_ID)
MISTRAL_LIST = CallFormat(
    "mistral",
    read_mistral,
    Spelling('{"name": "', '", "arguments": ', "}", ", ", begin=f"{MISTRAL_CALLS}[", end="]"),
    MISTRAL_CALLS,
    _MISTRAL_MARKS,
    id_length=9,
)
MISTRAL_NAMED = CallFormat(
    "mistral",
    read_mistral,
    Spelling(MISTRAL_CALLS, MISTRAL_ARGUMENTS, "", ""),
    MISTRAL_CALLS,
    _MISTRAL_MARKS,
    id_length=9,
)
JSON = CallFormat("json", read_json, Spelling('{"name": "', '", "arguments": ', "}", "\n"), None)

BY_NAME: Mapping[str, CallFormat] = MappingProxyType({each.name: each for each in (HERMES, LLAMA, MISTRAL_LIST, JSON)})

_MENTIONS_TOOLS = re.compile(r"\btools\b")


def mentions_tools(template: str) -> bool:
    """Whether the template tells the model of tools. To others they must be told in plain text."""
    return _MENTIONS_TOOLS.search(template) is not None


def format_of(template: str) -> CallFormat | None:
    """What the template asks for or shows. None if it tells of tools and nothing here reads what it asks for."""
    if not mentions_tools(template):
        return JSON
    if MISTRAL_CALLS in template:
        return MISTRAL_NAMED if MISTRAL_ARGUMENTS in template else MISTRAL_LIST
    if HERMES_OPEN in template:
        return None if "<function=" in template else HERMES  # calls in XML
    if LLAMA_TAG in template or ('"parameters"' in template and "ipython" in template):
        return LLAMA
    return None
