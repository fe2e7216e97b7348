"""A rank other than the first: loads its part of the model, and runs the forward passes that the first tells of."""

import contextlib
import os
from multiprocessing.connection import Connection

import msgspec
import torch

from engine.core.errors import ConfigError, ModelError
from engine.host.log_format import configure_root
from engine.host.memory_trim import trim_after_startup
from engine.kernels import load_kernels
from engine.model.setup import ReadyModel, load_ready_model
from engine.ranks.memory import open_group
from engine.ranks.messages import ForwardPass, RankFailure, RankStart, Settlement

__all__ = ["EXIT_CANNOT_LOAD", "run"]

EXIT_CANNOT_LOAD = 2


def run(link: Connection, memory: int) -> int:
    """Loads this rank's part of the model and serves until the link ends. Returns the exit code: 2, after a message, if
    the model cannot be loaded."""
    start = msgspec.msgpack.decode(link.recv_bytes(), type=RankStart)
    configure_root(start.log_level, f"%(asctime)s %(levelname)s rank {start.rank}: %(message)s")
    os.sched_setaffinity(0, start.cpus)
    load_kernels()
    group = open_group(memory, start.rank, start.config.tensor_parallel_size)
    try:
        ready = load_ready_model(start.config, group)
    except (ConfigError, ModelError) as error:
        link.send_bytes(msgspec.msgpack.encode(RankFailure(type(error).__name__, str(error))))
        return EXIT_CANNOT_LOAD
    trim_after_startup()
    with contextlib.suppress(EOFError):
        serve(link, ready)
    return 0


@torch.inference_mode()
def serve(link: Connection, ready: ReadyModel) -> None:
    """Runs forward passes until the first rank closes the link, which raises EOFError."""
    decoder = msgspec.msgpack.Decoder(ForwardPass | Settlement)
    while True:
        message = decoder.decode(link.recv_bytes())
        if isinstance(message, Settlement):
            ready.shared[message.index].settle(message.num_kept)
            continue
        inputs = message.inputs()
        last_block = int(inputs.attention.slot_mapping.max()) // ready.cache.block_size
        ready.cache.prefault(last_block, message.num_tokens)
        ready.cache.copy_blocks(inputs.block_copies)
        ready.shared[message.index](inputs, message.kept)
