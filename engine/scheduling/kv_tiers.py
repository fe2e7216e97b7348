"""A KV allocator with a second tier, the KV store: blocks are written there as they become full, and read back into
memory where a waiting request's prefix goes on there; torch-free.

It decides what is transferred and holds the blocks meanwhile: one reference for each transfer. What is read arrives in
the prefix cache, where its request finds it like anything else. So a request may end while its prefix is being read,
and a damaged file is a shorter match. What another server announced for a request is read whatever it takes: it was
computed elsewhere so that no step here has to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.batch import BlockTransfer, Direction, EndedTransfer
from engine.core.request import Request
from engine.core.stored_blocks import StoredBlocks
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.draft_kv import DraftKV
from engine.scheduling.kv_allocator import FoundPrefix, KVAllocator, PrefixMatch
from engine.scheduling.prefix_cache import PrefixCache

_FIRST_READ_S = 0.001  # of a block, before any was read
_LEARNED = 0.1  # share of a new read in what a block is expected to take
_FORGOTTEN = 0.05  # share by which that falls with each read that did not seem to pay: disks recover
_MIN_PATIENCE_S = 1.0
_PATIENCE_S = 10.0  # where the price of computing is unknown
_MAX_LOADS = 3  # for a request: what was read for it may have to make room before it runs
_SHARE_STORING = 8  # at most one block in so many is held for being written alone


@dataclass(slots=True, eq=False)
class _Load:
    """The reading of a prefix, from its first block that is not in memory."""

    request: Request
    block_ids: list[int]
    """All that is held for it: the blocks of the prefix that are in memory, and those that are read."""
    block_hashes: Sequence[bytes]
    """Of the blocks that are read."""
    deadline_s: float
    """When computing is taken to be faster after all."""
    num_left: int
    num_verified: int = 0
    """Blocks that were read, before the first that could not be."""
    is_outdated: bool = False
    """Whether the prefix cache forgot what it reads since it began."""


class TieredKVAllocator(KVAllocator):
    """A `KVAllocator` over memory and the KV store."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache,
        draft_kv: DraftKV,
        stored: StoredBlocks,
        costs: StepCosts,
        max_retained: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, cache, draft_kv=draft_kv, max_retained=max_retained)
        self._hashed = cache
        self._stored = stored
        self._costs = costs
        self._read_s = _FIRST_READ_S
        self._to_load: list[BlockTransfer] = []
        self._loads: dict[int, _Load] = {}  # by the block that is read
        self._load_of: dict[str, _Load] = {}  # by the request that waits for it: several may for one
        self._load_of_hash: dict[bytes, _Load] = {}
        self._to_store: dict[int, BlockTransfer] = {}  # by block, oldest first
        self._storing: set[bytes] = set()  # hashes of the blocks that are being written
        self._found = set(cache.found)  # which an earlier engine may not have stored
        self._max_storing = max(1, num_blocks // _SHARE_STORING)

    @property
    def has_transfers(self) -> bool:
        return bool(self._loads or self._to_store or self._storing)

    def try_start(self, request: Request, match: PrefixMatch, spare: int) -> bool:
        if not super().try_start(request, match, spare):
            return False
        self._stored.touch(self._hashed.hashes(request, len(match.block_ids)))
        for index, block_id in enumerate(match.block_ids if self._found or request.until_stored else ()):
            if request.until_stored or block_id in self._found:
                self._found.discard(block_id)
                self._on_new_block(request, index)
        if request.first_scheduled_s is None:
            self.prefix_disk_hits += min(request.num_loaded_tokens, request.num_computed_tokens)
        waited_for = self._load_of.pop(request.request_id, None)
        if request.num_loads == _MAX_LOADS or (waited_for is not None and waited_for.num_left > 0):
            computed = self._readable_hashes(request, len(match.block_ids))
            self.prefix_disk_declined += self._stored.num_stored(computed) * self._block_size
        return True

    def free(self, request: Request) -> None:
        self._load_of.pop(request.request_id, None)
        self._stored.touch(request.block_hashes)
        super().free(request)

    def reset(self) -> None:
        super().reset()
        for load in self._loads.values():
            load.is_outdated = True

    def drop_prefixes(self, tenant: str, key: str | None) -> list[bytes]:
        dropped = super().drop_prefixes(tenant, key)
        for block_hash in dropped:
            if block_hash in self._load_of_hash:
                self._load_of_hash[block_hash].is_outdated = True
        return dropped

    def take_transfers(self) -> tuple[BlockTransfer, ...]:
        loads, self._to_load = self._to_load, []
        stores = []
        while self._to_store and len(self._storing) < self._max_storing:
            transfer = self._to_store.pop(next(iter(self._to_store)))
            if self._hashed.hash_of(transfer.block_id) == transfer.block_hash:  # else it was taken for other tokens
                self._pool.try_allocate(0, [transfer.block_id])
                self._storing.add(transfer.block_hash)
                stores.append(transfer)
        return (*loads, *stores)

    def end_transfers(self, ended: Sequence[EndedTransfer]) -> None:
        for each in ended:
            if each.transfer.direction is Direction.STORE:
                self._storing.discard(each.transfer.block_hash)
                self._pool.release([each.transfer.block_id])
            else:
                self._end_load(each)

    def try_load(self, request: Request, spare: int, now_s: float) -> bool:
        waited_for = self._load_of.get(request.request_id)
        took_too_long = waited_for is not None and waited_for.num_left > 0
        if took_too_long or request.num_loads == _MAX_LOADS or not self._cache.can_match(request):
            return False
        in_memory = self.match(request).block_ids
        self._stored.announce(self._readable_hashes(request, 0)[: request.num_announced_tokens // self._block_size])
        wanted = self._readable_hashes(request, len(in_memory))
        if wanted and self._waits_for_another(request, wanted[0], now_s):
            return True
        num_read = self._stored.num_stored(wanted)
        compute_s = self._costs.prefill_price(len(in_memory) * self._block_size, num_read * self._block_size)
        if num_read == 0:
            return False
        if not request.num_announced_tokens and not self._pays(num_read, compute_s):
            request.num_loads = _MAX_LOADS
            return False
        block_ids = self._pool.try_allocate(num_read, in_memory, spare)
        if block_ids is None:
            return False
        self._draft_kv.allocated(block_ids[len(in_memory) :])  # files hold the model's KV only
        patience_s = _PATIENCE_S if compute_s is None else max(compute_s, _MIN_PATIENCE_S)
        load = _Load(request, block_ids, wanted[:num_read], now_s + patience_s, num_read)
        request.num_loads += 1
        request.num_announced_tokens = 0
        self._load_of[request.request_id] = load
        self._load_of_hash |= dict.fromkeys(load.block_hashes, load)
        for index, block_id in enumerate(block_ids[len(in_memory) :], len(in_memory)):
            self._loads[block_id] = load
            self._to_load.append(self._transfer(Direction.LOAD, request, index, block_id))
        return True

    def is_loading(self, request: Request, now_s: float) -> bool:
        load = self._load_of.get(request.request_id)
        return load is not None and load.num_left > 0 and now_s < load.deadline_s

    def _readable_hashes(self, request: Request, start: int) -> Sequence[bytes]:
        """The hashes of the blocks, from this one on, that may be read for it: its last token is always computed."""
        return self._hashed.hashes(request, (request.num_tokens - 1) // self._block_size)[start:]

    def _waits_for_another(self, request: Request, block_hash: bytes, now_s: float) -> bool:
        """Has the request wait for another's load that reads this block, if there is one, before it asks again."""
        load = self._load_of_hash.get(block_hash)
        if load is None or now_s >= load.deadline_s:
            return False
        self._load_of[request.request_id] = load
        return True

    def _pays(self, num_read: int, compute_s: float | None) -> bool:
        """Whether reading these blocks, after those before them, is expected to take less time than computing them."""
        if compute_s is None or self._read_s * (len(self._loads) + num_read) < compute_s:
            return True
        self._read_s *= 1 - _FORGOTTEN
        return False

    def _end_load(self, ended: EndedTransfer) -> None:
        block_id, block_hash = ended.transfer.block_id, ended.transfer.block_hash
        load = self._loads.pop(block_id)
        load.num_left -= 1
        if self._load_of_hash.get(block_hash) is load:
            del self._load_of_hash[block_hash]
        if ended.succeeded:
            self._read_s += _LEARNED * (ended.seconds - self._read_s)
            load.num_verified += load.block_hashes[load.num_verified] == block_hash
            if not load.is_outdated:
                self._hashed.put(block_hash, block_id)
        if load.num_left == 0:
            self._pool.release(load.block_ids)
            load.request.num_loaded_tokens = load.num_verified * self._block_size

    def found(self, request: Request) -> FoundPrefix:
        num_cached = len(self.match(request).block_ids)
        hashes = self._readable_hashes(request, 0)
        num_stored = self._stored.num_stored(hashes)
        num_cached += self._stored.num_stored(hashes[num_cached:])
        return FoundPrefix(num_cached * self._block_size, num_stored * self._block_size)

    def num_stored_tokens(self, request: Request) -> int | None:
        if any(map(self._is_storing, reversed(request.block_hashes))):  # the last block is stored last
            return None
        return self._stored.num_stored(request.block_hashes) * self._block_size

    def _is_storing(self, block_hash: bytes) -> bool:
        block_id = self._hashed.block_of(block_hash)
        queued = None if block_id is None else self._to_store.get(block_id)
        return block_hash in self._storing or (queued is not None and queued.block_hash == block_hash)

    def _count_stored(self, block_hashes: Sequence[bytes]) -> int:
        return sum(self._stored.num_stored([block_hash]) for block_hash in block_hashes)

    def _on_new_block(self, request: Request, index: int) -> None:
        block_hash = request.block_hashes[index]
        is_there = block_hash in self._storing or self._stored.num_stored([block_hash])
        if not request.steering.stays_in_memory and not is_there:
            block_id = request.block_table[index]
            self._to_store.pop(block_id, None)  # of other tokens: the newest goes last
            self._to_store[block_id] = self._transfer(Direction.STORE, request, index, block_id)

    def _transfer(self, direction: Direction, request: Request, index: int, block_id: int) -> BlockTransfer:
        start = index * self._block_size
        token_ids = tuple(request.token_ids(start, start + self._block_size))
        return BlockTransfer(direction, block_id, request.block_hashes[index], token_ids)
