"""A program that prints what a decode step launches on CUDA, layer by layer: kernels in Triton, and torch's own.

Nothing needs a GPU: kernels in Triton are counted in place of being run, and each operation of torch that computes or
copies is one launch.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import interpreter

from engine.attention import cuda, registry
from engine.attention.kv_cache import KVCache
from engine.kernels.cuda import operators
from engine.model.fusion import fuse_between_layers, fuse_modules
from engine.model.probe import layer_shape, probe_layers
from engine.runner.forward import TransformersForward
from engine.runner.graphs import StaticInputs
from engine.weights.linear import PackedLinear, is_linear
from engine.weights.module_replacement import replace_modules
from engine.weights.triton_weight import TritonWeight

_NO_LAUNCHES = frozenset(
    """view _unsafe_view t transpose expand unsqueeze slice select permute alias detach split split_with_sizes unbind
    as_strided squeeze empty empty_like new_empty empty_strided _reshape_alias lift_fresh unfold chunk narrow
    is_pinned""".split()
)


class Launches(TorchDispatchMode):
    """Counts what is launched in its context; operators of ours count as what they launch in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        package, name = func._schema.name.split("::")
        if package == "twostep":
            with self:
                return operators.IMPLEMENTATIONS[name](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.counts[name] += not (name in _NO_LAUNCHES or (name == "reshape" and _is_view(result, args[0])))
        return result


def _is_view(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def launches_of(model_type: str, num_layers: int, num_seqs: int) -> Counter[str]:
    """Returns what a decode step launches of a model with layers of the size of Llama 3.1 8B's. Nothing has numbers."""
    device = torch.device("meta")
    operators.register("Meta")
    launches = Launches()
    with torch.no_grad(), mock.patch.object(interpreter.GridExecutor, "__call__", _counted_by(launches)), device:
        model = _model(model_type, num_layers)
        calls = probe_layers(model, device)
        fuse_modules(model, calls)
        fuse_between_layers(model)
        replace_modules(model, _packed)
        cache = KVCache([*map(layer_shape, calls)], 64, 16, torch.bfloat16, device)
        forward, inputs = TransformersForward(model, cache, cuda), StaticInputs(num_seqs, 8192, 16, device)
        launches.counts.clear()
        with launches:
            forward(inputs.of_size(num_seqs), None)
    return +launches.counts


def _counted_by(launches: Launches) -> Callable[..., None]:
    def count(executor: interpreter.GridExecutor, *_: object, **__: object) -> None:
        launches.counts[executor.fn.__name__] += 1

    return count


def _model(model_type: str, num_layers: int) -> Any:
    registry.register()
    config = AutoConfig.for_model(
        model_type,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=registry.ATTENTION_NAME, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


def _packed(module: nn.Module) -> nn.Module | None:
    return PackedLinear(TritonWeight(module.weight), module.bias) if is_linear(module) else None


if __name__ == "__main__":
    print(json.dumps(launches_of(sys.argv[1], *map(int, sys.argv[2:]))))
