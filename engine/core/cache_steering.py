"""What requests ask of the prefix cache, and what the cache holds for those who asked; plain values."""

import msgspec


class CacheSteering(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request asks of the prefix cache for the blocks that it uses. It changes no answer."""

    key: str = ""
    """Name, of the tenant's choosing, under which the blocks are counted and dropped."""
    retain_s: float = 0.0
    """Seconds after the request's end in which its prompt's blocks make room after those that nobody retains."""
    stays_in_memory: bool = False
    """Whether blocks that it computes are not written to the KV store."""


class CachedPrefixes(msgspec.Struct, frozen=True):
    """What is cached of the ended requests of one tenant and key. Tokens are those of full blocks, which all layers
    have: where some give back what is before their windows, a prefix may be found of which less is told here."""

    key: str
    num_tokens: int
    """Tokens that are in memory or in the KV store."""
    num_memory_tokens: int
    num_stored_tokens: int
    num_retained_tokens: int
    """The part of `num_memory_tokens` that is retained."""
    idle_s: float
    """Seconds since the last of these requests ended."""
    retained_s: float
    """Seconds for which the longest retained of them is retained yet; 0 if none is."""
