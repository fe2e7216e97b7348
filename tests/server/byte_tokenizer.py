"""A tokenizer that needs no files: one token per byte, 256 begins a text, 257 ends it."""

import itertools
import re
from collections.abc import Mapping, Sequence, Set

BOS, EOS = 256, 257
VOCAB_SIZE = 258
CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role not in ("system", "user", "assistant", "tool") %}
{{ raise_exception("No such role: " + message.role) }}
{% endif %}
[{{ message.role }}]{{ message.content or "" }}{% for call in message.tool_calls or [] %}
<{{ call.function.name }}{% for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}>
{%- endfor %}
{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""
PROMPT = "[user]Hi[assistant]"  # of a user who says "Hi", behind <s>
NUM_PROMPT_TOKENS = 1 + len(PROMPT)


class ByteTokenizer:
    """Implements `server.core.tokenizer_protocol.Tokenizer`."""

    def __init__(
        self, chat_templates: Mapping[str, str] | None = None, special_tokens: Mapping[str, int] | None = None
    ) -> None:
        """`special_tokens` are further ones, whose ids are those of bytes that are never in UTF-8: 0xF8 to 0xFF."""
        self._special = {"<s>": BOS, "</s>": EOS, **(special_tokens or {})}
        self._texts = {token_id: text.encode() for text, token_id in self._special.items()}
        self.chat_templates = {"default": CHAT_TEMPLATE} if chat_templates is None else chat_templates

    @property
    def special_ids(self) -> Set[int]:
        return frozenset(self._texts)

    @property
    def named_tokens(self) -> Mapping[str, str]:
        return {"bos_token": "<s>", "eos_token": "</s>"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        pieces = re.split(f"({'|'.join(map(re.escape, self._special))})", text)
        ids = [[self._special[piece]] if piece in self._special else list(piece.encode()) for piece in pieces]
        return [BOS] * add_special_tokens + list(itertools.chain(*ids))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        kept = [each for each in token_ids if not (skip_special_tokens and each in self.special_ids)]
        return b"".join(self.token_bytes(each) for each in kept).decode(errors="replace")

    def has_token(self, token_id: int) -> bool:
        return token_id < VOCAB_SIZE or token_id in self._texts

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts.get(token_id) or bytes([token_id])

    def bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        return [tuple(word.encode())] if word else []
