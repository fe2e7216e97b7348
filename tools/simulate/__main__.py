"""`python -m tools.simulate`: compares routing policies over many replicas, in virtual time."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from server.routing.policies import NAMES
from server.routing.recording import replay
from tools.simulate.cluster import ClusterSettings
from tools.simulate.replica import ReplicaSettings
from tools.simulate.results import table
from tools.simulate.summaries import summary_of
from tools.simulate.trace import TraceSettings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.replay is not None:
        try:
            return _replay(options.replay, options.policy)
        except (OSError, ValueError, KeyError, TypeError) as error:
            parser.error(f"--replay: {options.replay} is no record of a router ({type(error).__name__}: {error})")
    rate = options.rate * options.replicas
    trace = TraceSettings(options.requests, rate)
    replica = ReplicaSettings(num_blocks=options.blocks)
    if replica.num_blocks * replica.block_size < trace.max_model_len:
        parser.error(f"--blocks must have room for the {trace.max_model_len} tokens of the longest conversation")
    if not 0 <= options.prefill_replicas < options.replicas:
        parser.error("--prefill-replicas must leave replicas that decode")
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    cluster = ClusterSettings(
        options.replicas,
        replica,
        num_deaths=options.deaths,
        deaths_until_s=options.requests / rate,
        num_prefill=options.prefill_replicas,
        has_store=options.kv_store,
    )
    names = list(dict.fromkeys(options.policy or NAMES))
    summarize = partial(summary_of, trace=trace, cluster=cluster, seed=options.seed)
    if options.jobs == 1:
        summaries = list(map(summarize, names))
    else:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            summaries = list(pool.map(summarize, names))
    print(table({name: each.row for name, each in zip(names, summaries, strict=True)}))
    return int(any(each.num_wrong for each in summaries))


def _replay(path: Path, names: Sequence[str] | None) -> int:
    """Prints how a record's decisions come out now. Returns 1 if the policy that made them decides otherwise."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for name in names or ():
        print(f"{name}: {replay(lines, name).num_different} decisions differ")
    replayed = replay(lines)
    print(
        f"{replayed.num_decisions} decisions of the live router, of which {replayed.num_different} come out otherwise"
    )
    return int(replayed.num_different > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument(
        "--prefill-replicas",
        type=int,
        default=0,
        help="how many of the replicas compute prompts for the others, and do nothing else (%(default)s)",
    )
    parser.add_argument("--kv-store", action="store_true", help="replicas share a KV store, as they do with these")
    parser.add_argument(
        "--replay", type=Path, help="make the decisions of a live router's record again, and nothing else"
    )
    parser.add_argument("--requests", type=int, default=20_000, help="turns of all sessions together (%(default)s)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second and replica (%(default)s)")
    parser.add_argument("--blocks", type=int, default=1280, help="KV blocks of a replica, of 128 tokens (%(default)s)")
    parser.add_argument("--deaths", type=int, default=0, help="replicas that die on the way (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--jobs", type=int, default=1, help="policies that are simulated at once, each in a process (%(default)s)"
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=NAMES,
        help="a policy to simulate, several times for several (default: all)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
