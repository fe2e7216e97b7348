"""Types that all request bodies share: strict, no NaN, nulls count as absent, text that a tokenizer can take."""

import math
from functools import cache
from itertools import chain
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_STRINGS = 2048  # as many as OpenAI takes: its clients embed so many a call
MAX_TOKEN_IDS = 2**20
MAX_STOP_STRINGS = 64  # each is looked for in every character that is generated
MAX_STOP_LENGTH = 1024  # as much text may have to be held back
MAX_STOPS_LENGTH = 4096  # together: looking for them is prepared for each sequence
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_BAD_WORDS_LENGTH = 4096  # together: they are tokenized on the event loop, four times
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**14  # each step looks at them all, for each sequence
MAX_LOGIT_BIASES = 1024
MAX_RESUMED = 1024  # choices
MAX_SCHEMA_DEPTH = 64
MAX_FIELDS = 256
MAX_VALUES = 2**17
"""Maximum number of values in JSON that is passed on as it is: the event loop traverses and serializes all of it."""


class WireModel(BaseModel):
    """Base of all bodies. Strict: no "3" for 3, no true for 1, but 3.0 is the number 3. Explicit nulls count as absent,
    as in OpenAI's API."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_and_fractions(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise PydanticCustomError("too_long", "Must not have more than {limit} fields", {"limit": MAX_FIELDS})
        whole = _whole_fields(cls)
        return {name: as_whole(value) if name in whole else value for name, value in data.items() if value is not None}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describes fields that may be absent as nullable."""
        described = handler.resolve_ref_schema(handler(schema))
        required, properties = described.get("required", ()), described.get("properties", {})
        described["properties"] = {
            name: each if name in required else _nullable(each) for name, each in properties.items()
        }
        return described


class ClosedModel(WireModel):
    """Refuses fields that it does not define: in a small object they are mistakes, or options that would be ignored."""

    model_config = ConfigDict(extra="forbid")


@cache
def _whole_fields(model: type[BaseModel]) -> frozenset[str]:
    """Returns the names of the fields that are integers."""
    return frozenset(name for name, field in model.model_fields.items() if int in _alternatives(field.annotation))


def _alternatives(annotation: Any) -> set[Any]:
    """Returns the types of a union, without their metadata; a type that is none is the only one."""
    if isinstance(annotation, type) or not (args := get_args(annotation)):
        return {annotation}
    if hasattr(annotation, "__metadata__"):
        return _alternatives(args[0])
    return set().union(*map(_alternatives, args))


def as_whole(value: Any) -> Any:
    """Returns 3 for 3.0, which is the same number in JSON: some clients write every number so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_whole_items(value: Any) -> Any:
    if not isinstance(value, list) or float not in set(map(type, value)):
        return value
    return [as_whole(each) for each in value]


def _nullable(described: JsonSchemaValue) -> JsonSchemaValue:
    if {"type": "null"} in described.get("anyOf", ()):
        return described
    about = {name: value for name, value in described.items() if name in ("title", "description", "default")}
    rest = {name: value for name, value in described.items() if name not in about}
    return {"anyOf": [rest, {"type": "null"}], **about} if rest else described


def check_text(text: str) -> str:
    """Refuse what no tokenizer can be trusted with: null characters and lone surrogates (JSON can spell both)."""
    if "\0" in text:
        raise PydanticCustomError("null_character", "Text must not contain null characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "Text must not contain lone surrogates") from None
    return text


def check_size(value: Any) -> Any:
    """Refuses too many values before anything looks at each of them. A name and its value count as one."""
    level, num_values = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        num_values += sum(map(len, level))
        if num_values > MAX_VALUES:
            message = "Must not have more than {limit} values together"
            raise PydanticCustomError("too_long", message, {"limit": MAX_VALUES})
        level = list(chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level))
    return value


def check_serializable(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuse a schema that cannot be serialized: nested too deeply, or with text or numbers that JSON does not have."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [item for value in level for item in _items(value)]
        for item in level:
            _check_scalar(item)
        if not level:
            return schema
    raise PydanticCustomError("depth", "The schema is nested too deeply")


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def _check_scalar(value: Any) -> None:
    if isinstance(value, str):
        check_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("number", "The schema has a number that JSON has not")


def entries_at_most(limit: int) -> BeforeValidator:
    """Returns a validator that runs before each entry is validated: pydantic would describe the error of every one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "Must not have more than {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


def _characters_at_most(limit: int) -> AfterValidator:
    """Returns a validator that refuses strings with more than `limit` characters together."""

    def check(words: list[str]) -> list[str]:
        if sum(map(len, words)) > limit:
            message = "Must not have more than {limit} characters together"
            raise PydanticCustomError("too_long", message, {"limit": limit})
        return words

    return AfterValidator(check)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, str | list):
        return [value] if isinstance(value, str) else value
    raise PydanticCustomError("strings", "Input should be a string or a list of strings")


bounded_size = BeforeValidator(check_size)
JsonObject = Annotated[dict[str, Any], bounded_size]
Int32 = Annotated[int, Field(ge=-(2**31), le=MAX_INT32)]
Int64 = Annotated[int, Field(ge=-(2**63), le=MAX_INT64)]
Text = Annotated[str, AfterValidator(check_text)]
StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_LENGTH), AfterValidator(check_text)]],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    _characters_at_most(MAX_STOPS_LENGTH),
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
]
BadWords = Annotated[
    list[Annotated[str, Field(max_length=MAX_BAD_WORD_LENGTH), AfterValidator(check_text)]],
    Field(max_length=MAX_BAD_WORDS, fail_fast=True),
    _characters_at_most(MAX_BAD_WORDS_LENGTH),
]
LogitBias = Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES), entries_at_most(MAX_LOGIT_BIASES)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
_whole_items = BeforeValidator(as_whole_items)
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True), _whole_items]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True), _whole_items]
ResumeTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_RESUMED, fail_fast=True)]
AllowedTokenIds = Annotated[list[TokenId], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True), _whole_items]
