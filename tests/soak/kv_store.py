"""Holds more conversations than fit into memory over a KV store, kills everything in the midst, and damages files.

    python -m tests.soak.kv_store --conversations 1000

Starts servers of its own with the embedded model or, with `--model`, with one of random weights that has recurrent
states or windows. The exit code is 0 if every answer is that of a server which nothing happened to, to the last bit of
the log-probabilities; if no token was computed that a file had, unless the server says that computing seemed faster;
and if the files stayed within their budget.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

import httpx

from engine.core.sampling_params import SamplingParams
from engine.scheduling.prefix_cache import PrefixCache
from tests.engine.requests import queued
from tests.soak.kv_store_models import BLOCK_SIZE, EMBEDDED, MODELS, ServedModel
from tests.soak.server import ServerProcess, eventually, running_server

NUM_WORDS = 2000  # token ids that users say
NUM_TURNS = 4
MAX_FILE_BYTES = 1 << 16  # more than a block of the embedded model takes, or states of the other


@dataclass(frozen=True)
class Turn:
    """One answer, as far as it may not depend on anything else."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Conversation:
    """What was said so far, and the answers."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def next_prompt(self) -> list[int]:
        """Returns all that was said and what the user says now, which index and turn decide."""
        chance = random.Random(f"{self.index} {len(self.turns)}")
        length = chance.randrange(20, 120) if self.turns else chance.randrange(150, 400)
        return [*self.token_ids, *(chance.randrange(10, NUM_WORDS) for _ in range(length))]

    def next_body(self) -> dict[str, Any]:
        how = {"temperature": 0} if self.index % 2 else {"temperature": 1.1, "top_p": 0.95, "seed": self.index}
        answer = {"max_tokens": 24 + self.index % 9, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
        return {"prompt": self.next_prompt(), **answer, **how}


class StoredNames:
    """The names of a store's files, each looked for when it is asked for: a store has tens of thousands."""

    def __init__(self, root: Path) -> None:
        self._folders = [path for path in root.iterdir() if path.is_dir()]

    def __contains__(self, name: object) -> bool:
        return any((folder / str(name)).is_file() for folder in self._folders)


@dataclass
class Store:
    """The files of a store, seen from outside."""

    root: Path
    model: ServedModel = EMBEDDED

    def sizes(self) -> list[int]:
        return [path.stat().st_size for path in self.files()]

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file() and len(path.name) == 64)

    def num_tokens(self, prompt: Sequence[int]) -> int:
        """Returns how many of a prompt's tokens, but for the last, a server could go on from by the files."""
        request = queued("", list(prompt), SamplingParams())
        hashes = PrefixCache(BLOCK_SIZE).hashes(request, (len(prompt) - 1) // BLOCK_SIZE)
        return BLOCK_SIZE * self.model.num_stored_blocks(hashes, StoredNames(self.root))

    def damage(self, share: float, chance: random.Random) -> int:
        """Cuts files, flips bits in them and puts others in their place; returns how many."""
        files = self.files()
        damaged = chance.sample(files, int(share * len(files)))
        for path in damaged:
            content = bytearray(path.read_bytes())
            at = chance.randrange(len(content))
            how = chance.randrange(3)
            if how == 0:
                content[at] ^= 1 << chance.randrange(8)
            path.write_bytes((content, content[:at], chance.choice(files).read_bytes())[how] if how else content)
        return len(damaged)


@dataclass
class Soak:
    """Conversations with a server, whose answers are compared with those of another one."""

    conversations: list[Conversation]
    store: Store | None = None
    num_prompt_tokens: int = 0
    num_computed: int = 0
    num_computed_again: int = 0
    """Tokens that a file held when their request was sent, and that were computed all the same."""

    def hold_turn(self, server: ServerProcess) -> None:
        """Holds one turn of every conversation, eight at a time."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda each: self._ask(server, each), self.conversations))

    def _ask(self, server: ServerProcess, conversation: Conversation) -> None:
        body = conversation.next_body()
        num_stored = self.store.num_tokens(body["prompt"]) if self.store else 0
        answer = server.complete(**body)
        choice, usage = answer["choices"][0], answer["usage"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.num_prompt_tokens += len(body["prompt"])
        self.num_computed += len(body["prompt"]) - num_cached
        self.num_computed_again += max(num_stored - num_cached, 0)
        conversation.turns.append(Turn(choice["token_ids"], choice["logprobs"]["token_logprobs"]))
        conversation.token_ids = [*body["prompt"], *choice["token_ids"]]

    def abandon_turn(self, server: ServerProcess) -> None:
        """Kills server and engine while they hold a turn of every conversation, of which none counts."""
        before = [(len(each.turns), each.token_ids) for each in self.conversations]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(self._ask, server, each) for each in self.conversations]
            done = asked[len(asked) // 2]
            eventually(done.done, within_s=3600)
            server.signal_all(SIGKILL)
            problems = [problem for each in asked if (problem := each.exception())]
        assert all(isinstance(each, httpx.HTTPError) for each in problems), problems
        for conversation, (num_turns, token_ids) in zip(self.conversations, before, strict=True):
            conversation.turns, conversation.token_ids = conversation.turns[:num_turns], token_ids


def new_conversations(number: int) -> list[Conversation]:
    return [Conversation(index) for index in range(number)]


def undisturbed(number: int, model: Sequence[str]) -> list[Conversation]:
    soak = Soak(new_conversations(number))
    with running_server(*model, "--no-enable-prefix-caching", "--max-queue-time", "3600") as server:
        for _ in range(NUM_TURNS):
            soak.hold_turn(server)
    return soak.conversations


def disturbed(
    number: int, root: Path, chance: random.Random, model: ServedModel, model_flags: Sequence[str]
) -> tuple[Soak, list[str]]:
    """Holds the conversations with a tenth of the memory that they take, and returns them with the problems."""
    store, problems = Store(root, model), []
    num_blocks = max(128, number * 30 // 10) * model.groups.num_groups
    max_bytes = number * 40 * model.groups.num_groups * MAX_FILE_BYTES
    flags = [*model_flags, "--kv-store", str(root), "--kv-store-bytes", str(max_bytes), "--max-queue-time", "3600"]
    flags += ["--num-gpu-blocks-override", str(num_blocks), "--max-num-seqs", "8"]
    soak = Soak(new_conversations(number), store)
    with running_server(*flags) as server:
        soak.hold_turn(server)
        soak.hold_turn(server)
        problems += computed_again(soak, server)
        soak.abandon_turn(server)
    num_before = soak.num_computed_again
    with running_server(*flags) as server:
        soak.hold_turn(server)
        problems += wrong_size(store, max_bytes) + computed_again(soak, server, num_before)
        num_damaged = store.damage(0.05, chance)
        soak.hold_turn(server)
        problems += unread(server, num_damaged)
        if not eventually(server.is_idle):
            problems.append("requests or blocks are left behind")
        problems += wrong_size(store, max_bytes)
    return soak, problems


def unread(server: ServerProcess, num_damaged: int) -> list[str]:
    """Returns what the server should have read or found damaged; a slow disk may be declined from the first."""
    now = server.metrics()
    num_found, num_declined = (now[f"twostep_kv_store_{each}_total"] for each in ("damaged_files", "declined_tokens"))
    problems = []
    if num_found > num_damaged or not (num_found or num_declined):
        problems.append(f"{num_found} of {num_damaged} damaged files were found")
    if not (now["twostep_prefix_cache_hits_by_tier_total{tier=disk}"] or num_declined):
        problems.append("nothing was read")
    return problems


def computed_again(soak: Soak, server: ServerProcess, num_before: int = 0) -> list[str]:
    num_declined = server.metrics()["twostep_kv_store_declined_tokens_total"]
    num_again = soak.num_computed_again - num_before
    text = f"{num_again} tokens were computed that files held, {num_declined} because that seemed faster"
    return [text] if num_again > num_declined else []


def wrong_size(store: Store, max_bytes: int) -> list[str]:
    num_bytes = sum(store.sizes())
    return [] if num_bytes <= max_bytes else [f"the files have {num_bytes} bytes, more than {max_bytes}"]


def run(number: int, seed: int, model: ServedModel = EMBEDDED) -> tuple[Soak, list[str]]:
    """Returns the disturbed conversations and the problems."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twostep-model-") as directory:
        flags = model.flags_in(Path(directory))
        expected = undisturbed(number, flags)
        seconds = time.monotonic() - started_s
        print(f"undisturbed: {number} conversations of {NUM_TURNS} turns, {seconds:.0f} s", flush=True)
        with tempfile.TemporaryDirectory(prefix="twostep-kv-") as root:
            soak, problems = disturbed(number, Path(root), random.Random(seed), model, flags)
    pairs = zip(soak.conversations, expected, strict=True)
    problems += [f"conversation {own.index}: another answer" for own, other in pairs if own.turns != other.turns]
    return soak, problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of what is damaged")
    parser.add_argument("--model", choices=MODELS, default="embedded", help="which to serve (default: embedded)")
    arguments = parser.parse_args()
    soak, problems = run(arguments.conversations, arguments.seed, MODELS[arguments.model])
    again = f"{soak.num_computed_again} of these though a file held them"
    print(f"{soak.num_prompt_tokens} prompt tokens, {soak.num_computed} computed, {again}", flush=True)
    print("\n".join(problems) or "every answer equal, nothing computed twice, the files within their budget")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
