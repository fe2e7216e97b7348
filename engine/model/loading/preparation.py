"""What makes a module of transformers one that runs here: on its device, with known parts fused, in the kernels."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.attention.registry import AttentionCall
from engine.checkpoint.stored_tensor import StoredTensor, as_stored
from engine.host.deterministic_activations import replace_activations
from engine.kernels import are_kernels_enabled
from engine.model.fusion import fuse_between_layers, fuse_modules
from engine.model.kernel_layer import move_layers_to_kernels
from engine.model.known.text_models import leave_out_unused
from engine.model.probe import check_same, probe_layers
from engine.model.recurrent.kernel_parallel_layer import move_parallel_layers_to_kernels
from engine.model.recurrent.kernel_part_layer import move_part_layers_to_kernels
from engine.weights.linear import is_linear
from engine.weights.moe import is_experts

__all__ = ["made_to_run", "move_layers", "only_errors_of", "replace_parts", "unmap_checkpoint"]


def made_to_run(module: PreTrainedModel, device: torch.device, stays_mapped: bool = False) -> PreTrainedModel:
    """Returns the module, which was just read from a checkpoint, on the device and without anything for training. With
    `stays_mapped`, the weights of linear layers and experts stay in the mapped checkpoint: operators read them from
    there, one at a time, also where the device is another than the CPU."""
    module.requires_grad_(False)
    leave_out_unused(module)
    mapped = _taken_weights(module, device) if stays_mapped else []
    _expand_unpacked(module, device)
    for owner in module.modules():  # buffers may be views: see `unmap_checkpoint`
        owner._buffers.update({name: buffer.clone() for name, buffer in owner._buffers.items() if buffer is not None})
    module.eval().to(device)
    for owner, name, weight in mapped:
        owner._parameters[name] = nn.Parameter(weight, requires_grad=False)
    return module


def _taken_weights(module: PreTrainedModel, device: torch.device) -> list[tuple[nn.Module, str, StoredTensor]]:
    """Takes the weights of linear layers and experts out of their modules, and returns them as they are stored, for
    operators on the device."""
    place = torch.empty(0, device=device).device  # with its number
    taken: list[tuple[nn.Module, str, StoredTensor]] = []
    for owner in module.modules():
        if is_linear(owner) or is_experts(owner):
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.dim() > 1:
                    taken.append((owner, name, as_stored(parameter.detach()).on(place)))
                    owner._parameters[name] = None
    return taken


def _expand_unpacked(module: PreTrainedModel, device: torch.device) -> None:
    """Makes stored parameters dense that stay as they are; those that are packed on the CPU are read then."""
    for owner in module.modules():
        is_packed = is_linear(owner) or is_experts(owner) or isinstance(owner, nn.Embedding)
        for name, parameter in owner._parameters.items():
            if isinstance(parameter, StoredTensor) and not (is_packed and device.type == "cpu"):
                owner._parameters[name] = nn.Parameter(parameter.expanded(), requires_grad=False)


def replace_parts(
    module: PreTrainedModel, calls: Sequence[AttentionCall], device: torch.device, has_kernels: bool
) -> None:
    """Replaces what is computed in another way than by transformers, apart from matmuls: activations on the CPU, and
    fused parts where there are kernels for them: those in C++ that were loaded, or those in Triton for CUDA."""
    if device.type == "cpu":
        if not has_kernels:
            replace_activations()
            return
        torch.ops.twostep.replace_activations()
    elif not _has_cuda_operators():
        return
    fuse_modules(module, calls)
    if device.type == "cuda":
        fuse_between_layers(module)
    check_same(type(module).__name__, calls, probe_layers(module, device))


def _has_cuda_operators() -> bool:
    """Whether layers are fused on CUDA: unless kernels are off, they are registered now."""
    if not are_kernels_enabled():
        return False
    from engine.kernels.cuda.operators import register  # needs Triton, which no CPU does

    register()
    return True


def move_layers(modules: Sequence[PreTrainedModel], device: torch.device) -> list[tuple[AttentionCall, ...]]:
    """Moves layers to the kernels. Returns the attention calls of each module's layers, which are a rank's own. Raises
    UnsupportedModelError unless, fused and packed, they still run."""
    for each in modules:
        move_layers_to_kernels(each)
        move_part_layers_to_kernels(each)
        move_parallel_layers_to_kernels(each)
    return [probe_layers(each, device) for each in modules]


def unmap_checkpoint(module: PreTrainedModel) -> None:
    """Copies parameters that were not packed out of the mapped checkpoint file.

    A tensor in a mapped checkpoint keeps the whole file mapped: it counts as this process's memory, and the process
    dies (SIGBUS) if the file is truncated. Buffers, whose base would keep the mapping, and biases, which packing leaves
    alone, were copied before.
    """
    for parameter in module.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


@contextmanager
def only_errors_of(name: str) -> Iterator[None]:
    """Keeps a logger from warning: transformers warns, for one, of each tensor of the parts that are not loaded."""
    its_logger = logging.getLogger(name)
    level = its_logger.level
    its_logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        its_logger.setLevel(level)
