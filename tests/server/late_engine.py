"""An engine that is late with one of two sequences, and the outputs of both."""

import asyncio
from collections.abc import AsyncGenerator

from engine.core.errors import DeadlineError, RequestTimeoutError, TwostepError
from engine.core.generation_request import GenerationRequest
from engine.core.outputs import RequestOutput
from engine.core.sampling_params import SamplingParams
from server.generation.fan_out import generate_all
from tests.server.fake_engine import FakeEngine


class LateEngine(FakeEngine):
    """Of two sequences, one gets tokens; once it has begun, the other one's limit passes before its first token."""

    late_is_sibling = True
    end: TwostepError | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        if request.is_sibling == self.late_is_sibling:
            while self.num_holding == 0:
                await asyncio.sleep(0.001)
            patience_s, left_s = 0.4, request.left_s
            await asyncio.sleep(min(left_s or 0.0, patience_s) * 0.99)  # timers may fire early, by what they round
            self.hold_at = None  # without an await before the error: the other sequence goes on after it
            is_deadline = left_s is not None and left_s < patience_s
            raise self.end or (DeadlineError if is_deadline else RequestTimeoutError)("Late.")
        async for output in super().generate(request):
            yield output


def outputs_of(
    engine: FakeEngine, last_max_tokens: int = 3, deadline_s: float | None = 0.0
) -> list[tuple[int, RequestOutput]]:
    async def collect() -> list[tuple[int, RequestOutput]]:
        params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=last_max_tokens)]
        requests = [
            GenerationRequest(prompt_token_ids=[1, 2], params=each, arrival_s=0.0, deadline_s=deadline_s)
            for each in params
        ]
        return [output async for output in generate_all(engine, requests)]

    return asyncio.run(collect())
