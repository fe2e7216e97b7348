"""`twostep plan`: what a model will take on this machine, before its weights are loaded or even there."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.config import EngineConfig
from engine.core.kv_groups import KVGroups
from engine.core.machine import Ceilings, ModelSize
from engine.core.sampling_params import SamplingParams
from engine.scheduling.cost.roofline import Roofline
from twostep.commands.arguments import CommandParser

if TYPE_CHECKING:
    from engine.model.planning.estimate import Estimate
    from engine.model.planning.layer_trial import StepSeconds

__all__ = ["Plan", "lines_of", "main", "parser"]

_DESCRIPTION = """\
Tell what a model takes on this machine's CPU: memory, contexts, and the shortest possible times to a first token (TTFT)
and between tokens (ITL). It reads config.json and no weights, and measures the machine for most of a second. Times are
bounds by the machine's memory and arithmetic: what is served takes longer, and on a busy machine much longer. With
--measure they are predictions instead: a few of the model's layers run here with random weights, which takes a minute
or two for a large model, and memory for its head twice and a GiB of layers."""
_EXAMPLES = """\
  twostep plan Qwen/Qwen2.5-0.5B-Instruct
  twostep plan ./my-model --prompt-tokens 2000
  twostep plan ./my-model --measure --quantization int8"""
_CLIENTS = (1, 8, 32)
_BITS = {"none": 16.0, "int8": 8.5, "int4": 4.5}
"""Bits of a number in layers, with its share of a group's scale and minimum. Heads have 8 at least."""
_KV_SHARE, _MAX_KV_BYTES = 0.5, 4 << 30  # as the engine sizes its cache by default
_GIB = 2**30
_ENGINE = EngineConfig(model="")
"""An engine's settings as they are by default."""


class Plan(NamedTuple):
    """The facts of a plan."""

    architecture: str
    num_weights: int
    size: ModelSize
    """Of weights in 16 bits."""
    kv_groups: KVGroups
    kv_block_bytes: int
    max_model_len: int
    ceilings: Ceilings
    available_bytes: int
    load_per_cpu: float
    """Processes that want to run, for each CPU: where there are some, the machine was measured too slow."""
    prompt_tokens: int
    quantizations: tuple[str, ...]
    measure: "Callable[[str], StepSeconds] | None"
    """Predicts what steps take with weights of such a form; None where their bounds are told alone."""


def parser() -> CommandParser:
    made = CommandParser("plan", _DESCRIPTION, _EXAMPLES)
    made.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id")
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    made.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="length of prompts (default: 512)")
    made.add_argument("--quantization", choices=[*_BITS], help="only weights of this form (default: of each)")
    made.add_argument("--measure", action="store_true", help="run a few layers, and predict times instead of bounds")
    return made


def main(arguments: Sequence[str]) -> int:
    """Prints the plan. Raises ModelError."""
    own = parser()
    parsed = own.parse(arguments)
    if parsed.prompt_tokens < 1:
        own.error("--prompt-tokens must be at least 1")
    import torch

    from engine.host.available_memory import available_bytes
    from engine.model.machine_ceilings import measure_ceilings
    from engine.model.planning.estimate import estimate
    from server.settings.settings import EMBEDDED_MODEL, EMBEDDED_MODEL_DIR

    model = str(EMBEDDED_MODEL_DIR) if parsed.model == EMBEDDED_MODEL else parsed.model
    found = estimate(model, parsed.revision)
    if parsed.prompt_tokens >= found.max_model_len:
        own.error(f"--prompt-tokens must be less than the model's context of {found.max_model_len:,} tokens")
    cpu = torch.device("cpu")
    ceilings = measure_ceilings(cpu, torch.bfloat16, found.size.weight_bytes)
    facts = (found.architecture, found.num_weights, found.size, found.kv_groups, found.kv_block_bytes)
    load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    measure = _trial(model, parsed.revision, found, parsed.prompt_tokens) if parsed.measure else None
    quantizations = (parsed.quantization,) if parsed.quantization else tuple(_BITS)
    plan = Plan(
        *facts, found.max_model_len, ceilings, available_bytes(cpu), load, parsed.prompt_tokens, quantizations, measure
    )
    for line in lines_of(plan):
        print(line, flush=True)
    return 0


def _trial(model: str, revision: str | None, found: "Estimate", prompt_tokens: int) -> "Callable[[str], StepSeconds]":
    """Returns what predicts the times of steps, with a sentence beforehand for who waits at a terminal."""
    from engine.model.planning.layer_trial import predict_steps

    logging.getLogger("engine").setLevel(logging.ERROR)  # the weights are random: it is told here

    def measure(quantization: str) -> "StepSeconds":
        if sys.stderr.isatty():
            print("  running some layers with random weights ...", end="\r", file=sys.stderr, flush=True)
        config = EngineConfig(model=model, revision=revision, quantization=quantization)
        return predict_steps(config, found, prompt_tokens, _CLIENTS)

    return measure


def lines_of(plan: Plan) -> Iterator[str]:
    """Yields the lines of a plan."""
    yield f"model     {plan.architecture}, {plan.num_weights / 1e9:,.2f} B numbers, context {plan.max_model_len:,}"
    yield f"memory    {plan.available_bytes / _GIB:,.1f} GiB available"
    read, flops = plan.ceilings.read_bytes_per_s / 1e9, plan.ceilings.flops_per_s / 1e9
    yield f"machine   reads {read:,.1f} GB/s, multiplies {flops:,.0f} GFLOP/s ({plan.ceilings.dtype})"
    if plan.load_per_cpu > 0.5:
        yield "          busy with other programs now: this is too slow, and times below are too long"
    fitting = []
    for quantization in plan.quantizations:
        weight_bytes = bytes_of_weights(plan.size, plan.num_weights, quantization)
        left = plan.available_bytes - weight_bytes
        yield f"\n--quantization {quantization}: weights of {weight_bytes / _GIB:,.2f} GiB"
        if left <= 0:
            yield "  do not fit into the memory that is available"
            continue
        fitting.append(quantization)
        yield from _contexts(plan, left)
        yield from _times(plan, quantization)
    yield "\n" + _advice(fitting)


def _contexts(plan: Plan, left: float) -> Iterator[str]:
    kv_bytes = min(left * _KV_SHARE, _MAX_KV_BYTES)
    num_blocks, groups = int(kv_bytes / plan.kv_block_bytes), plan.kv_groups
    length, sizes = plan.prompt_tokens + 256, (_ENGINE.block_size, _ENGINE.limits_on("cpu").max_num_batched_tokens)
    longest = groups.max_tokens(num_blocks, *sizes, plan.max_model_len)
    num_fit = num_blocks // groups.num_blocks(length, *sizes)
    yield f"  KV cache of {kv_bytes / _GIB:,.2f} GiB: {num_fit:,} requests of {length:,} tokens"
    if longest < plan.max_model_len:
        yield f"  contexts are then at most {longest:,} tokens: --kv-cache-memory-bytes gives more"


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


def _times(plan: Plan, quantization: str) -> Iterator[str]:
    """Yields a line for each number of clients, with weights of this form."""
    roofline = Roofline(quantized(plan.size, quantization), plan.ceilings)
    predicted = plan.measure(quantization) if plan.measure else None
    for index, clients in enumerate(_CLIENTS):
        prefill = clients * roofline.floor_of(_batch(Phase.PREFILL, 1, 0, plan.prompt_tokens)).seconds
        decode, bound = roofline.floor_of(_batch(Phase.DECODE, clients, plan.prompt_tokens, 1))
        best, most = " at best", " at most"
        if predicted is not None:
            prefill = predicted.prompt_s if clients == 1 else clients * predicted.prompts_s
            decode, best, most = predicted.decode_s[index], "", ""
        yield (
            f"  {clients:2} at once: TTFT {prefill:,.2f} s{best} for the last of them, "
            f"ITL {decode * 1e3:,.1f} ms ({bound}), {clients / decode:,.0f} tokens/s{most}"
        )


def _batch(phase: Phase, num_requests: int, start: int, count: int) -> Batch:
    request = ScheduledRequest("", [0] * count, start, (), SamplingParams(), [0], [], True)
    return Batch(phase, (request,) * num_requests)


def _advice(fitting: Sequence[str]) -> str:
    if not fitting:
        return "It does not fit in any form: take a smaller model, or a machine with more memory."
    chosen = "" if fitting[0] == "none" else f" --quantization {fitting[0]}"
    return f"twostep serve MODEL{chosen}"
