"""A prefix is found block by block, for equal tokens after equal tokens with an equal salt only."""

from engine.core.request import Request
from engine.scheduling.prefix_cache import NullPrefixCache, PrefixCache
from tests.engine.requests import queued


def request(tokens: list[int], blocks: list[int] | None = None, salt: str = "") -> Request:
    made = queued("r", tokens, cache_salt=salt)
    made.block_table = blocks or []
    return made


def filled(tokens: list[int], blocks: list[int], salt: str = "") -> PrefixCache:
    cache = PrefixCache(2)
    cache.insert(request(tokens, blocks, salt), 0, len(tokens) // 2)
    return cache


def test_the_longest_common_prefix_of_full_blocks_is_found() -> None:
    cache = filled([1, 2, 3, 4, 5, 6], [7, 8, 9])
    assert cache.match(request([1, 2, 3, 4, 9, 9]), 3) == [7, 8]
    assert cache.match(request([1, 2, 3, 4, 5, 6, 7]), 3) == [7, 8, 9]
    assert cache.match(request([1, 2, 3, 4, 5, 6]), 1) == [7]


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    cache = filled([1, 2, 3, 4], [7, 8])
    assert cache.match(request([5, 6, 3, 4]), 2) == []
    assert cache.match(request([3, 4]), 1) == []


def test_a_block_is_not_found_behind_another_prefix_that_is_cached_too() -> None:
    cache = filled([1, 2, 3, 4], [7, 8])
    cache.insert(request([5, 6, 7, 8], [9, 10]), 0, 2)
    assert cache.match(request([1, 2, 7, 8]), 2) == [7]


def test_salts_do_not_share_blocks() -> None:
    cache = filled([1, 2], [7], salt="alice")
    assert cache.match(request([1, 2], salt="bob"), 1) == []
    assert cache.match(request([1, 2], salt="alice"), 1) == [7]


def test_the_first_of_two_equal_blocks_is_kept() -> None:
    cache = filled([1, 2], [7])
    cache.insert(request([1, 2], [8]), 0, 1)
    assert cache.match(request([1, 2]), 1) == [7]
    assert not cache.holds(8)


def test_a_forgotten_block_is_not_found_again() -> None:
    cache = filled([1, 2, 3, 4], [7, 8])
    cache.forget(7)
    assert cache.match(request([1, 2, 3, 4]), 2) == []
    assert not cache.holds(7) and cache.holds(8)


def test_blocks_of_generated_tokens_are_found_too() -> None:
    cache = PrefixCache(2)
    talk = request([1], [7, 8])
    talk.output_token_ids += [2, 3, 4]
    cache.insert(talk, 0, 2)
    assert cache.match(request([1, 2, 3, 4, 5]), 2) == [7, 8]


def test_the_null_cache_finds_nothing() -> None:
    cache = NullPrefixCache()
    cache.insert(request([1, 2], [7]), 0, 1)
    assert cache.match(request([1, 2]), 1) == [] and not cache.holds(7)
