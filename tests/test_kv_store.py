"""What was computed once is not computed again, over evictions and the death of everything."""

from tests.soak.kv_store import run


def test_conversations_go_on_over_evictions_kills_and_damaged_files() -> None:
    soak, problems = run(number=12, seed=0)
    assert problems == []
    assert soak.num_computed < soak.num_prompt_tokens * 2 / 3
