"""What a session of an agent finds in the prefix cache, through the whole program: nearly all of each prompt."""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
import transformers

from tests.agent_session import NUM_TURNS, Session, chat_requests, messages_requests
from tests.server.conftest import AGENT_TEMPLATE
from tests.soak.server import ROOT, ServerProcess, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EMBEDDED_MODEL = ROOT / "engine" / "embedded_model"
LEAST_SHARE = 0.97


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a tiny model that has a long context, the embedded model's tokenizer and an agent's template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=json.loads((EMBEDDED_MODEL / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2**15,
        eos_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, folder)
    (folder / "chat_template.jinja").write_text(AGENT_TEMPLATE)
    with running_server(str(folder), "--max-num-seqs", "4", "--num-gpu-blocks-override", "2048") as process:
        yield process


def of_chat(server: ServerProcess, body: dict[str, Any]) -> tuple[int, int]:
    """Returns how many tokens a prompt has, and how many of them were found in the cache."""
    body |= {"max_tokens": 4, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    usage = json.loads(response.text.split("data: ")[-2])["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def of_messages(server: ServerProcess, body: dict[str, Any]) -> tuple[int, int]:
    response = httpx.post(f"{server.url}/v1/messages", json=body | {"max_tokens": 4}, timeout=120)
    assert response.status_code == 200, response.text
    start = next(line for line in response.text.splitlines() if '"message_start"' in line and line[:5] == "data:")
    usage = json.loads(start.removeprefix("data: "))["message"]["usage"]
    cached, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + created + cached, cached


@pytest.mark.parametrize(("requests", "ask"), [(chat_requests, of_chat), (messages_requests, of_messages)])
def test_an_agents_prompts_are_found_in_the_cache(
    server: ServerProcess, requests: Callable[[Session], list[dict[str, Any]]], ask: Any, record_property: Any
) -> None:
    prompts = [ask(server, body) for body in requests(Session.recorded())]
    assert len(prompts) == NUM_TURNS and prompts[0][0] > 12_000
    num_tokens, num_cached = (sum(counts) for counts in zip(*prompts[1:], strict=True))
    record_property("share", num_cached / num_tokens)
    print(f"{prompts[0][0]} tokens at first, {prompts[-1][0]} at last; found {num_cached / num_tokens:.2%}")
    assert num_cached / num_tokens >= LEAST_SHARE
