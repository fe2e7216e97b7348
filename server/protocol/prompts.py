"""The four forms of `prompt`: a text, token ids, a list of texts, a list of lists of token ids."""

from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from server.protocol.wire import MAX_INT32, MAX_STRINGS, MAX_TOKEN_IDS, as_whole_items, check_text

Prompt = str | list[int]


def parse_prompts(value: Any) -> list[Prompt]:
    """Returns one entry per prompt. Checked by hand: errors of a four-way union would name each form that it is not."""
    match value:
        case str():
            return [check_text(value)]
        case [int() | float(), *_]:
            return [token_ids(value)]
        case [str(), *_]:
            return [_text(item) for item in _bounded(value, MAX_STRINGS)]
        case [list(), *_]:
            return [token_ids(item) for item in _bounded(value, MAX_STRINGS)]
        case _:
            raise _mismatch()


def _text(item: Any) -> str:
    if not isinstance(item, str):
        raise _mismatch()
    return check_text(item)


def token_ids(item: Any) -> list[int]:
    """Returns the token ids of one prompt."""
    if not isinstance(item, list):
        raise _mismatch()
    ids: list[int] = as_whole_items(_bounded(item, MAX_TOKEN_IDS))
    if set(map(type, ids)) - {int}:
        raise _mismatch()
    if ids and not (min(ids) >= 0 and max(ids) <= MAX_INT32):
        raise PydanticCustomError("token_id", "Token ids must not be negative nor outside the vocabulary")
    return ids


def _bounded(items: list[Any], limit: int) -> list[Any]:
    if len(items) > limit:
        raise PydanticCustomError("too_long", "A list must not have more than {limit} items", {"limit": limit})
    return items


def _mismatch() -> PydanticCustomError:
    return PydanticCustomError(
        "prompt", "Input should be a text, a list of texts, a list of token ids, or a list of lists of token ids"
    )


INPUT_TYPE = str | list[str] | list[int] | list[list[int]]
Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts, json_schema_input_type=INPUT_TYPE)]
