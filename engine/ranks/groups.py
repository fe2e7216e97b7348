"""Where the ranks of a model run, and how they exchange tensors there: on the CPU in shared memory, on GPUs by NCCL.

What only GPUs need of torch.distributed is imported for these.
"""

import torch

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.host.nvidia import cuda_build_advice
from engine.kernels import load_kernels
from engine.ranks.memory import new_memory, open_group
from engine.weights.rank_group import RankGroup

__all__ = ["are_on_gpus", "check_ranks", "new_shared_file", "open_group_of"]


def are_on_gpus(config: EngineConfig) -> bool:
    """Whether each rank has a GPU, that of its number."""
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def check_ranks(config: EngineConfig) -> None:
    """Raises ConfigError where there cannot be so many ranks."""
    size = config.tensor_parallel_size
    flag = f"--tensor-parallel-size {size}"
    if not are_on_gpus(config):
        if load_kernels() is None:
            raise ConfigError(f"{flag} needs the CPU kernels, which are not here; the log says why.")
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus < size:
        cure = f"Use {num_gpus} at most, or --device cpu." if num_gpus else cuda_build_advice()
        cure = cure or "Look whether nvidia-smi finds some, or use --device cpu."
        raise ConfigError(f"{flag} needs a GPU for each rank, and torch sees {num_gpus}. {cure}")
    if not torch.distributed.is_nccl_available():
        raise ConfigError(f"{flag} on GPUs needs a build of torch with NCCL, which this one has not.")
    kinds = sorted({torch.cuda.get_device_name(number) for number in range(size)})
    if len(kinds) > 1:  # what all compute must be the same, or they would disagree on what comes next
        raise ConfigError(f"{flag} needs GPUs of one kind, and these are {' and '.join(kinds)}.")


def new_shared_file(config: EngineConfig) -> int:
    """Returns the descriptor of a file without a name that all ranks are to have."""
    if not are_on_gpus(config):
        return new_memory(config.tensor_parallel_size)
    from engine.ranks.device_exchange import new_meeting_place

    return new_meeting_place()


def open_group_of(config: EngineConfig, descriptor: int, rank: int) -> RankGroup:
    """Returns the group of a rank. On GPUs it is there once all ranks call this, and this thread uses its GPU then."""
    size = config.tensor_parallel_size
    if not are_on_gpus(config):
        load_kernels()
        return open_group(descriptor, rank, size)
    from engine.ranks.device_exchange import open_device_group

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return open_device_group(descriptor, rank, size, device)
