"""/v1/cache: what is cached of requests that ended, by their cache keys. An API key sees and drops its own only."""

from fastapi import APIRouter
from starlette.requests import Request

from engine.client.interface import EngineClient
from engine.core.cache_steering import CachedPrefixes
from server.core.errors import NotReadyError
from server.protocol.cache_keys import CacheDeletion, CacheKey, CacheKeyList
from server.routes.documented import error_responses
from server.runtime.context import context_of, tenant_of

MAX_KEYS = 1000

router = APIRouter(tags=["Operations"])


@router.get("/v1/cache", responses=error_responses(401, 503))
async def list_cache_keys(request: Request, prompt_cache_key: str | None = None) -> CacheKeyList:
    """List what is cached of ended requests that were sent with this API key, the newest first: at most 1000 keys. With
    `prompt_cache_key` that key alone; an empty one is that of requests without."""
    cached = await _engine_of(request).cached_prefixes(tenant_of(request).name)
    wanted = [each for each in cached if prompt_cache_key in (None, each.key)]
    newest = sorted(wanted, key=lambda each: each.idle_s)
    return CacheKeyList(data=list(map(_entry, newest[:MAX_KEYS])), has_more=len(newest) > MAX_KEYS)


@router.delete("/v1/cache", responses=error_responses(401, 503))
async def drop_cache_keys(request: Request, prompt_cache_key: str | None = None) -> CacheDeletion:
    """Drop what is cached under this `prompt_cache_key`, or under all keys, of this API key: in memory and in the KV
    store, but neither what was used under other keys, too, nor what was computed before the engine last started.
    Requests that run go on."""
    _engine_of(request).drop_prefixes(tenant_of(request).name, prompt_cache_key)
    return CacheDeletion(prompt_cache_key=prompt_cache_key)


def _engine_of(request: Request) -> EngineClient:
    engine = context_of(request).backend.engine
    if not engine.is_ready:
        raise NotReadyError("No engine is up whose prefix cache could be asked for.")
    return engine


def _entry(cached: CachedPrefixes) -> CacheKey:
    return CacheKey(
        prompt_cache_key=cached.key or None,
        tokens=cached.num_tokens,
        memory_tokens=cached.num_memory_tokens,
        disk_tokens=cached.num_stored_tokens,
        retained_tokens=cached.num_retained_tokens,
        idle_ms=round(cached.idle_s * 1e3, 3),
        retained_ms=round(cached.retained_s * 1e3, 3),
    )
