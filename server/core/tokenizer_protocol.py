"""The tokenizer's interface as the server uses it; `engine.text.tokenizer.Tokenizer` implements it."""

from collections.abc import Mapping, Sequence, Set
from typing import Protocol


class Tokenizer(Protocol):
    """A tokenizer whose methods may be called from several threads at once."""

    @property
    def special_ids(self) -> Set[int]: ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The checkpoint's chat templates by name; the usual one is called default. There may be none."""

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Special tokens by role (bos_token, eos_token, ...), which chat templates use."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def has_token(self, token_id: int) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that the token adds in the middle of a text: perhaps only a part of a character."""

    def bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        """Returns the token id sequences that write `word`."""


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Returns the token as OpenAI's logprobs spell it: its text, or `bytes:\xe2\x82` for a part of a character."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
