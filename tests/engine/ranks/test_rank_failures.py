"""A rank that fails is the end of the engine, never a wrong answer."""

from pathlib import Path

import pytest

from engine.core.errors import DeviceFailedError, ModelError
from engine.model.tensor_parallel import check_same_weights
from engine.weights.rank_group import RankGroup
from tests.engine.fakes import add, run_to_end
from tests.engine.ranks.rank_threads import engine_on_ranks, groups, together
from tests.engine.tiny_models import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "ops")


def test_a_failing_rank_fails_the_engine(tmp_path: Path) -> None:
    with engine_on_ranks(make_checkpoint("llama", tmp_path), 2) as (engine, ranks):
        assert ranks is not None
        add(engine, "first")
        assert run_to_end(engine)["first"][-1].finish_reason == "length"
        broken = ranks.ready[1].forward
        broken._run_decoder = None  # type: ignore[attr-defined]
        add(engine, "second")
        with pytest.raises(DeviceFailedError, match="ranks have been given up"):
            run_to_end(engine)
        ranks.errors.clear()


def test_ranks_that_load_other_weights_are_refused() -> None:
    def check(group: RankGroup) -> str:
        try:
            check_same_weights("model", "0" * 11 + str(group.rank // 2), group)
        except ModelError as error:
            return str(error)
        return ""

    assert set(together(groups(3), check)) == {"The checkpoint model was changed while it was loaded; start again."}
