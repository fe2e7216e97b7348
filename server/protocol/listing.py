"""Response models of GET /v1/models: each is what OpenAI's clients read, and what Anthropic's do."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: datetime
    owned_by: str = "twostep"
    root: str
    """The directory of the model or adapter, or the model's name on the hub, whatever name it is served under."""
    parent: str | None = None
    """Name of the model that an adapter changes."""
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
