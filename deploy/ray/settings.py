"""What an application on Ray Serve can be told."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class ClusterSettings(BaseModel):
    """Arguments of `deploy.ray:app`."""

    model_config = ConfigDict(extra="forbid")

    arguments: list[str] = Field([], description="Arguments of `twostep serve` on each replica: a model, and flags.")
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 4
    min_prefill_replicas: PositiveInt = 1
    max_prefill_replicas: NonNegativeInt = Field(
        0, description="Replicas beside the others that compute long prompts for them; 0: all do all."
    )
    gateway_url: str = Field("http://127.0.0.1:8000", description="Where replicas find a gateway, to ask for prompts.")
    num_gateways: PositiveInt = 1
    num_cpus: float = Field(1, ge=0, description="CPUs that Ray keeps for each replica.")
    num_gpus: float = Field(0, ge=0)
    routing: Literal["prefix-aware", "least-loaded", "round-robin", "random"] = "prefix-aware"
    routing_record: str = Field("", description="Directory for records of all decisions, which the simulator replays.")
    waiting_tokens_per_replica: PositiveInt = Field(
        8192, description="Prompt tokens that may wait before one is added."
    )
    sequences_per_replica: PositiveInt = Field(64, description="Sequences that one runs before another is added.")
    max_ongoing_requests: PositiveInt = Field(4096, description="Of one replica; the server refuses before by its own.")
    max_body_bytes: PositiveInt = Field(8 << 20, description="As the server's --max-body-bytes.")
    replica_wait_s: PositiveFloat = Field(
        120.0, description="Seconds that a request waits for a replica, and a stream whose replica died for another."
    )
    report_s: PositiveFloat = Field(1.0, description="Seconds between two reports of a replica's load.")
    look_back_s: PositiveFloat = Field(30.0, description="Seconds of reports whose mean decides on scaling; over 10.")
    upscale_s: PositiveFloat = Field(10.0, description="Seconds that more replicas must be wanted for.")
    downscale_s: PositiveFloat = Field(120.0, description="Seconds that fewer replicas must be wanted for.")
    drain_s: PositiveFloat = Field(600.0, description="Seconds that a replica's streams have when it is taken away.")

    @model_validator(mode="after")
    def _what_prefill_needs(self) -> Self:
        if not self.max_prefill_replicas:
            return self
        if self.max_prefill_replicas < self.min_prefill_replicas:
            raise ValueError("max_prefill_replicas is less than min_prefill_replicas")
        if not any(each.partition("=")[0] == "--kv-store" for each in self.arguments):
            raise ValueError("prefill replicas need --kv-store DIR among the arguments: a directory that all share")
        return self
