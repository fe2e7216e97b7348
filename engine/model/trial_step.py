"""The largest steps that the settings allow, run on a CUDA device before the engine is ready.

They show that the model computes there at all, and how much memory a step takes beside weights and KV cache: the cache
must leave that much.
"""

from collections.abc import Callable, Iterator

import msgspec
import torch

from engine.attention import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.core.batch import Batch, Phase, ScheduledRequest, StepOutput
from engine.core.config import EngineConfig
from engine.core.errors import ModelMemoryError
from engine.core.sampling_params import SamplingParams
from engine.model.forward_choice import choose_forward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner

# What takes the most memory. Kernels are compiled when they are first launched: these are all that sample.
_SAMPLED = SamplingParams(max_tokens=1, temperature=0.7, top_k=99, top_p=0.9, logprobs=1)
_ADJUSTED = msgspec.structs.replace(_SAMPLED, presence_penalty=0.5, logit_bias={0: 1.0})


def bytes_of_a_step(config: EngineConfig, model: LoadedModel, max_model_len: int, backend: AttentionBackend) -> int:
    """Returns the most bytes of the CUDA device that steps take beside weights and KV cache: the largest one, and what
    recorded decode steps keep for themselves.

    Raises ModelMemoryError where a step takes more than there is.
    """
    torch.cuda.empty_cache()
    try:
        peaks = [_peak_of(step, model) for step in trial_steps(config, model, max_model_len, backend)]
    except torch.OutOfMemoryError as error:
        limits = config.limits_on(model.device.type)
        raise ModelMemoryError(
            f"A step of {limits.max_num_batched_tokens:,} tokens or {limits.max_num_seqs:,} sequences takes more "
            "memory than the device has left beside the weights: lower --max-num-batched-tokens or --max-num-seqs."
        ) from error
    torch.cuda.empty_cache()
    return max(peaks) + (0 if config.enforce_eager else peaks[-1])


def _peak_of(step: Callable[[], object], model: LoadedModel) -> int:
    """Returns the most bytes that are allocated while the step runs, beside those before it."""
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    step()
    return torch.cuda.max_memory_allocated(model.device) - before


def trial_steps(
    config: EngineConfig, model: LoadedModel, max_model_len: int, backend: AttentionBackend
) -> tuple[Callable[[], StepOutput], Callable[[], StepOutput]]:
    """Returns what computes the longest prompt chunk, and then a token of each of the most sequences, over a KV cache
    of their size."""
    limits = config.limits_on(model.device.type)
    num_tokens = min(limits.max_num_batched_tokens, max_model_len)
    num_blocks = max(-(-num_tokens // config.block_size), limits.max_num_seqs)
    cache = KVCache(model.layers, num_blocks, config.block_size, model.kv_dtype, model.device)
    runner = ModelRunner(model, cache, choose_forward(model.module, cache, backend))
    prompt = Batch(Phase.PREFILL, (_request("", [0] * num_tokens, range(num_blocks), _SAMPLED),))
    tokens = Batch(Phase.DECODE, tuple(_first_tokens(limits.max_num_seqs)))
    return lambda: runner.prefill(prompt), lambda: runner.decode(tokens)


def _first_tokens(count: int) -> Iterator[ScheduledRequest]:
    return (_request(str(block), [0], [block], _ADJUSTED) for block in range(count))


def _request(name: str, token_ids: list[int], blocks: range | list[int], params: SamplingParams) -> ScheduledRequest:
    return ScheduledRequest(name, token_ids, 0, tuple(blocks), params, token_ids, [], samples=True)
