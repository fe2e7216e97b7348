"""How long launches on a GPU take."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["microseconds"]

_REPLAYS = 7


def microseconds(launches: Sequence[Callable[[], object]]) -> float:
    """Returns how long one of the launches takes: the median of several runs of a CUDA graph with all of them."""
    for launch in launches[:2]:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    new_event: Any = torch.cuda.Event
    events = [new_event(enable_timing=True) for _ in range(_REPLAYS + 2)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times_ms = [float(first.elapsed_time(second)) for first, second in itertools.pairwise(events)][1:]
    return 1e3 * statistics.median(times_ms) / len(launches)
