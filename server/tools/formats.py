"""The formats of tool calls, and which of them a model was trained on, detected from its chat template."""

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
    """How calls are written by this server, in grammars and in prompts, so that the format's reader parses them."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str
    begin: str = ""
    end: str = ""

    def of(self, calls: Iterable[tuple[str, str]]) -> str:
        """Returns the text of calls, each given as a name and arguments in JSON."""
        spelled = (f"{self.before_name}{name}{self.before_arguments}{arguments}" for name, arguments in calls)
        return self.begin + self.between.join(call + self.after_arguments for call in spelled) + self.end


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A format in which models write tool calls, and its reader."""

    name: str
    read: Reader
    spelling: Spelling
    opening: str | None
    """The mark that begins calls, without which text is no call; None where messages that begin with a brace are
    calls."""
    marks: tuple[str, ...] = ()
    """Texts that the reader looks for. Where they are special tokens, those must be in the text."""
    id_length: int | None = None
    """The length of call ids, for templates that refuse any other; they also want letters and digits only."""


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
    """Whether the template puts tools into the prompt. For other templates they are described in plain text."""
    return _MENTIONS_TOOLS.search(template) is not None


def format_of(template: str) -> CallFormat | None:
    """Returns the format that the template asks for or shows; None if it asks for one that no reader here parses."""
    if not mentions_tools(template):
        return JSON
    if MISTRAL_CALLS in template:
        return MISTRAL_NAMED if MISTRAL_ARGUMENTS in template else MISTRAL_LIST
    if HERMES_OPEN in template:
        return None if "<function=" in template else HERMES  # calls in XML
    if LLAMA_TAG in template or ('"parameters"' in template and "ipython" in template):
        return LLAMA
    return None
