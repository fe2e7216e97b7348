"""Loads a model on as many ranks as the settings ask for, of which this process is the first."""

from collections.abc import Callable
from functools import partial

import torch

from engine.core.config import EngineConfig, EngineInfo
from engine.core.machine import Measure
from engine.model.loading.written_heads import check_written_heads
from engine.model.machine_ceilings import measure_again
from engine.model.setup import load_model_runner
from engine.ranks.processes import RankProcesses
from engine.runner.model_runner import ModelRunner

__all__ = ["load_on_ranks", "measurement_of"]


def load_on_ranks(
    config: EngineConfig, kv_memory_fd: int | None = None
) -> tuple[ModelRunner, EngineInfo, Callable[[], None]]:
    """Returns the runner, the facts about all ranks together, and what ends the other ranks. The KV cache of a single
    rank lies in the memory of the file `kv_memory_fd`, if there is one. Raises ConfigError or ModelError, whichever
    rank finds it."""
    if config.tensor_parallel_size == 1:
        return *load_model_runner(config, kv_memory_fd=kv_memory_fd), lambda: None
    check_written_heads(config)
    ranks = RankProcesses(config)
    try:
        return *load_model_runner(ranks.config, ranks.group, ranks.leader), ranks.close
    except Exception as error:
        ranks.close()
        raise ranks.reason_of(error) from error


def measurement_of(info: EngineInfo, num_ranks: int) -> Measure:
    """Returns what measures the machine's peaks again, beside the loaded model. On a GPU, which runs nothing else, and
    where other ranks would have to measure at the same time, they stay as they are."""
    if info.device != "cpu" or num_ranks > 1:
        return lambda _: info.ceilings
    return partial(measure_again, info.ceilings, getattr(torch, info.dtype), info.weight_bytes)
