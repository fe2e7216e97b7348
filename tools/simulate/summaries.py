"""One simulation from its beginning to its end, in whichever process."""

import gc
import sys
import time
from dataclasses import dataclass

from server.routing.policies import new_policy
from tools.simulate.cluster import Cluster, ClusterSettings
from tools.simulate.progress import Progress
from tools.simulate.results import Results
from tools.simulate.trace import TraceSettings, sessions


@dataclass(frozen=True, slots=True)
class Summary:
    """What is told of a simulation."""

    row: dict[str, str]
    num_wrong: int


def simulate(name: str, trace: TraceSettings, cluster: ClusterSettings, seed: int) -> Results:
    """Runs a trace to its end, under the policy of this name. Equal arguments give equal results."""
    policy, prefill_policy = (
        new_policy(name, seed=seed, max_digests=cluster.replica.num_blocks) for _ in ("decode", "prefill")
    )
    progress = Progress(name, trace.num_requests)
    return Cluster(cluster, policy, sessions(trace, seed), seed, prefill_policy).run(progress)


def summary_of(name: str, trace: TraceSettings, cluster: ClusterSettings, seed: int) -> Summary:
    """Simulates, and tells what that took."""
    gc.set_threshold(100_000, 50, 1000)  # nearly all objects here are the scheduler's, and none is a part of a cycle
    started_s = time.monotonic()
    results = simulate(name, trace, cluster, seed)
    print(f"{name}: {results.end_s:.0f} s in {time.monotonic() - started_s:.0f} s", file=sys.stderr)
    return Summary(results.row(), results.num_wrong)
