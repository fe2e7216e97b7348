"""`twostep plan`: what a model will take on this machine, before its weights are loaded or even there."""

import argparse
import functools
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
from engine.core.step_seconds import StepSeconds
from engine.scheduling.cost.roofline import Roofline
from twostep.commands.arguments import CommandParser
from twostep.commands.burst import Burst, BurstTimes, ServingSeconds, simulated
from twostep.commands.measured_burst import EMBEDDED_PROMPT_TOKENS, serving_seconds

if TYPE_CHECKING:
    from engine.model.planning.estimate import Estimate

__all__ = ["CLIENTS", "Plan", "lines_of", "main", "parser", "predictions"]

_DESCRIPTION = """\
Tell what a model takes on this machine's CPU: memory, contexts, and the shortest possible times to a first token (TTFT)
and between tokens (ITL). It reads config.json and no weights, and measures the machine for most of a second. Times are
bounds by the machine's memory and arithmetic: what is served takes longer, and on a busy machine much longer. With
--measure they are predictions instead, for requests that arrive at once: a few of the model's layers run here with
random weights, which takes a minute or two for a large model, and memory for its head twice and a GiB of layers.
Nothing is told of GPUs."""
_EXAMPLES = """\
  twostep plan Qwen/Qwen2.5-0.5B-Instruct
  twostep plan ./my-model --prompt-tokens 2000
  twostep plan ./my-model --measure --quantization int8"""
CLIENTS = (1, 8, 32)
"""Numbers of requests at once."""
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
    """The size of weights in 16 bits."""
    kv_groups: KVGroups
    kv_block_bytes: int
    max_model_len: int
    ceilings: Ceilings
    available_bytes: int
    load_per_cpu: float
    """Processes that want to run, for each CPU: where there are some, the machine was measured too slow."""
    prompt_tokens: int
    quantizations: tuple[str, ...]
    measure: Callable[[str], Sequence[BurstTimes]] | None
    """Predicts the times of each number of requests with weights of such a form; None where bounds are told alone."""
    gpu: str | None = None
    """Name of a GPU that would be used here."""


def parser() -> CommandParser:
    made = CommandParser("plan", _DESCRIPTION, _EXAMPLES)
    made.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id")
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    made.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="length of prompts (default: 512)")
    made.add_argument(
        "--output-tokens", type=int, default=128, metavar="N", help="with --measure: of answers (default: 128)"
    )
    made.add_argument("--quantization", choices=[*_BITS], help="only weights of this form (default: of each)")
    made.add_argument("--measure", action="store_true", help="run a few layers, and predict times instead of bounds")
    return made


def main(arguments: Sequence[str]) -> int:
    """Prints the plan. Raises ModelError."""
    own = parser()
    parsed = own.parse(arguments)
    for flag, count in (("--prompt-tokens", parsed.prompt_tokens), ("--output-tokens", parsed.output_tokens)):
        if count < 1:
            own.error(f"{flag} must be at least 1")
    from engine.checkpoint.hub import look_for_hub
    from engine.checkpoint.local import is_local
    from engine.checkpoint.pinning import pinned_settings
    from server.settings.settings import EMBEDDED_MODEL, EMBEDDED_MODEL_DIR

    if parsed.model == EMBEDDED_MODEL:
        parsed.model = str(EMBEDDED_MODEL_DIR)
    if not is_local(parsed.model):
        look_for_hub(parsed.model)
    revision = pinned_settings(parsed.model, parsed.revision).revision  # before seconds of imports
    from engine.model.planning.estimate import estimate

    found = estimate(parsed.model, revision)
    if parsed.prompt_tokens >= found.max_model_len:
        own.error(f"--prompt-tokens must be less than the model's context of {found.max_model_len:,} tokens")
    if parsed.measure and parsed.prompt_tokens + parsed.output_tokens > found.max_model_len:
        own.error(f"--prompt-tokens and --output-tokens exceed the model's context of {found.max_model_len:,} tokens")
    for line in lines_of(_plan_of(parsed, found)):
        print(line, flush=True)
    return 0


def _plan_of(parsed: argparse.Namespace, found: "Estimate") -> Plan:
    """Measures the machine, and gathers the facts."""
    import torch

    from engine.host.available_memory import available_bytes
    from engine.model.machine_ceilings import measure_ceilings

    cpu, measure = torch.device("cpu"), None
    if parsed.measure:
        each = Burst(1, parsed.prompt_tokens, parsed.output_tokens)
        measure = predictions(parsed.model, parsed.revision, found, each)
    return Plan(
        architecture=found.architecture,
        num_weights=found.num_weights,
        size=found.size,
        kv_groups=found.kv_groups,
        kv_block_bytes=found.kv_block_bytes,
        max_model_len=found.max_model_len,
        ceilings=measure_ceilings(cpu, torch.bfloat16, found.size.weight_bytes),
        available_bytes=available_bytes(cpu),
        load_per_cpu=os.getloadavg()[0] / len(os.sched_getaffinity(0)),
        prompt_tokens=parsed.prompt_tokens,
        quantizations=(parsed.quantization,) if parsed.quantization else tuple(_BITS),
        measure=measure,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    )


def predictions(
    model: str, revision: str | None, found: "Estimate", each: Burst
) -> Callable[[str], Sequence[BurstTimes]]:
    """Returns what predicts, for a form of the weights, the times of as many requests like this one as in CLIENTS."""
    logging.getLogger("engine").setLevel(logging.ERROR)  # the weights are random: it is told here
    serving = functools.cache(_serving)

    def measure(quantization: str) -> Sequence[BurstTimes]:
        config = EngineConfig(model=model, revision=revision, quantization=quantization)
        added = serving()
        _wait_for("some layers with random weights")
        steps = _steps(config, found, each.prompt_tokens)
        return [simulated(each._replace(clients=clients), steps, added, config) for clients in CLIENTS]

    return measure


def _serving() -> ServingSeconds:
    """Returns what serving adds to steps: it shows where the embedded model is served, whose steps are short."""
    from engine.model.planning.estimate import estimate
    from server.settings.settings import EMBEDDED_MODEL_DIR

    _wait_for("the embedded model")
    model = str(EMBEDDED_MODEL_DIR)
    return serving_seconds(_steps(EngineConfig(model=model), estimate(model), EMBEDDED_PROMPT_TOKENS))


def _steps(config: EngineConfig, found: "Estimate", prompt_tokens: int) -> StepSeconds:
    from engine.model.planning.layer_trial import predict_steps

    return predict_steps(config, found, prompt_tokens, max(CLIENTS))


def _wait_for(what: str) -> None:
    """Tells who waits at a terminal what runs."""
    if sys.stderr.isatty():
        print(f"  running {what} ...".ljust(60), end="\r", file=sys.stderr, flush=True)


def lines_of(plan: Plan) -> Iterator[str]:
    """Yields the lines of a plan."""
    yield f"model     {plan.architecture}, {plan.num_weights / 1e9:,.2f} B numbers, context {plan.max_model_len:,}"
    yield f"memory    {plan.available_bytes / _GIB:,.1f} GiB available"
    read, flops = plan.ceilings.read_bytes_per_s / 1e9, plan.ceilings.flops_per_s / 1e9
    yield (
        f"machine   reads {read:,.1f} GB/s from {plan.ceilings.read_from}, multiplies {flops:,.0f} GFLOP/s "
        f"({plan.ceilings.dtype})"
    )
    if plan.load_per_cpu > 0.5 or plan.ceilings.is_in_doubt:
        yield "          busy with other programs now: this is too slow, and times below are too long"
    if plan.gpu is not None:
        yield f"          a model would be on the {plan.gpu}: below is what the CPU takes, and nothing is told of GPUs"
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
    for index, clients in enumerate(CLIENTS):
        prefill = clients * roofline.floor_of(_batch(Phase.PREFILL, 1, 0, plan.prompt_tokens)).seconds
        decode, bound = roofline.floor_of(_batch(Phase.DECODE, clients, plan.prompt_tokens, 1))
        times, best, most = BurstTimes(prefill, decode, clients / decode), " at best", " at most"
        if predicted is not None:
            times, best, most = predicted[index], "", ""
        yield (
            f"  {clients:2} at once: TTFT {times.last_ttft_s:,.2f} s{best} for the last of them, "
            f"ITL {times.itl_s * 1e3:,.1f} ms ({bound}), {times.tokens_per_s:,.0f} tokens/s{most}"
        )


def _batch(phase: Phase, num_requests: int, start: int, count: int) -> Batch:
    request = ScheduledRequest("", [0] * count, start, (), SamplingParams(), [0], [], True)
    return Batch(phase, (request,) * num_requests)


def _advice(fitting: Sequence[str]) -> str:
    if not fitting:
        return "It does not fit in any form: take a smaller model, or a machine with more memory."
    chosen = "" if fitting[0] == "none" else f" --quantization {fitting[0]}"
    return f"twostep serve MODEL{chosen}"
