"""A server whose model says what a client is tried with: `python -m tests.compat.scripted_model CLIENT`.

Small models do not choose the tools of agents. This one calls them by rule: its answer is that of the first reply whose
text is in the prompt.
"""

import asyncio
import functools
import sys

from msgspec.structs import replace

from engine.core.generation_request import GenerationRequest
from server.core.logs import configure_logging
from server.serve import serve
from server.settings.settings import Settings
from tests.compat.environments import CLIENTS, Reply
from tests.server.byte_tokenizer import EOS
from tests.server.conftest import AGENT_TEMPLATE
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.live_server import FakeBackend

MAX_MODEL_LEN = 2**20


def scripted_backend(replies: tuple[Reply, ...]) -> FakeBackend:
    """Returns a backend with a context that has room for an agent's prompt."""
    engine = FakeEngine(info=replace(INFO, max_model_len=MAX_MODEL_LEN))

    @functools.lru_cache(maxsize=64)
    def answer(prompt_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        prompt = engine.tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        text = next(reply.text for reply in replies if reply.when in prompt)
        return (*engine.tokenizer.encode(text, add_special_tokens=False), EOS)

    def rule(request: GenerationRequest, position: int) -> int:
        return answer(tuple(request.prompt_token_ids))[position]

    engine.rule = rule
    return FakeBackend(engine, chat_templates={"default": AGENT_TEMPLATE})


if __name__ == "__main__":
    configure_logging("warning")
    settings = Settings(
        port=0, served_model_name=["scripted", *CLIENTS[sys.argv[1]].models], max_waiting_tokens=MAX_MODEL_LEN
    )
    with asyncio.Runner() as runner:
        sys.exit(serve(settings, scripted_backend(CLIENTS[sys.argv[1]].replies).opener(settings), runner))
