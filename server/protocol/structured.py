"""`response_format` (OpenAI's) and `structured_outputs` (vLLM's): what the generated text must follow."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from engine.grammar.lark import JSON_OBJECT, JsonSchema, Lark, Part, Regex, choice
from server.protocol.wire import ClosedModel, JsonObject, Text

MAX_ALTERNATIVES = 8192
MAX_SCHEMA_CHARS = 2**20
"""Maximum length of a schema that is written as a string."""


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What the generated text must follow, and the request parameter that demands it."""

    param: str
    source: Part | Lark


class JsonSchemaFormat(ClosedModel):
    name: Text = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: Text | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool = Field(False, description="Makes no difference: the text always follows the schema.")


class ResponseFormat(ClosedModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _wrong("json_schema must be given with the type json_schema, and only then")
        return self

    @property
    def constraint(self) -> OutputConstraint | None:
        if self.json_schema is not None:
            return OutputConstraint("response_format", JsonSchema(self.json_schema.schema_))
        return OutputConstraint("response_format", JSON_OBJECT) if self.type == "json_object" else None


def _parsed(value: Any) -> Any:
    """Returns the schema, which clients send as an object or as a string that holds one."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SCHEMA_CHARS:
        raise _wrong(f"A string must not have more than {MAX_SCHEMA_CHARS} characters")
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise _wrong("Input should be a JSON schema, or a string that holds one") from error


class StructuredOutputs(ClosedModel):
    """A constraint on the generated text: exactly one of `json`, `regex`, `choice` and `grammar` must be given."""

    json_: Annotated[JsonObject, BeforeValidator(_parsed)] | None = Field(None, alias="json")
    regex: Text | None = Field(None, description="A regular expression that the whole text matches.")
    choice: list[Text] | None = Field(None, min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)
    grammar: Text | None = Field(None, description="A grammar in Lark's notation.")
    disable_additional_properties: bool = Field(
        True, description="Beside json: objects that do not say whether they may have other properties have none."
    )

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        if sum(value is not None for value in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise _wrong("Exactly one of json, regex, choice and grammar must be given")
        if not self.disable_additional_properties and self.json_ is None:
            raise _wrong("disable_additional_properties must be false beside json only")
        return self

    @property
    def constraint(self) -> OutputConstraint:
        return OutputConstraint("structured_outputs", self._source())

    def _source(self) -> Part | Lark:
        if self.json_ is not None:
            return JsonSchema(self.json_, is_open=not self.disable_additional_properties)
        if self.choice is not None:
            return choice(self.choice)
        return Lark(self.grammar) if self.grammar is not None else Regex(self.regex or "")


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("structured", message)
