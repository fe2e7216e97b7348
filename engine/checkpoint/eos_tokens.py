"""The tokens that end a text, as a checkpoint's files name them; torch-free.

Each file may name other ones: generation_config.json those of the chat format, config.json those of pretraining, and
the tokenizer that with which a fine-tune ends its turns, whatever the other two still say. All of them count.
"""

import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from engine.checkpoint.hub import optional_file
from engine.core.errors import ModelError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _TokenizerModel(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = []
    """Token -> id, or in order of the ids tokens with their scores."""


class _Tokenizer(msgspec.Struct, frozen=True):
    """What tokenizer.json says of ids."""

    added_tokens: list[_AddedToken] = []
    model: _TokenizerModel = _TokenizerModel()


def find_eos_token_ids(model: str, revision: str | None, vocab_size: int, default: Any) -> tuple[int, ...]:
    """Returns the EOS tokens that are in the vocabulary: others are never sampled. They are all that the files name, or
    `default`, the usual one of the model's kind. Raises ModelError."""
    named = [
        *_named_by(model, revision, "generation_config.json"),
        *_named_by(model, revision, "config.json", "text_config"),
        *_named_by_tokenizer(model, revision),
    ]
    token_ids = tuple(dict.fromkeys(named or _token_ids(default, f"eos_token_id of {model}")))
    known = tuple(token_id for token_id in token_ids if 0 <= token_id < vocab_size)
    if known != token_ids:
        logger.warning("eos_token_id %s: not all are in the vocabulary [0, %d)", list(token_ids), vocab_size)
    return known


def _named_by(model: str, revision: str | None, file: str, part: str | None = None) -> list[int]:
    """Returns the ids that a file names, itself and in the part that is about text."""
    config = _read(model, revision, file, dict[str, Any], {})
    inner = config.get(part) if part else None
    return [
        token_id
        for fields in (config, inner)
        if isinstance(fields, dict)
        for token_id in _token_ids(fields.get("eos_token_id"), f"eos_token_id in {file} of {model}")
    ]


def _token_ids(value: Any, place: str) -> Sequence[int]:
    """Returns one id, several or none as a list. Raises ModelError for anything else."""
    try:
        return msgspec.convert([] if value is None else value if isinstance(value, list) else [value], list[int])
    except msgspec.ValidationError as error:
        raise ModelError(f"{place} is {str(value)[:64]!r}: it must be a token id or a list of them.") from error


def _named_by_tokenizer(model: str, revision: str | None) -> list[int]:
    token = _eos_token(model, revision)
    if token is None:
        return []
    tokenizer = _read(model, revision, "tokenizer.json", _Tokenizer, _Tokenizer())
    added = [each.id for each in tokenizer.added_tokens if each.content == token]
    if added or not isinstance(tokenizer.model.vocab, dict):
        return added
    return [tokenizer.model.vocab[token]] if token in tokenizer.model.vocab else []


def _eos_token(model: str, revision: str | None) -> str | None:
    """Returns the text of the token with which the tokenizer ends texts."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(model, revision, file, dict[str, Any], {}).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            return text
    return None


def _read(model: str, revision: str | None, file: str, kind: type[T], missing: T) -> T:
    """Returns the content of a file; `missing` where there is none, or (logged) one that is damaged. Raises ModelError
    if the hub cannot be asked for it."""
    path = optional_file(model, revision, file)
    if path is None:
        return missing
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read: which tokens it says end a text is not known (%s)", path, error)
        return missing
