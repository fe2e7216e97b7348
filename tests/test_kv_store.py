"""What was computed once is not computed again, over evictions and the death of everything, unless it is reset."""

from pathlib import Path

import httpx
import pytest

from tests.soak.kv_store import Store, run
from tests.soak.kv_store_models import MODELS
from tests.soak.server import eventually, running_server


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_conversations_go_on_over_evictions_kills_and_damaged_files(model: str) -> None:
    soak, problems = run(12, 0, MODELS[model])
    assert problems == []
    num_computed = soak.num_computed - soak.num_computed_again  # how much seemed faster depends on the machine
    assert num_computed < soak.num_prompt_tokens * 2 / 3


def test_a_reset_forgets_what_is_in_memory_and_in_files(tmp_path: Path) -> None:
    with running_server("--kv-store", str(tmp_path)) as server:

        def num_cached() -> int:
            usage = server.complete(prompt=[*range(20, 400)], max_tokens=2)["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [num_cached(), num_cached()] == [0, 368]
        assert eventually(lambda: len(Store(tmp_path).files()) == 23)
        reset = httpx.post(f"{server.url}/reset_prefix_cache", params={"reset_external": True})
        assert reset.json() == {"success": True}
        assert eventually(lambda: not Store(tmp_path).files())
        assert [num_cached(), num_cached()] == [0, 368]


@pytest.mark.slow
def test_a_client_sees_and_drops_what_is_cached_under_its_key(tmp_path: Path) -> None:
    with running_server("--kv-store", str(tmp_path)) as server:

        def cached(**fields: str) -> int:
            usage = server.complete(prompt=[*range(20, 400)], max_tokens=2, **fields)["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached(prompt_cache_key="mine", prompt_cache_retention="24h") == 0
        assert eventually(lambda: len(Store(tmp_path).files()) == 23)
        [entry] = httpx.get(f"{server.url}/v1/cache").json()["data"]
        assert (entry["prompt_cache_key"], entry["memory_tokens"], entry["disk_tokens"]) == ("mine", 368, 368)
        assert entry["retained_tokens"] == 368 and 86_000_000 < entry["retained_ms"] <= 86_400_000
        assert httpx.delete(f"{server.url}/v1/cache", params={"prompt_cache_key": "mine"}).json()["deleted"]
        assert httpx.get(f"{server.url}/v1/cache").json()["data"] == []
        assert eventually(lambda: not Store(tmp_path).files())
        assert [cached(prompt_cache_retention="in_memory"), cached()] == [0, 368]
        assert Store(tmp_path).files() == []
