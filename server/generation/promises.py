"""Promises (SLOs) that requests ask for in their headers: what no request can be promised here is refused."""

import math

from starlette.datastructures import Headers

from engine.core.config import EngineInfo
from engine.scheduling.cost.roofline import Roofline
from server.core.errors import BadRequestError
from server.core.promises import ITL_HEADER, NO_PROMISES, TTFT_HEADER, Promises


def promises_of(headers: Headers, info: EngineInfo, tokens_per_step: int) -> Promises:
    """Returns the promises of the headers. A step yields at most `tokens_per_step` tokens of a request. Raises
    BadRequestError for what is no time, and for one that is shorter than this machine ever takes, if that is known."""
    if TTFT_HEADER not in headers and ITL_HEADER not in headers:
        return NO_PROMISES
    floor_s = Roofline(info.size, info.ceilings).floor_of_first_token().seconds
    if info.ceilings.is_in_doubt:
        floor_s = 0.0
    return Promises(
        ttft_s=_seconds(headers, TTFT_HEADER, floor_s),
        itl_s=_seconds(headers, ITL_HEADER, floor_s / tokens_per_step),
    )


def _seconds(headers: Headers, name: str, floor_s: float) -> float | None:
    if name not in headers:
        return None
    try:
        limit_s = float(headers[name]) / 1e3
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise BadRequestError(f"The header {name} must be a number of milliseconds above 0.", name)
    if limit_s < floor_s:
        least_ms = f"{floor_s * 1e3:.2g} ms"
        raise BadRequestError(f"The header {name} cannot be met: this machine takes at least {least_ms}.", name)
    return limit_s
