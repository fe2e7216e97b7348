"""`twostep plan`: what a model will take on this machine, before its weights are loaded or even there."""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.machine import Ceilings, ModelSize
from engine.core.sampling_params import SamplingParams
from engine.scheduling.cost.roofline import Roofline
from twostep.commands.arguments import CommandParser

__all__ = ["Plan", "lines_of", "main", "parser"]

_DESCRIPTION = """\
Tell what a model takes on this machine's CPU: memory, contexts, and the shortest possible times to a first token (TTFT)
and between tokens (ITL). It reads config.json and no weights, and measures the machine for most of a second. Times are
bounds by the machine's memory and arithmetic: what is served takes longer, and on a busy machine much longer."""
_EXAMPLES = """\
  twostep plan Qwen/Qwen2.5-0.5B-Instruct
  twostep plan ./my-model --prompt-tokens 2000"""
_CLIENTS = (1, 8, 32)
_BITS = {"none": 16.0, "int8": 8.5, "int4": 4.5}
"""Bits of a number in layers, with its share of a group's scale and minimum. Heads have 8 at least."""
_KV_SHARE, _MAX_KV_BYTES = 0.5, 4 << 30  # as the engine sizes its cache by default
_GIB = 2**30


class Plan(NamedTuple):
    """The facts of a plan."""

    architecture: str
    num_weights: int
    size: ModelSize
    """Of weights in 16 bits."""
    kv_bytes_per_token: int
    max_model_len: int
    ceilings: Ceilings
    available_bytes: int
    load_per_cpu: float
    """Processes that want to run, for each CPU: where there are some, the machine was measured too slow."""
    prompt_tokens: int


def parser() -> CommandParser:
    made = CommandParser("plan", _DESCRIPTION, _EXAMPLES)
    made.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id")
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    made.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="length of prompts (default: 512)")
    return made


def main(arguments: Sequence[str]) -> int:
    """Prints the plan. Raises ModelError."""
    own = parser()
    parsed = own.parse(arguments)
    if parsed.prompt_tokens < 1:
        own.error("--prompt-tokens must be at least 1")
    import torch

    from engine.host.available_memory import available_bytes
    from engine.model.estimate import estimate
    from engine.model.machine_ceilings import measure_ceilings
    from server.settings.settings import EMBEDDED_MODEL, EMBEDDED_MODEL_DIR

    found = estimate(str(EMBEDDED_MODEL_DIR) if parsed.model == EMBEDDED_MODEL else parsed.model, parsed.revision)
    cpu = torch.device("cpu")
    ceilings = measure_ceilings(cpu, torch.bfloat16, found.size.weight_bytes)
    facts = (found.architecture, found.num_weights, found.size, found.kv_bytes_per_token, found.max_model_len)
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    print("\n".join(lines_of(Plan(*facts, ceilings, available_bytes(cpu), load, parsed.prompt_tokens))))
    return 0


def lines_of(plan: Plan) -> Iterator[str]:
    """Yields the lines of a plan."""
    yield f"model     {plan.architecture}, {plan.num_weights / 1e9:,.2f} B numbers, context {plan.max_model_len:,}"
    yield f"memory    {plan.available_bytes / _GIB:,.1f} GiB available"
    read, flops = plan.ceilings.read_bytes_per_s / 1e9, plan.ceilings.flops_per_s / 1e9
    yield f"machine   reads {read:,.1f} GB/s, multiplies {flops:,.0f} GFLOP/s ({plan.ceilings.dtype})"
    if plan.load_per_cpu > 0.5:
        yield "          busy with other programs now: this is too slow, and times below are too long"
    fitting = []
    for quantization in _BITS:
        weight_bytes = bytes_of_weights(plan.size, plan.num_weights, quantization)
        left = plan.available_bytes - weight_bytes
        yield f"\n--quantization {quantization}: weights of {weight_bytes / _GIB:,.2f} GiB"
        if left <= 0:
            yield "  do not fit into the memory that is available"
            continue
        fitting.append(quantization)
        yield from _contexts(plan, left)
        yield from _times(plan, quantized(plan.size, quantization))
    yield "\n" + _advice(fitting)


def _contexts(plan: Plan, left: float) -> Iterator[str]:
    kv_bytes = min(left * _KV_SHARE, _MAX_KV_BYTES)
    num_tokens = int(kv_bytes / plan.kv_bytes_per_token)
    length = plan.prompt_tokens + 256
    fit = f"{num_tokens // length:,} requests of {length:,}"
    yield f"  KV cache of {kv_bytes / _GIB:,.2f} GiB: {num_tokens:,} tokens, {fit}"
    if num_tokens < plan.max_model_len:
        yield f"  contexts are then at most {num_tokens:,} tokens: --kv-cache-memory-bytes gives more"


def quantized(size: ModelSize, quantization: str) -> ModelSize:
    """Returns the size with these bits, of one in 16."""
    share, head = _BITS[quantization] / 16, min(1.0, max(_BITS[quantization], _BITS["int8"]) / 16)
    return msgspec.structs.replace(
        size,
        layer_bytes=int(size.layer_bytes * share),
        expert_bytes=int(size.expert_bytes * share),
        head_bytes=int(size.head_bytes * head),
    )


def bytes_of_weights(size: ModelSize, num_weights: int, quantization: str) -> int:
    """Returns the memory of all weights. Embeddings stay in 16 bits; those that are the head's, too, are kept beside it
    where it has fewer."""
    others = 2 * num_weights - size.weight_bytes
    is_tied = others < size.head_bytes / 2
    if is_tied and quantization != "none":
        others += size.head_bytes
    return quantized(size, quantization).weight_bytes + others


def _times(plan: Plan, size: ModelSize) -> Iterator[str]:
    """Yields a line for each number of clients, with weights of this size."""
    roofline = Roofline(size, plan.ceilings)
    for clients in _CLIENTS:
        prefill = roofline.floor_of(_batch(Phase.PREFILL, 1, 0, plan.prompt_tokens)).seconds
        decode = roofline.floor_of(_batch(Phase.DECODE, clients, plan.prompt_tokens, 1))
        yield (
            f"  {clients:2} at once: TTFT {clients * prefill:,.2f} s at best for the last of them, "
            f"ITL {decode.seconds * 1e3:,.1f} ms ({decode.bound}), {clients / decode.seconds:,.0f} tokens/s at most"
        )


def _batch(phase: Phase, num_requests: int, start: int, count: int) -> Batch:
    request = ScheduledRequest("", [0] * count, start, (), SamplingParams(), [0], [], True)
    return Batch(phase, (request,) * num_requests)


def _advice(fitting: Sequence[str]) -> str:
    if not fitting:
        return "It does not fit in any form: take a smaller model, or a machine with more memory."
    chosen = "" if fitting[0] == "none" else f" --quantization {fitting[0]}"
    return f"twostep serve MODEL{chosen}"
