"""Ranks of a model whose weights stay as a file stores them: GGUF, and published precisions."""

from pathlib import Path

import pytest

from engine.weights.block_weight import BlockWeight
from engine.weights.gathered_weight import own_part
from engine.weights.linear import PackedLinear
from tests.crossed import slow_but
from tests.engine.checkpoint.gguf_files import in_blocks, write_gguf
from tests.engine.checkpoint.published_checkpoints import write_published
from tests.engine.ranks.rank_answers import check_equal
from tests.engine.ranks.rank_threads import engine_on_ranks
from tests.engine.tiny_models import WIDE, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "ops")


@pytest.mark.parametrize("architecture", slow_but((WIDE, "qwen3_moe"), "qwen3_moe"))
def test_ranks_change_no_bit_of_gguf_files(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint(architecture, tmp_path), path, in_blocks)
    check_equal(path, (2,), dtype="auto")


def test_weights_in_blocks_divide_among_ranks(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(make_checkpoint(WIDE, tmp_path), path, in_blocks)
    with engine_on_ranks(path, 2, dtype="auto") as (_, ranks):
        assert ranks is not None
        packed = [each.packed for each in ranks.ready[1].model.module.modules() if isinstance(each, PackedLinear)]
        assert packed and all(isinstance(own_part(each), BlockWeight) for each in packed)


@pytest.mark.parametrize("method", slow_but(("gptq", "fp8 in blocks", "mxfp4", "nvfp4"), "gptq", "mxfp4"))
def test_ranks_change_no_bit_of_published_precisions(method: str, tmp_path: Path) -> None:
    path = make_checkpoint("gpt_oss" if method == "mxfp4" else "qwen3", tmp_path)
    write_published(path, method)
    check_equal(path, (2,), dtype="auto")
