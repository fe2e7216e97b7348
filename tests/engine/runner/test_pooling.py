"""A prompt's embedding is Hugging Face's last hidden state as a unit vector, and the same in every batch."""

import random
from collections.abc import Callable

import pytest
import torch

from engine.core.errors import InvalidParameterError
from engine.core.request import FinishReason
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.runner.loaded_model import LoadedModel
from engine.runner.pooling import embedding_bytes
from tests.engine.fakes import add, run_to_end
from tests.engine.tiny_models import VOCAB_SIZE, ReferenceModel, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [random.Random(4).randrange(VOCAB_SIZE) for _ in range(37)]


def add_mine(engine: Engine) -> None:
    add(engine, "mine", PROMPT, max_tokens=0, returns_embedding=True)


def embed(engine: Engine) -> bytes:
    add_mine(engine)
    [update] = run_to_end(engine)["mine"]
    assert not update.token_ids and update.finish_reason is FinishReason.LENGTH
    return update.embedding


def vector(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "mixtral", "cohere", "deepseek_v3"])
def test_it_is_the_last_hidden_state_of_the_last_token(
    architecture: str, tiny_model: Callable[..., LoadedModel], reference_model: Callable[[str], ReferenceModel]
) -> None:
    hidden = reference_model(architecture).last_hidden_state(PROMPT)[-1]
    mine = vector(embed(tiny_engine(tiny_model(architecture))))
    torch.testing.assert_close(mine, torch.nn.functional.normalize(hidden, dim=0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_does_not_depend_on_batch_chunks_or_cache(dtype: str, tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("llama", dtype)
    alone = embed(tiny_engine(model))
    assert embed(tiny_engine(model, max_num_batched_tokens=5)) == alone
    engine = tiny_engine(model, block_size=4)
    for index in range(8):
        add(engine, str(index), PROMPT[index:], max_tokens=9, prompt_logprobs=1 if index % 2 else None)
    assert embed(engine) == alone  # in one batch with rows that score prompts
    assert embed(engine) == alone  # from cached blocks


def test_others_get_none(tiny_model: Callable[..., LoadedModel]) -> None:
    engine = tiny_engine(tiny_model("llama"))
    add(engine, "other", PROMPT, max_tokens=2)
    add_mine(engine)
    updates = run_to_end(engine)
    assert all(update.embedding == b"" for update in updates["other"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_unit_length(dtype: torch.dtype) -> None:
    lengths = [vector(embedding_bytes((scale * torch.randn(64)).to(dtype))).norm() for scale in (1e-3, 1.0, 1e3)]
    torch.testing.assert_close(torch.stack(lengths), torch.ones(3))


def test_a_state_of_zeros_gives_zeros() -> None:
    assert embedding_bytes(torch.zeros(8)) == bytes(32)


def test_an_embedding_and_tokens_exclude_each_other() -> None:
    with pytest.raises(InvalidParameterError):
        SamplingParams(max_tokens=1, returns_embedding=True)
