"""Stages: what decode and prefill steps of an 8 B model take, with and without CUDA graphs, and a profile of some."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.config import EngineConfig, EngineInfo
from engine.core.sampling_params import SamplingParams
from engine.model.setup import load_model_runner
from engine.runner.model_runner import ModelRunner
from tests.gpu.look.llama import write_config
from tests.gpu.look.report import Look
from tests.gpu.look.timing import product_flops_per_s, read_bytes_per_s

_GREEDY = SamplingParams(max_tokens=10_000, temperature=0.0, ignore_eos=True)
_SAMPLED = SamplingParams(max_tokens=10_000, temperature=0.7, top_p=0.9, seed=1, ignore_eos=True)
_PENALIZED = SamplingParams(max_tokens=10_000, temperature=0.7, seed=1, presence_penalty=0.5, ignore_eos=True)
_PREDICTED_MS = {(1, 1000): 5.9, (8, 1000): 6.2, (32, 1000): 7.4, (64, 1000): 9.2, (128, 1000): 12.4}


def run_graphs(look: Look) -> None:
    points = [(size, context) for context in (1000, 8000) for size in (1, 8, 32, 64, 128)]
    _run(look, False, [(1, 64), (2, 200)] if look.is_small else points, prefills=True)


def run_quantized(look: Look) -> None:
    """Times steps with weights of 8 and 4 bits, beside those of 16, in one run."""
    points = [(1, 64)] if look.is_small else [(1, 1000), (8, 1000), (64, 1000)]
    for quantization in ("none", "int8", "int4") if look.is_small else ("none", "fp8", "int8", "int4"):
        look.report("quantization", quantization)
        _run(look, False, points, prefills=True, quantization=quantization)


def run_kv(look: Look) -> None:
    """Times steps over KV of 8 and 4 bits, beside that of 16, in one run."""
    points = [(1, 64)] if look.is_small else [(1, 1000), (64, 1000), (8, 8000), (32, 8000)]
    for kv_dtype in ("auto", "int8", "int4"):
        look.report("KV", kv_dtype)
        _run(look, False, points, prefills=True, kv_cache_dtype=kv_dtype)


def run_eager(look: Look) -> None:
    _run(look, True, [(1, 64)] if look.is_small else [(1, 1000), (64, 1000)], prefills=False)


def run_profile(look: Look) -> None:
    """Writes tables of the kernels of a step, in order of their time."""
    with tempfile.TemporaryDirectory() as folder:
        runner, info = _load(look, Path(folder), enforce_eager=True)
        for size, context in ((1, 64),) if look.is_small else ((1, 1000), (64, 1000)):
            _profile(
                look, f"decode_{size}_{context}", lambda batch: runner.decode(batch), _decode(info, size, context, 0)
            )
        length = 64 if look.is_small else 2048
        _profile(look, f"prefill_{length}", lambda batch: runner.prefill(batch), _prefill(info, length))


def _run(look: Look, enforce_eager: bool, points: Sequence[tuple[int, int]], prefills: bool, **formats: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runner, info = _load(look, Path(folder), enforce_eager, **formats)
        rate = read_bytes_per_s(look.device, 1 << (20 if look.is_small else 30))
        look.report("read-only stream", rate / 1e9, "GB/s")
        for size, context in points:
            _report_decode(look, runner, info, size, context, rate)
        first = points[-1] if look.is_small else (64, 1000)
        for name, params in () if enforce_eager or formats else (("top_p", _SAMPLED), ("penalties", _PENALIZED)):
            seconds = _decode_s(runner, info, *first, params)
            look.report(f"decode, {first[0]} at {first[1]}, {name}", seconds * 1e3, "ms", "greedy + 0.5")
        if prefills:
            _report_prefills(look, runner, info, has_share=formats.get("quantization", "none") == "none")


def _load(look: Look, folder: Path, enforce_eager: bool, **formats: str) -> tuple[ModelRunner, EngineInfo]:
    started_s = time.perf_counter()
    config = EngineConfig(
        model=str(write_config(folder, look.is_small)),
        load_format="dummy",
        device=look.device.type,
        dtype="float32" if look.is_small else "bfloat16",
        enforce_eager=enforce_eager,
        kv_cache_bytes=1 << 26 if look.is_small else None,
        num_speculative_tokens=0,
        **formats,
    )
    runner, info = load_model_runner(config)
    for rows in chain.from_iterable(runner.cache.layers):
        rows.normal_() if rows.is_floating_point() else rows.zero_()
    seconds = time.perf_counter() - started_s
    look.report("loaded", f"{seconds:.1f} s, {info.forward}, {info.attention}, {info.linear}", "", "seconds")
    look.report("KV blocks", info.num_blocks, f"of {info.block_size}; {info.weight_bytes / 1e9:.2f} GB of weights")
    return runner, info


def _decode(info: EngineInfo, size: int, context: int, step: int, params: SamplingParams = _GREEDY) -> Batch:
    """Returns the decode step in which each of `size` requests adds a token to `context` + `step` others."""
    per_request = -(-(context + 64) // info.block_size)
    end = context + step
    text = [(7 * i + 11) % info.vocab_size for i in range(end + 1)]
    requests = (
        ScheduledRequest(
            request_id=str(number),
            token_ids=[text[-1]],
            start=end,
            block_table=tuple(range(number * per_request, (number + 1) * per_request)),
            params=params,
            prompt_token_ids=text[:context],
            output_token_ids=text[context:],
            samples=True,
        )
        for number in range(size)
    )
    return Batch(Phase.DECODE, tuple(requests))


def _fits(info: EngineInfo, size: int, context: int) -> bool:
    return size * -(-(context + 64) // info.block_size) <= info.num_blocks


def _decode_s(runner: ModelRunner, info: EngineInfo, size: int, context: int, params: SamplingParams) -> float:
    """Returns the median seconds of a decode step, from its batch to its tokens in Python."""
    durations = []
    for step in range(24):
        batch = _decode(info, size, context, step, params)
        started_s = time.perf_counter()
        runner.decode(batch)
        durations.append(time.perf_counter() - started_s)
    return statistics.median(durations[8:])


def _report_decode(
    look: Look, runner: ModelRunner, info: EngineInfo, size: int, context: int, bytes_per_s: float
) -> None:
    name = f"decode, {size} at {context}"
    if not _fits(info, size, context):
        look.report(name, "left out: the KV cache is too small")
        return
    seconds = _decode_s(runner, info, size, context, _GREEDY)
    embedding_bytes = info.vocab_size * info.hidden_size * (4 if info.dtype == "float32" else 2)
    num_bytes = info.weight_bytes - embedding_bytes + size * context * info.kv_bytes_per_token
    floor_s = num_bytes / bytes_per_s
    predicted = f"{ms} ms" if (ms := _PREDICTED_MS.get((size, context))) else "85 % of the floor"
    look.report(name, seconds * 1e3, "ms", predicted)
    look.report(f"{name}: speed, share of the floor", f"{size / seconds:,.0f} tokens/s, {floor_s / seconds:.1%}")


def _prefill(info: EngineInfo, length: int) -> Batch:
    text = [(7 * i + 11) % info.vocab_size for i in range(length)]
    blocks = tuple(range(-(-length // info.block_size)))
    request = ScheduledRequest("0", text, 0, blocks, _GREEDY, text, [], samples=True)
    return Batch(Phase.PREFILL, (request,))


def _report_prefills(look: Look, runner: ModelRunner, info: EngineInfo, has_share: bool) -> None:
    rate = product_flops_per_s(look.device, 256 if look.is_small else 8192, getattr(torch, info.dtype))
    for length in (32, 128) if look.is_small else (256, 1024, 2048, 8192):
        batch, durations = _prefill(info, length), []
        for _ in range(6):
            started_s = time.perf_counter()
            runner.prefill(batch)
            durations.append(time.perf_counter() - started_s)
        seconds = statistics.median(durations[2:])
        width = 4 if info.dtype == "float32" else 2
        table_bytes = info.vocab_size * info.hidden_size * width
        num_weights = (info.weight_bytes - 2 * table_bytes) / width  # the head sees the last token only
        flops = 2 * length * num_weights
        look.report(f"prefill, {length}", seconds * 1e3, "ms", "2048: 70 ms" if length == 2048 else "")
        if not has_share:
            continue
        look.report(
            f"prefill, {length}: speed, share of the product rate",
            f"{length / seconds:,.0f} tokens/s, {flops / seconds / rate:.1%}",
            predicted="60 %" if length >= 2048 else "",
        )


def _profile(look: Look, name: str, step: Any, batch: Batch) -> None:
    for _ in range(3):
        step(batch)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if look.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step(batch)
    averages = profile.key_averages()
    order = "self_device_time_total" if look.device.type == "cuda" else "self_cpu_time_total"
    path = look.out / f"profile_{name}.txt"
    path.write_text(averages.table(sort_by=order, row_limit=60, max_name_column_width=90))
    kernels = [each for each in averages if each.device_type == torch.autograd.DeviceType.CUDA]
    busy_ms = sum(each.self_device_time_total for each in kernels) / 1e3
    look.report(
        name, f"{sum(each.count for each in kernels)} launches, busy {busy_ms:.2f} ms", path.name, "290 launches"
    )
