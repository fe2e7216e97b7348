"""`python -m tools.simulate`: compares routing policies over many replicas, in virtual time."""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence

from server.routing.policy import (
    LeastLoadedPolicy,
    PrefixAwarePolicy,
    RandomPolicy,
    RoundRobinPolicy,
    RoutingPolicy,
)
from tools.simulate.cluster import Cluster, ClusterSettings
from tools.simulate.replica import ReplicaSettings
from tools.simulate.results import Results, table
from tools.simulate.trace import TraceSettings, sessions


def policies(settings: ReplicaSettings, seed: int) -> dict[str, Callable[[], RoutingPolicy]]:
    """Returns what makes each routing policy, by its name."""
    return {
        "random": lambda: RandomPolicy(seed),
        "round-robin": RoundRobinPolicy,
        "least-loaded": LeastLoadedPolicy,
        "prefix-aware": lambda: PrefixAwarePolicy(max_digests=settings.num_blocks),
    }


def simulate(policy: RoutingPolicy, trace: TraceSettings, cluster: ClusterSettings, seed: int) -> Results:
    """Runs a trace to its end. Equal arguments give equal results."""
    return Cluster(cluster, policy, sessions(trace, seed), seed).run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    rate = options.rate * options.replicas
    trace = TraceSettings(options.requests, rate)
    replica = ReplicaSettings(num_blocks=options.blocks)
    if replica.num_blocks * replica.block_size < trace.max_model_len:
        parser.error(f"--blocks must have room for the {trace.max_model_len} tokens of the longest conversation")
    cluster = ClusterSettings(
        options.replicas, replica, num_deaths=options.deaths, deaths_until_s=options.requests / rate
    )
    makers = policies(replica, options.seed)
    results = {}
    gc.set_threshold(100_000, 50, 1000)  # nearly all objects here are the scheduler's, and none is a part of a cycle
    for name in options.policy or makers:
        started_s = time.monotonic()
        results[name] = simulate(makers[name](), trace, cluster, options.seed)
        print(f"{name}: {results[name].end_s:.0f} s in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    print(table(results))
    return int(any(each.num_wrong for each in results.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.simulate", description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--requests", type=int, default=20_000, help="turns of all sessions together (%(default)s)")
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second and replica (%(default)s)")
    parser.add_argument("--blocks", type=int, default=1280, help="KV blocks of a replica, of 128 tokens (%(default)s)")
    parser.add_argument("--deaths", type=int, default=0, help="replicas that die on the way (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--policy",
        action="append",
        choices=["random", "round-robin", "least-loaded", "prefix-aware"],
        help="a policy to simulate, several times for several (default: all)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
