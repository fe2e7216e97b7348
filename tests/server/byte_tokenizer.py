"""A tokenizer that needs no files: one token per byte, 256 begins a text, 257 ends it."""

from collections.abc import Sequence, Set

BOS, EOS = 256, 257
VOCAB_SIZE = 258


class ByteTokenizer:
    """Implements `server.text.Tokenizer`."""

    @property
    def special_ids(self) -> Set[int]:
        return frozenset({BOS, EOS})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [each for each in token_ids if not (skip_special_tokens and each in self.special_ids)]
        return b"".join(self.token_bytes(each) for each in kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or bytes([token_id])

    def bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        return [tuple(word.encode())] if word else []
