"""Ranks with memory of their own, and with graphs of their own, agree on what all of them can have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.core.config import EngineConfig
from engine.model import setup
from engine.model.caches import bytes_of_all
from engine.weights.rank_group import RankGroup
from tests.engine.ranks.rank_threads import groups, together

pytestmark = pytest.mark.usefixtures("ops")


@pytest.mark.parametrize(
    ("own_bytes", "block_bytes", "expected"),
    [
        ((1000, 1000, 1000), (10, 10, 10), 3000),
        ((1000, 600, 1000), (10, 10, 10), 1800),
        ((1000, 1000, 1000), (10, 20, 10), 2000),  # the second has two of four heads
        ((1000, 30, 1000), (10, 0, 10), 2000),
        ((1000, 30, 1000), (0, 0, 0), 90),  # no layer has attention
    ],
)
def test_no_rank_takes_more_than_it_has(
    own_bytes: tuple[int, ...], block_bytes: tuple[int, ...], expected: int
) -> None:
    def run(group: RankGroup) -> int:
        return bytes_of_all(own_bytes[group.rank], block_bytes[group.rank], group)

    assert together(groups(3), run) == [expected] * 3


@pytest.mark.parametrize(("are_recorded", "expected"), [((True, True), "recorded"), ((True, False), "plain")])
def test_all_ranks_record_their_steps_or_none_does(
    are_recorded: tuple[bool, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(device=torch.device("cuda"))
    caches: Any = SimpleNamespace(
        kv=SimpleNamespace(layers=[SimpleNamespace(keys=cuda)], block_size=4), max_model_len=8
    )
    monkeypatch.setattr(setup, "StaticInputs", lambda *_: None)
    monkeypatch.setattr(setup, "in_cuda_graphs", lambda plain, *_: "recorded" if plain[1] else plain)

    def run(group: RankGroup) -> str:
        plain: Any = "plain", are_recorded[group.rank]
        forward: Any = setup._recorded(EngineConfig(model=""), plain, caches, group)
        return str(forward if forward == "recorded" else forward[0])

    assert together(groups(2), run) == [expected] * 2
