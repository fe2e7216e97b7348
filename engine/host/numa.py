"""Which CPUs each of several processes gets, with its memory beside them: NUMA nodes as Linux describes them."""

from collections.abc import Set
from itertools import pairwise
from pathlib import Path

__all__ = ["cpus_of_ranks", "numa_nodes"]

_NODES = Path("/sys/devices/system/node")


def numa_nodes(directory: Path = _NODES) -> list[frozenset[int]]:
    """Returns the CPUs of each NUMA node that has some; none where the system does not tell."""
    try:
        folders = sorted(directory.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
        nodes = [_parse_cpus((folder / "cpulist").read_text()) for folder in folders]
    except (OSError, ValueError):
        return []
    return [node for node in nodes if node]


def cpus_of_ranks(size: int, allowed: Set[int], nodes: list[frozenset[int]]) -> list[frozenset[int]]:
    """Returns the CPUs of each of `size` processes, out of the `allowed` ones.

    Memory is allocated on the node of the CPU that first writes it. So on a machine of several nodes, a process keeps
    to one of them, or to some if there are more nodes than processes; processes on the same node divide its CPUs. With
    one node, or fewer CPUs than processes, all have all CPUs: the system moves them about as others need it.
    """
    usable = [node & allowed for node in nodes if node & allowed]
    parts = _parts(usable, size) if len(usable) > 1 else []
    return parts if parts and all(parts) else [frozenset(allowed)] * size


def _parts(nodes: list[frozenset[int]], size: int) -> list[frozenset[int]]:
    count = len(nodes)
    if count >= size:
        return [frozenset().union(*nodes[count * rank // size : count * (rank + 1) // size]) for rank in range(size)]
    parts = []
    for index, node in enumerate(nodes):
        cpus = sorted(node)
        num_ranks = size * (index + 1) // count - size * index // count
        starts = [len(cpus) * rank // num_ranks for rank in range(num_ranks + 1)]
        parts += [frozenset(cpus[first:end]) for first, end in pairwise(starts)]
    return parts


def _parse_cpus(text: str) -> frozenset[int]:
    """Reads a list such as 0-3,8-11."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
