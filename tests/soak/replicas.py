"""Streams over several replicas on Ray Serve: replicas are killed, added and taken away while they run.

    python -m tests.soak.replicas kills --streams 200 --kills 20
    python -m tests.soak.replicas typed --streams 70 --kills 12
    python -m tests.soak.replicas routing
    python -m tests.soak.replicas scaling
    python -m tests.soak.replicas roles --streams 20 --kills 5

Starts a Ray of its own, with the embedded model; needs the extra `ray`. `kills` compares all tokens with an undisturbed
run, `typed` all events of Responses and Messages, and lines of Ollama's API, but for their times. `routing` puts the
same load, of prompts that begin alike, on a random and on a prefix-aware routing. `scaling` has one replica become
three under load, and one again behind it. `roles` has prompts computed by replicas of their own, which are killed
meanwhile, and compares all tokens with those of one that does both. The exit code is 0 if nothing was lost.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.soak.kills import Answer, body_of, disturbed, stream
from tests.soak.typed_streams import typed_body_of, typed_stream

NAME = "soak"
NO_DRAFTS = ("--num-speculative-tokens", "0")  # each step's events are those of one token, in every run
FLAGS = ["--max-waiting", "1000", "--max-queue-time", "3600", "--log-level", "warning"]
SETTINGS = {"num_cpus": 0.5, "report_s": 0.5, "replica_wait_s": 600.0}  # of cores that all processes share


@contextmanager
def running_app(port: int, flags: Sequence[str] = (), **settings: Any) -> Iterator[httpx.AsyncClient]:
    """Runs the application, ready, on a Ray of its own. Here all processes of a cluster share few cores: Ray's own
    checks of its proxy would take that for dead."""
    for what in ("HEALTH", "READY"):
        os.environ[f"RAY_SERVE_PROXY_{what}_CHECK_TIMEOUT_S"] = "120"
    import ray
    from ray import serve

    from deploy.ray import app
    from deploy.ray.settings import ClusterSettings

    ray.init(num_cpus=8, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        serve.run(app(ClusterSettings(arguments=[*FLAGS, *flags], **{**SETTINGS, **settings})), name=NAME)
        limits = httpx.Limits(max_connections=None)
        yield httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None, limits=limits)
    finally:
        serve.shutdown()
        ray.shutdown()


def pids_of(what: str) -> list[int]:
    """Returns the processes whose command lines contain `what`: of replicas, and of servers that are theirs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if what in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return sorted(found)


def replica_pids(deployment: str = "Replica") -> list[int]:
    return pids_of(f"ServeReplica:{NAME}:{deployment}")


def server_pids(deployment: str = "Replica") -> list[int]:
    """Returns the processes of the replicas' servers."""
    return [pid for replica in replica_pids(deployment) for pid in pids_of(f"deploy.ray.child {replica} ")]


async def kill_replicas(num_kills: int, mean_s: float, chance: random.Random, deployment: str = "Replica") -> int:
    """Kills replicas at random moments: the actor's process, only the server's, or all servers at once, so that none is
    left for a while. Returns how many kills are left: 0."""
    while num_kills:
        await asyncio.sleep(chance.expovariate(1 / mean_s))
        if pids := (replica_pids, server_pids)[num_kills % 3 == 0](deployment):
            for pid in pids if num_kills % 6 == 0 else [chance.choice(pids)]:
                os.kill(pid, signal.SIGKILL)
            num_kills -= 1
    return num_kills


async def soak_kills(arguments: argparse.Namespace) -> list[str]:
    bodies = [body_of(index, arguments.max_tokens) for index in range(arguments.streams)]
    return await _soak_kills(arguments, bodies, stream)


async def soak_typed(arguments: argparse.Namespace) -> list[str]:
    bodies = [typed_body_of(index, arguments.max_tokens) for index in range(arguments.streams)]
    return await _soak_kills(arguments, bodies, typed_stream, NO_DRAFTS)


async def _soak_kills(
    arguments: argparse.Namespace, bodies: list[dict[str, Any]], run: Any, flags: Sequence[str] = ()
) -> list[str]:
    replicas = {"min_replicas": arguments.replicas, "max_replicas": arguments.replicas}
    with running_app(arguments.port, flags, **replicas) as client:
        answers = await asyncio.gather(*(run(client, body) for body in bodies))
        print(f"undisturbed: {len(answers)} streams", flush=True)
        killer = asyncio.create_task(kill_replicas(arguments.kills, arguments.mean_seconds, random.Random(0)))
        problems, num_streams, num_tokens = await disturbed(client, bodies, answers, killer, run)
        await killer
        num_whole = num_streams - len(problems)
        print(f"{arguments.kills} kills: {num_whole} of {num_streams} streams, {num_tokens} tokens", flush=True)
        return problems


def session(agent: int, number: int, turn: int) -> dict[str, Any]:
    """Returns a turn of a session: its prompt begins with its agent's text, and with the turns before."""
    beginning = f"Agent {agent} has tools. " * 20
    turns = "".join(f"Turn {each} of session {number} says something. " * 4 for each in range(turn + 1))
    return {"prompt": beginning + turns, "max_tokens": 4, "temperature": 0, "stream": False}


async def soak_routing(arguments: argparse.Namespace) -> list[str]:
    """Runs the same sessions with each routing, and prints the ratios."""
    hit_rates, ttfts, texts = {}, {}, {}
    for routing in ("random", "prefix-aware"):
        with running_app(arguments.port, min_replicas=3, max_replicas=3, routing=routing) as client:
            found: dict[tuple[int, int], dict[str, Any]] = {}

            async def turns(number: int, client: httpx.AsyncClient = client, found: dict[Any, Any] = found) -> None:
                for turn in range(8):
                    found[number, turn] = (
                        await client.post("/v1/completions", json=session(number % 4, number, turn))
                    ).json()

            await asyncio.gather(*(turns(number) for number in range(24)))
            metrics = (await client.get("/metrics")).text
        totals = totals_of(metrics)
        hit_rates[routing] = totals["twostep_prefix_cache_hits_total"] / totals["twostep_prefix_cache_queries_total"]
        ttfts[routing] = statistics.mean(each["timings"]["ttft_ms"] for each in found.values())
        texts[routing] = {key: each["choices"][0]["text"] for key, each in found.items()}
        print(f"{routing}: hit rate {hit_rates[routing]:.2f}, mean TTFT {ttfts[routing]:.0f} ms", flush=True)
    print(f"mean TTFT, prefix-aware / random: {ttfts['prefix-aware'] / ttfts['random']:.2f}")
    return [] if texts["random"] == texts["prefix-aware"] else ["answers depend on the routing"]


async def soak_scaling(arguments: argparse.Namespace) -> list[str]:
    bodies = [body_of(index, arguments.max_tokens) for index in range(arguments.streams)]
    settings = {"sequences_per_replica": 8, "upscale_s": 1.0, "downscale_s": 5.0, "look_back_s": 11.0}
    with running_app(arguments.port, min_replicas=1, max_replicas=3, **settings) as client:
        answers: list[Answer] = await asyncio.gather(*(stream(client, body) for body in bodies[:20]))
        most = asyncio.create_task(wait_for(lambda num: num == 3))
        problems, *_ = await disturbed(client, bodies[:20], answers, most)
        fewest = asyncio.create_task(wait_for(lambda num: num == 1))
        while not fewest.done():  # a little load, so that streams run on what is taken away
            more, *_ = await disturbed(client, bodies[:2], answers, asyncio.create_task(asyncio.sleep(0)))
            problems += more
        return problems


async def soak_roles(arguments: argparse.Namespace) -> list[str]:
    bodies = [body_of(index, arguments.max_tokens) for index in range(arguments.streams)]
    with running_app(arguments.port, max_replicas=1) as client:
        answers: list[Answer] = await asyncio.gather(*(stream(client, body) for body in bodies))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as store:
        flags = ["--kv-store", store, "--prefill-min-tokens", "32"]
        many = {"max_replicas": 1, "min_prefill_replicas": 2, "max_prefill_replicas": 2}
        url = f"http://127.0.0.1:{arguments.port}"
        with running_app(arguments.port, flags, gateway_url=url, **many) as client:
            kills = kill_replicas(arguments.kills, arguments.mean_seconds, random.Random(0), "Prefill")
            problems, num_streams, _ = await disturbed(client, bodies, answers, asyncio.create_task(kills))
            totals = totals_of((await client.get("/metrics")).text)
        asked = {result: totals.get(f"twostep_remote_prefills_total {result}", 0) for result in ("stored", "failed")}
        print(f"{arguments.kills} kills: {num_streams} streams; prompts computed apart: {asked}", flush=True)
        if not asked["stored"]:
            problems.append("no prompt was computed apart")
    return problems


def totals_of(metrics: str) -> dict[str, float]:
    """Returns each sample's sum over all replicas, by its name, and by its name and result where it has that label."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            for name in {sample.name, f"{sample.name} {sample.labels.get('result', '')}".strip()}:
                totals[name] = totals.get(name, 0.0) + sample.value
    return totals


async def wait_for(is_wanted: Any) -> None:
    started_s = time.monotonic()
    while not is_wanted(num := len(replica_pids())):
        await asyncio.sleep(0.5)
    print(f"{num} replicas after {time.monotonic() - started_s:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["kills", "typed", "routing", "scaling", "roles"])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--replicas", type=int, default=3, help="of kills and typed")
    parser.add_argument("--max-tokens", type=int, default=200, help="of the longest stream")
    parser.add_argument("--mean-seconds", type=float, default=6.0, help="between two kills")
    parser.add_argument("--port", type=int, default=8123)
    arguments = parser.parse_args()
    soaks = {
        "kills": soak_kills,
        "typed": soak_typed,
        "routing": soak_routing,
        "scaling": soak_scaling,
        "roles": soak_roles,
    }
    soak = soaks[arguments.what]
    problems = asyncio.run(soak(arguments))
    print("\n".join(problems) or "nothing was lost, every token is equal")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
