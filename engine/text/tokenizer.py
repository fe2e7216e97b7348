"""Text <-> token ids, with the tokenizers library. Imports neither torch nor transformers.

Encoding and decoding may run in several threads at once: nothing changes the library's object after loading. Only the
library's functions for batches release the GIL, so a single text is encoded as a batch of one.
"""

import os
import re
from collections.abc import Sequence
from functools import partial

import tokenizers

from engine.core.errors import ContextLengthError, RequestError
from engine.host.rust_panics import panics_as
from engine.text.tokenizer_files import TokenizerFiles, load_tokenizer_files

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CHARS_PER_TOKEN = 4
_MAX_IDS = 2**32
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A checkpoint's tokenizer. No character of a text is an error: lone surrogates count as U+FFFD."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._backend: tokenizers.Tokenizer = files.backend
        self.named_tokens = files.named_tokens
        """Name -> text of the special tokens that are set (bos_token, eos_token, ...); chat templates use them."""
        self.chat_templates = files.chat_templates
        """Name -> source of the chat templates; the usual one is called default. There may be none."""
        self._bytes: dict[int, bytes] = {}  # filled as tokens are used
        self._byte_of_character = _byte_level_alphabet()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids of special tokens, which `skip_special_tokens` leaves out of the text."""
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self.max_tokens: int | None = None
        """Texts with more tokens are refused; None for no limit. Set once, when the model's context length is known."""
        self._anchor = self.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = self.decode(self._anchor, skip_special_tokens=False)

    @classmethod
    def from_pretrained(
        cls, model: str, *, revision: str | None = None, trust_remote_code: bool = False
    ) -> "Tokenizer":
        """Loads the tokenizer of `model`, a checkpoint directory or a hub id. Raises ModelError."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one need no threads beside the caller's
        return cls(load_tokenizer_files(model, revision=revision, trust_remote_code=trust_remote_code))

    @property
    def vocabulary(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def eos_token_id(self) -> int | None:
        token = self.named_tokens.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Special tokens written out in it become their ids, as in transformers.

        Raises ContextLengthError.
        """
        self._check_length(text)
        return self._encode(text, add_special_tokens)

    def _check_length(self, text: str) -> None:
        """Raises ContextLengthError if a prefix of the text has more than `max_tokens` tokens already.

        It encodes ever longer prefixes of a long text: all of a text of some megabytes, which any client may send,
        would take a minute.
        """
        num_chars = _CHARS_PER_TOKEN * (self.max_tokens or len(text))
        while num_chars < len(text):
            count = len(self._encode(text[:num_chars], add_special_tokens=False))
            if self.max_tokens is not None and count > self.max_tokens:
                raise ContextLengthError(
                    f"The text is far beyond the maximum context length: its first {num_chars} of {len(text)} "
                    f"characters have {count} tokens. Shorten it."
                )
            num_chars *= 2

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encode = partial(self._backend.encode_batch_fast, add_special_tokens=add_special_tokens)
        with panics_as(_beyond_tokenizer):  # regular expressions of some tokenizers give up on millions of characters
            try:
                encodings = encode([text])
            except TypeError:  # raised by the library for text that UTF-8 cannot express
                encodings = encode([_without_surrogates(text)])
        return encodings[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence. Ids outside the vocabulary add nothing; spaces are not "cleaned up"."""
        known = [token_id for token_id in token_ids if 0 <= token_id < _MAX_IDS]  # the library raises beyond
        return self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < _MAX_IDS and self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes the token adds in the middle of a text: perhaps only a part of a character."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._find_bytes(token_id)
        return data

    def bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        """Returns the token ids that spell `word`: as a new word after a space, and right after other characters."""
        bare = word.lstrip(" ")
        spellings = (self._ids_after("a", " " + bare), self._ids_after("\n", bare)) if bare else (self._plain(word),)
        return [tuple(ids) for ids in dict.fromkeys(map(tuple, spellings)) if ids]

    def _plain(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _ids_after(self, context: str, text: str) -> list[int]:
        before, whole = self._plain(context), self._plain(context + text)
        return whole[len(before) :] if whole[: len(before)] == before else self._plain(text)

    def _find_bytes(self, token_id: int) -> bytes:
        """Returns the token's bytes by decoding it after another token, which keeps the leading space that decoders
        strip from the start of a text.

        If that gives U+FFFD, the token is a part of a character, and its name says which bytes it stands for.
        """
        text = self.decode([*self._anchor, token_id], skip_special_tokens=False)
        if not text.startswith(self._anchor_text):
            text = self._anchor_text + self.decode([token_id], skip_special_tokens=False)
        text = text[len(self._anchor_text) :]
        return text.encode() if _REPLACEMENT not in text else self._bytes_by_name(token_id, text)

    def _bytes_by_name(self, token_id: int, text: str) -> bytes:
        name = self._backend.id_to_token(token_id) or ""
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        data = [self._byte_of_character.get(character) for character in name]
        return text.encode() if None in data else bytes(byte for byte in data if byte is not None)


def _beyond_tokenizer(reason: str) -> RequestError:
    return RequestError(f"The tokenizer cannot cut a text of this kind or length into tokens: {reason[:200]}.")


def _without_surrogates(text: str) -> str:
    """Returns the text with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _byte_level_alphabet() -> dict[str, int]:
    """Returns character -> byte of the byte-level alphabet (GPT-2): printable Latin-1 characters stand for themselves,
    those from U+0100 on for the other bytes, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
