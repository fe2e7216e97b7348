"""A program that prints what engines of several ranks on devices answer: `python -m tests.gpu.device_ranks MODEL SIZE`.

With GPUs they run as they always do. Without one, each rank computes on the CPU what it would on CUDA, in Triton's
interpreter, and torch.distributed gathers by Gloo in place of NCCL.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.assembly import load_engine
from engine.attention import cuda
from engine.core.config import EngineConfig
from engine.kernels.cuda import linear
from engine.kernels.cuda.operators import register
from engine.model import adapters, loader, machine_ceilings, setup
from engine.model.fusion import fuse_between_layers, fuse_modules
from engine.model.loading import weights
from engine.model.loading.preparation import made_to_run
from engine.ranks import groups, processes, rank
from engine.ranks.__main__ import end_with
from engine.ranks.device_exchange import new_meeting_place, open_device_group
from engine.runner.graphs import GraphedForward, StaticInputs, graph_sizes
from engine.weights import kernel_experts, moe, packing_policy
from engine.weights import linear as linears
from engine.weights.rank_group import RankGroup
from engine.weights.triton_experts import triton_experts
from engine.weights.triton_weight import TritonWeight
from tests.engine.fakes import add, run_to_end
from tests.engine.ranks.rank_adapters import adapters_of
from tests.engine.tiny_models import COMMON, VOCAB_SIZE, make_checkpoint

SIZES = {"hidden_size": 256, "intermediate_size": 288, "num_hidden_layers": 2}
SIZES_ON_GPUS = {
    **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
}
"""Sizes of models whose parts would be summed in other orders than the whole, if those were chosen for a part."""
CPU = torch.device("cpu")


def main(name: str, size: int, settings: dict[str, Any]) -> None:
    sizes = SIZES_ON_GPUS if torch.cuda.is_available() else SIZES
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(COMMON, sizes), as_on_devices(size):
        path = make_checkpoint(name, Path(folder))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        fields = {"device": device, "dtype": "float32", "num_blocks": 64, "max_num_batched_tokens": 11, **settings}
        config = EngineConfig(model=str(path), tensor_parallel_size=size, max_num_seqs=4, **fields)
        print(json.dumps(answers(config, adapters_of(path)["b"])))


def answers(config: EngineConfig, adapter: Path) -> dict[str, Any]:
    """Returns what a client sees of several requests in one batch, of which the last has the adapter, and what computed
    it."""
    engine = load_engine(config)
    greedy, sampled = {"temperature": 0.0}, {"temperature": 1.2, "seed": 5}
    try:
        adapted = greedy | {"adapter": engine.load_adapter(str(adapter)).digest}
        for length, params in ((1, greedy), (17, sampled), (3, adapted)):
            prompt = [(7 * at + length) % VOCAB_SIZE for at in range(length)]
            add(engine, str(length), prompt, max_tokens=4 - ("adapter" in params), logprobs=3, **params)
        updates = run_to_end(engine)
        logprobs = {
            name: [(each.token_id, each.logprob, each.top) for update in own for each in update.logprobs]
            for name, own in updates.items()
        }
        return {"answers": logprobs, "forward": engine.info.forward, "weight_bytes": engine.info.weight_bytes}
    finally:
        engine.close()


@contextmanager
def as_on_devices(size: int) -> Iterator[None]:
    """Has models be loaded and run as on CUDA, and so many ranks exchange as GPUs do, also where there are none."""
    with ExitStack() as stack:
        for module, name, value in _REPLACED if not torch.cuda.is_available() else ():
            stack.enter_context(mock.patch.object(module, name, value))
        if not torch.cuda.is_available():
            from tests.gpu.interpreter import make_exact

            make_exact()
            register("CPU")
            stack.enter_context(mock.patch.object(weights, "made_to_run", partial(_made_to_run, size)))
        yield


def _started(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    return _popen([{"engine.ranks": "tests.gpu.device_ranks"}.get(each, each) for each in command], **options)


def _made_to_run(size: int, module: Any, device: torch.device, **_: object) -> Any:
    return made_to_run(module, device, stays_mapped=size > 1)


def _fused(module: Any, calls: Any, *_: object) -> None:
    fuse_modules(module, calls)
    fuse_between_layers(module)


def _recorded(config: EngineConfig, forward: Any, caches: Any, _: RankGroup) -> Any:
    if config.enforce_eager:
        return forward
    sizes = graph_sizes(4)
    static = StaticInputs(sizes[-1], caches.max_model_len, caches.kv.block_size, CPU)
    return GraphedForward(forward, static, sizes, _again)


def _again(run: Callable[[], None]) -> Callable[[], None]:
    return run


def _packing(quantization: str, has_kernels: bool, _: bool, rounds_rows: bool) -> packing_policy.Packing:
    return packing_policy.packing_for(quantization, has_kernels, True, rounds_rows)


def _pack(weight: torch.Tensor, _: bool, num_columns: int | None = None) -> TritonWeight:
    return TritonWeight(weight, num_columns)


_popen = subprocess.Popen
_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (loader, "replace_parts", _fused),
    (linears, "packing_for", _packing),
    (packing_policy, "pack_weight", _pack),
    (adapters, "pack_weight", _pack),
    (kernel_experts, "_find_gate", lambda *_: None),
    (moe.PackedExperts, "_in_triton", lambda own: triton_experts(own.experts, own.up, own.down)),
    (setup, "select_backend", lambda *_: cuda),
    (setup, "_recorded", _recorded),
    (groups, "are_on_gpus", lambda _: True),
    (processes, "check_ranks", lambda _: None),
    (processes, "new_shared_file", lambda _: new_meeting_place()),
    (processes, "open_group_of", lambda own, file, number: _group(own, file, number)),
    (rank, "open_group_of", lambda own, file, number: _group(own, file, number)),
    (subprocess, "Popen", _started),
    (linear, "_BUSY_TILES", 8),
    (linear, "_MIN_SEGMENT", 16),
    (machine_ceilings, "_BUDGET_S", 0.0),
    (machine_ceilings, "_RUN_S", 1e-9),
    (machine_ceilings, "_DOUBTFUL_RATIO", 1e9),
)


def _group(config: EngineConfig, file: int, number: int) -> RankGroup:
    return open_device_group(file, number, config.tensor_parallel_size, CPU)


if __name__ == "__main__":
    if sys.argv[1].isdigit():  # a rank other than the first
        with as_on_devices(2):
            end_with(lambda: rank.run(Connection(int(sys.argv[1])), int(sys.argv[2])))
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
