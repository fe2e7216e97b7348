"""The formats of tool calls, and which of them a model was trained on, detected from its chat template."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from server.tools.call import NAME_KEYS
from server.tools.harmony import HARMONY_MARKS, read_harmony
from server.tools.named_calls import named_calls
from server.tools.readers import (
    HERMES_CLOSE,
    HERMES_OPEN,
    LLAMA_TAG,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    MISTRAL_ID,
    Reader,
    marked_objects,
    read_hermes,
    read_json,
    read_llama,
    read_mistral,
)
from server.tools.spelling import JsonArguments, LiteralArguments, Spelling


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
GRANITE = CallFormat(
    "granite",
    marked_objects("<|tool_call|>", ""),
    Spelling('{"name": "', '", "arguments": ', "}", ", ", begin="<|tool_call|>[", end="]"),
    "<|tool_call|>",
    ("<|tool_call|>",),
)
_LFM_SPELLING = Spelling(
    *("", "", "", ", "),
    begin="<|tool_call_start|>[",
    end="]<|tool_call_end|>",
    arguments=LiteralArguments("(", "=", ")", "'"),
)
LFM = CallFormat("lfm2", named_calls(_LFM_SPELLING), _LFM_SPELLING, _LFM_SPELLING.opening, _LFM_SPELLING.texts)
HARMONY = CallFormat(
    "harmony",
    read_harmony,
    Spelling(*("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", ""), is_single=True),
    "<|channel|>commentary to=",
    HARMONY_MARKS,
)

BY_NAME: Mapping[str, CallFormat] = MappingProxyType(
    {each.name: each for each in (HERMES, LLAMA, MISTRAL_LIST, JSON, GRANITE, LFM, HARMONY)}
)

_MENTIONS_TOOLS = re.compile(r"\btools\b")
_MENTIONED = {"<|tool_list_start|>": LFM, "List of tools: [": LFM, "<|tool_call|>": GRANITE}


def mentions_tools(template: str) -> bool:
    """Whether the template puts tools into the prompt. For other templates they are described in plain text."""
    return _MENTIONS_TOOLS.search(template) is not None


def format_of(template: str) -> CallFormat | None:
    """Returns the format that the template asks for or shows; None if it asks for one that no reader here parses."""
    if is_harmony(template):
        return HARMONY
    if not mentions_tools(template):
        return JSON
    if MISTRAL_CALLS in template:
        return MISTRAL_NAMED if MISTRAL_ARGUMENTS in template else MISTRAL_LIST
    if HERMES_OPEN in template:
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if LLAMA_TAG in template or ('"parameters"' in template and "ipython" in template):
        return LLAMA
    return next((form for mark, form in _MENTIONED.items() if mark in template), None)


def is_harmony(template: str) -> bool:
    return all(mark in template for mark in ("<|channel|>", "<|message|>", "<|start|>"))


def learned_format(spelling: Spelling, named: CallFormat | None, id_length: int | None) -> CallFormat:
    """Returns the format of a learned spelling. `named` is what the template's source says: its reader is kept where it
    begins calls alike, because it takes more variants."""
    is_json = isinstance(spelling.arguments, JsonArguments)
    if named is not None and is_json and named.opening == spelling.opening:
        return replace(named, spelling=spelling, marks=(*named.marks, *spelling.texts))
    opening = spelling.opening
    around = _around_objects(spelling) if is_json else None
    if around is None:
        return CallFormat("learned", named_calls(spelling), spelling, opening, spelling.texts, id_length)
    if not around[0].strip():
        return named or replace(JSON, spelling=spelling)
    return CallFormat("learned", marked_objects(*around), spelling, opening, spelling.texts, id_length)


def _around_objects(spelling: Spelling) -> tuple[str, str] | None:
    """Returns the texts before and after the JSON in which calls are whole; None if their names stand outside of it."""
    text = spelling.of([("f", "{}")])
    for begin in (found.start() for found in re.finditer(r"[{\[]", text)):
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError:
            continue
        call = value[0] if isinstance(value, list) and value else value
        if isinstance(call, dict) and any(call.get(key) == "f" for key in NAME_KEYS):
            return text[:begin], text[end:]
    return None
