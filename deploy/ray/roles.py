"""What servers of replicas are told beside the application's arguments: which phases they have, and whom they ask."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

PREFILL_PATH = "/v1/prefill"


@dataclass(frozen=True, slots=True)
class Role:
    """Flags and environment of a replica's server."""

    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    keys_file: str = ""
    """Content of the file for --api-keys-file that takes the place of the application's; empty if none does."""

    @classmethod
    def decode(cls, gateway_url: str, prefill_key: str) -> Self:
        """Returns the role of servers that have long prompts computed by those behind the gateway."""
        flags = ("--role", "decode", "--prefill-url", gateway_url)
        return cls(flags, {"TWOSTEP_PREFILL_API_KEY": prefill_key})

    @classmethod
    def prefill(cls, prefill_key: str) -> Self:
        """Returns the role of servers that compute prompts for whoever has the key: it may name any tenant, so it is
        not among the application's keys, and no application's key will do."""
        digest = hashlib.sha256(prefill_key.encode()).hexdigest()
        return cls(("--role", "prefill"), keys_file=f"gateway:\n  sha256: {digest}\n")
