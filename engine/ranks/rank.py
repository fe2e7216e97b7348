"""A rank other than the first: loads its part of the model, and does what the first tells of: runs forward passes, and
loads adapters."""

import contextlib
import logging
import os
from multiprocessing.connection import Connection

import msgspec
import torch

from engine.core.adapters import Adapters
from engine.core.errors import AdapterError, ConfigError, ModelError
from engine.core.messages import LoadAdapter, UnloadAdapter
from engine.host.log_format import configure_root
from engine.host.memory_trim import trim_after_startup
from engine.model.setup import ReadyModel, load_ready_model
from engine.ranks.groups import open_group_of
from engine.ranks.messages import ForwardPass, HeadPass, RankFailure, RankMessage, RankStart, ReleaseAdapter, Settlement
from engine.runner.head_passes import HiddenBefore

__all__ = ["EXIT_CANNOT_LOAD", "run"]

EXIT_CANNOT_LOAD = 2

logger = logging.getLogger(__name__)


def run(link: Connection, shared: int) -> int:
    """Loads this rank's part of the model and serves until the link ends. Returns the exit code: 2, after a message, if
    the model cannot be loaded."""
    start = msgspec.msgpack.decode(link.recv_bytes(), type=RankStart)
    configure_root(start.log_level, f"%(asctime)s %(levelname)s rank {start.rank}: %(message)s")
    os.sched_setaffinity(0, start.cpus)
    group = open_group_of(start.config, shared, start.rank)
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
    """Does what the first rank tells of until that closes the link, which raises EOFError."""
    decoder = msgspec.msgpack.Decoder(RankMessage)
    while True:
        message = decoder.decode(link.recv_bytes())
        if isinstance(message, Settlement):
            ready.shared[message.index].settle(message.num_kept)
        elif isinstance(message, LoadAdapter | UnloadAdapter | ReleaseAdapter):
            change_adapters(ready.adapters, message)
        elif isinstance(message, HeadPass):
            assert ready.head is not None, "all ranks have a head, or none"
            own = message.forward_pass
            ready.head(own.inputs(ready.model.device), HiddenBefore(message.slots, message.rows), own.kept or [])
        else:
            run_forward(ready, message)


def run_forward(ready: ReadyModel, message: ForwardPass) -> None:
    """Runs a forward pass, and keeps the hidden states that a head reads."""
    inputs = message.inputs(ready.model.device)
    slots = inputs.attention.slot_mapping
    if not slots.is_cuda:  # where pages are the device's own, and reading a slot would wait for it
        ready.caches.kv.prefault(int(slots.max()) // ready.caches.kv.block_size, message.num_tokens)
    ready.caches.kv.copy_blocks(inputs.block_copies)
    output = ready.shared[message.index](inputs, message.kept, message.hidden_of)
    if ready.head is not None and output.all_hidden is not None:
        ready.head.keep(slots, output.all_hidden)


def change_adapters(adapters: Adapters, message: LoadAdapter | UnloadAdapter | ReleaseAdapter) -> None:
    """Loads an adapter, or takes one away. One that cannot be loaded is none of the first rank's either, which says
    so."""
    if isinstance(message, UnloadAdapter):
        adapters.unload(message.digest)
    elif isinstance(message, ReleaseAdapter):
        adapters.release(message.number)
    else:
        try:
            adapters.load(message.path)
        except AdapterError as error:
            logger.warning("%s", error)
