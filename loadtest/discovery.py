"""Requests to a server before the load: whether it is ready, and which model it serves."""

import asyncio
from collections.abc import Callable, Mapping

import httpx

from loadtest.collector import error_message
from loadtest.config import API_KEY_VARIABLES
from loadtest.errors import Unreachable
from loadtest.target import Target, resolve

_POLL_S = 0.25
_KEY_HINT = f"--api-key KEY, or {' or '.join(API_KEY_VARIABLES)} in the environment"
_PROBES = ("/ready", "/health", "/v1/models")  # the first that the server has decides


def http_client(target: Target, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """Returns a client for requests outside the measured window. It ignores proxies of the environment, as the hot path
    does."""
    verify = target.tls or False  # without TLS no certificates are loaded, which takes 0.1 s
    return httpx.AsyncClient(base_url=target.url, headers=dict(headers), timeout=10.0, trust_env=False, verify=verify)


async def find(target: Target, headers: Mapping[str, str], wait_s: float) -> Target:
    """Returns the target, resolved and ready; raises Unreachable if it is not within `wait_s`. With `wait_s` 0 it is
    only resolved."""
    if not wait_s:
        try:
            return await resolve(target)
        except Unreachable as error:
            raise Unreachable(f"{error}. Is the server running? (--wait 60 waits for it)") from None
    reasons = ["no answer"]
    try:
        async with asyncio.timeout(wait_s):
            return await _when_ready(target, headers, reasons.append)
    except TimeoutError:
        raise Unreachable(f"{target.url} is not ready after {wait_s:g} s: {reasons[-1]}") from None


async def _when_ready(target: Target, headers: Mapping[str, str], report: Callable[[str], None]) -> Target:
    """Waits for the target and returns it resolved; calls `report` with the reason each time that it is not ready."""
    while True:
        try:
            found = await resolve(target)
            async with http_client(found, headers) as client:
                reason = await _why_not_ready(client)
            if not reason:
                return found
            report(reason)
        except Unreachable as error:
            report(str(error))
        await asyncio.sleep(_POLL_S)


async def _why_not_ready(client: httpx.AsyncClient) -> str:
    """Returns why the server is not ready; an empty string if it is."""
    for path in _PROBES:
        try:
            response = await client.get(path)
        except httpx.HTTPError as error:
            return f"{path}: {_describe(error)}"
        if response.status_code not in (404, 405, 501):
            return "" if response.is_success else f"{path} answers {response.status_code}"
    return f"none of {', '.join(_PROBES)} exists"


async def first_model(client: httpx.AsyncClient) -> str:
    """Returns the id of the first model that the server lists; raises Unreachable if it lists none."""
    where = f"{client.base_url}".rstrip("/") + "/v1/models"
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise Unreachable(f"GET {where} failed: {_describe(error)}") from None
    try:
        body = response.json()
    except ValueError:
        body = response.text
    if not response.is_success:
        hint = _KEY_HINT if response.status_code == 401 else "--model skips this"
        raise Unreachable(f"GET {where} answers {response.status_code}: {error_message(body)} ({hint})")
    try:
        return str(body["data"][0]["id"])
    except (LookupError, TypeError):
        raise Unreachable(f"GET {where} lists no model (--model names one)") from None


def _describe(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
