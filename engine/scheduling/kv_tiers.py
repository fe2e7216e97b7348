"""A KV allocator with a second tier, the KV store: blocks are written there as they become full, and read back into
memory where a waiting request's prefix goes on there; torch-free.

It decides what is transferred and holds the blocks meanwhile: one reference for each transfer. What is read arrives in
the prefix cache, where its request finds it like anything else. So a request may end while its prefix is being read,
and a damaged file is a shorter match. What another server announced for a request is read whatever it takes: it was
computed elsewhere so that no step here has to. If the model has recurrent states, a prefix goes as far as all its
blocks and the states after them are in either tier (`engine.scheduling.state_tiers`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.batch import BlockTransfer, Direction, EndedTransfer, StateTransfer, Transfer
from engine.core.request import Request
from engine.core.stored_blocks import StoredBlocks
from engine.scheduling.block_tables import BlockTables, Place, tables_of
from engine.scheduling.cost.step_cost import StepCosts
from engine.scheduling.draft_kv import DraftKV
from engine.scheduling.kv_allocator import KVAllocator, PrefixCounts, PrefixMatch
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.prefix_steering import NoPrefixSteering, PrefixSteering
from engine.scheduling.state_slots import NoStateSlots, StateSlots
from engine.scheduling.state_tiers import NoTieredCheckpoints, TieredCheckpoints
from engine.scheduling.tiered_prefixes import Reading, TieredPrefixes

_FIRST_READ_S = 0.001  # of a block, before any was read
_FIRST_STATES_READ_S = 0.01
_LEARNED = 0.1  # share of a new read in what a block is expected to take
_FORGOTTEN = 0.05  # share by which that falls with each read that did not seem to pay: disks recover
_MIN_PATIENCE_S = 1.0
_PATIENCE_S = 10.0  # where the price of computing is unknown
_MAX_LOADS = 3  # for a request: what was read for it may have to make room before it runs
_SHARE_STORING = 8  # at most one block in so many is held for being written alone


@dataclass(slots=True, eq=False)
class _Load:
    """The reading of what of a prefix is not in memory."""

    request: Request
    block_ids: list[int]
    """All that is held for it: the blocks of the prefix that are in memory, and those that are read."""
    places: dict[int, Place]
    """Places of the blocks that are read, by block."""
    num_usable: int
    """Blocks from which the request could have gone on without it."""
    deadline_s: float
    """When computing is taken to be faster after all."""
    num_left: int
    is_outdated: bool = False
    """Whether the prefix cache forgot what it reads since it began."""


class TieredKVAllocator(KVAllocator):
    """A `KVAllocator` over memory and the KV store."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cache: PrefixCache,
        slots: StateSlots | NoStateSlots,
        checkpoints: TieredCheckpoints | NoTieredCheckpoints,
        draft_kv: DraftKV,
        max_retained: int,
        tables: BlockTables | None = None,
        steering: PrefixSteering | NoPrefixSteering | None = None,
        *,
        stored: StoredBlocks,
        costs: StepCosts,
    ) -> None:
        super().__init__(num_blocks, block_size, cache, slots, checkpoints, draft_kv, max_retained, tables, steering)
        self._hashed = cache
        self._states = checkpoints
        self._prefixes = TieredPrefixes(self._matcher, cache, checkpoints, self._tables, stored)
        self._stored = stored
        self._costs = costs
        self._read_s = _FIRST_READ_S
        self._read_states_s = _FIRST_STATES_READ_S
        self._to_load: list[Transfer] = []
        self._loads: dict[Transfer, _Load] = {}
        self._load_of: dict[str, _Load] = {}  # by the request that waits for it: several may for one
        self._load_of_name: dict[bytes, _Load] = {}
        self._to_store: dict[int, BlockTransfer] = {}  # by block, oldest first
        self._storing: set[bytes] = set()  # names of the blocks that are being written
        self._found = set(cache.found)  # which an earlier engine may not have stored
        self._max_storing = max(1, num_blocks // _SHARE_STORING)

    @property
    def has_transfers(self) -> bool:
        return bool(self._loads or self._to_store or self._storing or self._states.has_stores)

    def try_start(self, request: Request, match: PrefixMatch, spare: int) -> bool:
        if not super().try_start(request, match, spare):
            return False
        self._stored.touch(self._prefixes.names(self._hashed.hashes(request, match.num_blocks)))
        self._store_found(request, match.num_blocks)
        if request.asked.until_stored:
            self._states.store_again(request)
        if request.first_scheduled_s is None:
            self.prefix_disk_hits += min(request.num_loaded_tokens, request.num_computed_tokens)
        waited_for = self._load_of.pop(request.request_id, None)
        if request.num_loads == _MAX_LOADS or (waited_for is not None and waited_for.num_left > 0):
            self.prefix_disk_declined += max(self._prefixes.reading(request).num_gained, 0) * self._block_size
        return True

    def free(self, request: Request) -> None:
        self._load_of.pop(request.request_id, None)
        self._stored.touch(self._prefixes.names(request.block_hashes))
        super().free(request)

    def reset(self) -> None:
        super().reset()
        for load in self._loads.values():
            load.is_outdated = True

    def drop_prefixes(self, tenant: str, key: str | None) -> list[bytes]:
        dropped = self._prefixes.in_all_groups(self._states.all_names(super().drop_prefixes(tenant, key)))
        for name in dropped:
            if name in self._load_of_name:
                self._load_of_name[name].is_outdated = True
        return dropped

    def take_transfers(self) -> tuple[Transfer, ...]:
        loads, self._to_load = self._to_load, []
        stores = []
        while self._to_store and len(self._storing) < self._max_storing:
            transfer = self._to_store.pop(next(iter(self._to_store)))
            if self._hashed.hash_of(transfer.block_id) == transfer.name:  # else it was taken for other tokens
                self._pool.try_allocate(0, [transfer.block_id])
                self._storing.add(transfer.name)
                stores.append(transfer)
        return (*loads, *stores, *self._states.take_stores())

    def end_transfers(self, ended: Sequence[EndedTransfer]) -> None:
        for each in ended:
            if each.transfer.direction is Direction.LOAD:
                self._end_load(each)
            elif isinstance(each.transfer, StateTransfer):
                self._states.end_store(each.transfer)
            else:
                self._storing.discard(each.transfer.name)
                self._pool.release([each.transfer.block_id])

    def try_load(self, request: Request, spare: int, now_s: float) -> bool:
        waited_for = self._load_of.get(request.request_id)
        took_too_long = waited_for is not None and waited_for.num_left > 0
        if took_too_long or request.num_loads == _MAX_LOADS or not self._cache.can_match(request):
            return False
        announced = self._prefixes.readable_hashes(request)[: request.num_announced_tokens // self._block_size]
        self._stored.announce(self._prefixes.names(announced))
        reading = self._prefixes.reading(request)
        if reading.num_gained <= 0:
            return False
        if self._waits_for_another(request, self._prefixes.first_name(request, reading), now_s):
            return True
        num_tokens = (reading.num_usable * self._block_size, reading.num_gained * self._block_size)
        compute_s = self._costs.prefill_price(*num_tokens)
        has_no_slot = reading.reads_states and not self._states.can_load
        if has_no_slot or not (request.num_announced_tokens or self._pays(reading, compute_s)):
            request.num_loads = _MAX_LOADS
            return False
        patience_s = _PATIENCE_S if compute_s is None else max(compute_s, _MIN_PATIENCE_S)
        return self._try_begin(request, reading, spare, now_s + patience_s)

    def is_loading(self, request: Request, now_s: float) -> bool:
        load = self._load_of.get(request.request_id)
        return load is not None and load.num_left > 0 and now_s < load.deadline_s

    def _try_begin(self, request: Request, reading: Reading, spare: int, deadline_s: float) -> bool:
        """Begins to read it for the request, if there is room."""
        block_ids = self._pool.try_allocate(len(reading.missing), reading.in_memory, spare)
        if block_ids is None:
            return False
        places = dict(zip(block_ids[len(reading.in_memory) :], reading.missing, strict=True))
        self._draft_kv.allocated(tuple(places))  # files hold the model's KV only
        transfers: list[Transfer] = [
            self._transfer(Direction.LOAD, request, place, block_id) for block_id, place in places.items()
        ]
        if reading.reads_states:
            transfers.append(self._states.begin_load(request, reading.num_blocks))
        load = _Load(request, block_ids, places, reading.num_usable, deadline_s, len(transfers))
        request.num_loads += 1
        request.num_announced_tokens = 0
        self._load_of[request.request_id] = load
        self._load_of_name |= {transfer.name: load for transfer in transfers}
        self._loads |= dict.fromkeys(transfers, load)
        self._to_load += transfers
        return True

    def _waits_for_another(self, request: Request, name: bytes, now_s: float) -> bool:
        """Has the request wait for another's load that reads this file, if there is one, before it asks again."""
        load = self._load_of_name.get(name)
        if load is None or now_s >= load.deadline_s:
            return False
        self._load_of[request.request_id] = load
        return True

    def _pays(self, reading: Reading, compute_s: float | None) -> bool:
        """Whether this reading, after those before it, is expected to take less time than computing."""
        if compute_s is None:
            return True
        num_states = reading.reads_states + sum(isinstance(each, StateTransfer) for each in self._loads)
        num_files = len(self._loads) + len(reading.missing) + reading.reads_states
        if self._read_s * (num_files - num_states) + self._read_states_s * num_states < compute_s:
            return True
        self._read_s *= 1 - _FORGOTTEN
        self._read_states_s *= 1 - _FORGOTTEN
        return False

    def _end_load(self, ended: EndedTransfer) -> None:
        load = self._loads.pop(ended.transfer)
        load.num_left -= 1
        if self._load_of_name.get(ended.transfer.name) is load:
            del self._load_of_name[ended.transfer.name]
        self._take_loaded(load, ended, ended.succeeded and not load.is_outdated)
        if load.num_left == 0:
            self._pool.release(load.block_ids)
            num_gained = self.match(load.request).num_blocks - load.num_usable
            load.request.num_loaded_tokens = max(num_gained, 0) * self._block_size

    def _take_loaded(self, load: _Load, ended: EndedTransfer, is_kept: bool) -> None:
        """Has what was read found by what it holds, if it is kept."""
        if isinstance(ended.transfer, StateTransfer):
            self._states.end_load(ended.transfer, is_kept)
            if ended.succeeded:
                self._read_states_s += _LEARNED * (ended.seconds - self._read_states_s)
            return
        if is_kept:
            block_id = ended.transfer.block_id
            self._hashed.remember(load.request, *load.places[block_id], block_id)
        if ended.succeeded:
            self._read_s += _LEARNED * (ended.seconds - self._read_s)

    def found(self, request: Request) -> PrefixCounts:
        num_stored = self._prefixes.num_stored(request, self._prefixes.readable_hashes(request))
        num_there = self._prefixes.reading(request).num_blocks
        return PrefixCounts(num_there * self._block_size, num_stored * self._block_size)

    def num_stored_tokens(self, request: Request) -> int | None:
        hashes = request.block_hashes
        names = (key for each in reversed(hashes) for key in self._hashed.keys(each))  # the last are stored last
        if any(map(self._is_storing, names)) or self._states.is_storing(hashes):
            return None
        return self._prefixes.num_stored(request, hashes) * self._block_size

    def _is_storing(self, name: bytes) -> bool:
        block_id = self._hashed.block_of(name)
        queued = None if block_id is None else self._to_store.get(block_id)
        return name in self._storing or (queued is not None and queued.name == name)

    def _count_stored(self, block_hashes: Sequence[bytes]) -> int:
        return sum(self._stored.num_stored([block_hash]) for block_hash in block_hashes)

    def _store_found(self, request: Request, num_blocks: int) -> None:
        """Has those of the blocks behind which the request goes on written that may not be stored yet."""
        is_asked = request.asked.until_stored
        for index, group in self._tables.places(num_blocks) if self._found or is_asked else ():
            block_id = tables_of(request)[group][index]
            if is_asked or block_id in self._found:
                self._found.discard(block_id)
                self._on_new_block(request, index, group)

    def _on_new_block(self, request: Request, index: int, group: int) -> None:
        name = self._hashed.key(request, index, group)
        is_there = name in self._storing or self._stored.num_stored([name])
        if not request.asked.steering.stays_in_memory and not is_there:
            block_id = tables_of(request)[group][index]
            self._to_store.pop(block_id, None)  # of other tokens: the newest goes last
            self._to_store[block_id] = self._transfer(Direction.STORE, request, (index, group), block_id)

    def _transfer(self, direction: Direction, request: Request, place: Place, block_id: int) -> BlockTransfer:
        start = place[0] * self._block_size
        token_ids = tuple(request.token_ids(start, start + self._block_size))
        return BlockTransfer(direction, block_id, self._hashed.key(request, *place), token_ids)
