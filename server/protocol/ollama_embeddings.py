"""Ollama's API: the bodies of /api/embed and, its older form, /api/embeddings, and their answers."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainValidator

from server.protocol.answers import Timings
from server.protocol.ollama import OllamaOptions
from server.protocol.prompts import INPUT_TYPE, Prompt, parse_prompts
from server.protocol.request import RequestFields
from server.protocol.wire import Int32, Text

__all__ = ["EmbedAnswer", "EmbedRequest", "OlderEmbedAnswer", "OlderEmbedRequest", "OllamaEmbedding"]


class OllamaEmbedding(RequestFields):
    """What both share."""

    options: OllamaOptions = Field(OllamaOptions(), description="No effect: vectors are computed, not sampled.")
    keep_alive: Any = Field(None, description="No effect: the model stays loaded.")


def _parse_inputs(value: Any) -> list[Prompt]:
    return [] if value in ("", []) else parse_prompts(value)


class EmbedRequest(OllamaEmbedding):
    input: Annotated[list[Prompt], PlainValidator(_parse_inputs, json_schema_input_type=INPUT_TYPE)] = Field(
        [], description="Without any, nothing is computed: the model is loaded."
    )
    truncate: bool = Field(True, description="Whether the end of an input that exceeds the context is left out.")
    dimensions: Int32 | None = Field(None, description="Only the model's own, which is the default.")


class OlderEmbedRequest(OllamaEmbedding):
    prompt: Text = Field("", description="Without any, nothing is computed: the model is loaded.")


class EmbedAnswer(BaseModel):
    model: str
    embeddings: list[list[float]]
    total_duration: int | None = None
    load_duration: int | None = None
    """Until the first input was scheduled."""
    prompt_eval_count: int | None = None
    timings: Timings | None = None
    """Null where there was no input."""


class OlderEmbedAnswer(BaseModel):
    embedding: list[float]
