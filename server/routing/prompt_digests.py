"""What a router makes of the body of a request: digests of its prompt's beginning, without tokenizer or template.

A prefix cache is keyed by tokens, a router sees messages. Where two requests begin with the same messages and tools,
their tokens begin alike, whatever the template: so pieces of the text stand for blocks of tokens. A router that is
wrong costs a cache hit, never an answer.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.routing.policy import RoutedPrompt

PIECE_BYTES = 512
"""Bytes of text for which one digest stands."""
BYTES_PER_TOKEN = 4
"""Bytes of text that one token has, about."""
MAX_PIECES = 4096
"""Pieces that are looked at: what comes later in a prompt of 2 MiB decides nothing."""

# What stands before the conversation in a prompt, and the conversation: of every API that generates.
_BEFORE = ("tools", "functions", "system", "instructions")
_CONVERSATION = ("messages", "input", "prompt")


def routed_prompt(body: Mapping[str, Any], caller: str = "") -> RoutedPrompt:
    """Returns what a policy is to know of a request with this JSON body. `caller` is whoever shares cached prefixes,
    and keys, with nobody else. Any body will do: what is no prompt has no digests."""
    salt = json.dumps([caller, body.get("model"), body.get("cache_salt")], default=repr)
    text = b"".join(_texts(body))
    key = body.get("prompt_cache_key")
    return RoutedPrompt(
        digests=_digests(salt.encode(), text[: PIECE_BYTES * MAX_PIECES]),
        num_tokens=max(len(text) // BYTES_PER_TOKEN, 1),
        piece_tokens=PIECE_BYTES // BYTES_PER_TOKEN,
        key=f"{caller}\0{key}" if isinstance(key, str) and key else "",
    )


def routed_tokens(body: Mapping[str, Any]) -> RoutedPrompt:
    """Returns what a policy is to know of a request to compute tokens (`server.protocol.prefill`). Any body will do."""
    token_ids, salt = body.get("token_ids"), json.dumps([body.get("cache_salt"), body.get("adapter")], default=repr)
    try:
        return prompt_of_tokens(token_ids if isinstance(token_ids, list) else (), salt)
    except (TypeError, OverflowError):  # not all of them are numbers
        return prompt_of_tokens((), salt)


def prompt_of_tokens(token_ids: Sequence[int], salt: str) -> RoutedPrompt:
    """Returns what a policy is to know of a prompt whose tokens are known. `salt` tells apart prompts that share
    nothing."""
    return RoutedPrompt(
        digests=_digests(salt.encode(errors="surrogatepass"), array("q", token_ids).tobytes()),
        num_tokens=len(token_ids),
        piece_tokens=PIECE_BYTES // 8,
    )


def _texts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Yields the parts of the prompt, in the order in which templates write them: a longer conversation has the parts
    of a shorter one at its beginning."""
    for name in (*_BEFORE, *_CONVERSATION):
        value = body.get(name)
        if isinstance(value, list):
            yield from (json.dumps(each, sort_keys=True).encode() for each in value)
        elif value:
            yield json.dumps(value, sort_keys=True).encode()


def _digests(salt: bytes, text: bytes) -> list[bytes]:
    """Returns the chained digests of the text's full pieces."""
    digests = []
    parent = hashlib.sha256(salt).digest()
    for start in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
        parent = hashlib.sha256(parent + text[start : start + PIECE_BYTES]).digest()
        digests.append(parent)
    return digests
