"""Request models of POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter, as vLLM has them."""

from typing import Literal

from pydantic import Field

from server.protocol.wire import ClosedModel, Text


class LoadAdapterRequest(ClosedModel):
    lora_name: Text = Field(min_length=1, max_length=256, description="What clients are to call it, as a model.")
    lora_path: Text = Field(min_length=1, max_length=4096, description="Its directory, on the server.")
    load_inplace: Literal[False] = Field(False, description="To replace an adapter, unload it first.")


class UnloadAdapterRequest(ClosedModel):
    lora_name: Text
