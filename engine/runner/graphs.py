"""Decode steps as CUDA graphs: what a step launches is recorded once for each size of a batch, and launched as one.

A batch is filled up to the next size with sequences that have no context and write nothing. All rows of a step are
functions of themselves alone, so this changes no bit of the others. What no graph can hold, steps with several tokens
of a sequence, adapters or recurrent states, and models whose code waits for the device, run as without graphs.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.core.errors import reason_of
from engine.runner.forward import Forward, ForwardOutput, HiddenOf
from engine.runner.host_transfers import HostTransferError, NoHostTransfers
from engine.runner.model_inputs import ModelInputs

__all__ = ["Capture", "GraphedForward", "StaticInputs", "graph_sizes", "in_cuda_graphs"]

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function and records what it launches; returns one that launches the same again, on the same memory."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the numbers of sequences for which steps are recorded: 1, 2, 4, then multiples of 8."""
    return tuple(
        sorted({size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs} | {max_num_seqs})
    )


class StaticInputs:
    """The inputs of decode steps, in memory that stays where it is."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.max_model_len = max_model_len
        self._token_ids, self._positions, self._slots = (zeros(max_num_seqs, dtype=torch.int64) for _ in range(3))
        self._block_tables = zeros(max_num_seqs, -(-max_model_len // block_size))
        self._context_lens = zeros(max_num_seqs)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def of_size(self, size: int) -> ModelInputs:
        """Returns the inputs of a step of `size` sequences."""
        attention = AttentionMetadata(
            block_tables=self._block_tables[:size],
            cu_seqlens_q=self._starts[: size + 1],
            context_lens=self._context_lens[:size],
            slot_mapping=self._slots[:size],
            max_seqlen_q=1,
            max_context_len=self.max_model_len,
        )
        return ModelInputs(self._token_ids[:size], self._positions[:size], attention, None)

    def fill(self, inputs: ModelInputs | None, size: int) -> None:
        """Copies the inputs of a step here, and fills it up to `size` sequences; None stands for no sequence at all."""
        num_seqs = 0
        if inputs is not None:
            attention, num_seqs = inputs.attention, len(inputs.token_ids)
            self._token_ids[:num_seqs].copy_(inputs.token_ids)
            self._positions[:num_seqs].copy_(inputs.positions)
            self._slots[:num_seqs].copy_(attention.slot_mapping)
            self._context_lens[:num_seqs].copy_(attention.context_lens)
            self._block_tables[:num_seqs, : attention.block_tables.shape[1]].copy_(attention.block_tables)
        if num_seqs < size:
            self._slots[num_seqs:size].fill_(-1)
            self._context_lens[num_seqs:size].zero_()


class GraphedForward:
    """Runs decode steps as recorded ones, and all other steps by the forward pass that was recorded."""

    @torch.inference_mode()
    def __init__(self, plain: Forward, static: StaticInputs, sizes: Sequence[int], capture: Capture) -> None:
        """Records a step of each of `sizes`. Raises HostTransferError if `plain` waits for the device."""
        self.name = f"{plain.name} in CUDA graphs"
        self._plain = plain
        self._static = static
        self._sizes = tuple(sorted(sizes))
        static.fill(None, self._sizes[-1])
        with NoHostTransfers():  # type: ignore[no-untyped-call]
            output = plain(static.of_size(self._sizes[-1]), None)
        self._logits, self._hidden = torch.empty_like(output.logits), torch.empty_like(output.hidden)
        self._launch = {size: self._captured(size, capture) for size in reversed(self._sizes)}  # they share memory

    def _captured(self, size: int, capture: Capture) -> Callable[[], None]:
        inputs = self._static.of_size(size)

        def run() -> None:
            output = self._plain(inputs, None)
            self._logits[:size].copy_(output.logits)
            self._hidden[:size].copy_(output.hidden)

        run()  # compiles kernels and chooses libraries' own, neither of which can be recorded
        return capture(run)

    def __call__(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf = None) -> ForwardOutput:
        num_seqs = len(inputs.attention.context_lens)
        size = next((size for size in self._sizes if size >= num_seqs), None)
        if size is None or not self._is_recorded(inputs, kept, hidden_of):
            return self._plain(inputs, kept, hidden_of)
        self._static.fill(inputs, size)
        self._launch[size]()
        return ForwardOutput(self._logits[:num_seqs], self._hidden[:num_seqs])

    def settle(self, num_kept: Sequence[int]) -> None:
        self._plain.settle(num_kept)

    def _is_recorded(self, inputs: ModelInputs, kept: Sequence[int] | None, hidden_of: HiddenOf) -> bool:
        attention = inputs.attention
        is_plain = kept is None and hidden_of is None and inputs.states is None and inputs.adapters is None
        return is_plain and attention.max_seqlen_q == 1 and attention.max_context_len <= self._static.max_model_len


class _CudaGraphs:
    """Records CUDA graphs that share one pool of memory: each overwrites what the one before it computed."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


def in_cuda_graphs(plain: Forward, static: StaticInputs, sizes: Sequence[int]) -> Forward:
    """Returns the forward pass with its decode steps in CUDA graphs, or itself if it waits for the device."""
    try:
        return GraphedForward(plain, static, sizes, _CudaGraphs())
    except HostTransferError as error:
        logger.warning("decode steps are not recorded in CUDA graphs: the model's code makes the host wait (%s)", error)
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        logger.warning("decode steps are not recorded in CUDA graphs: %s", reason_of(error))
    return plain
