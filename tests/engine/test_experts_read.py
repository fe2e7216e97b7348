"""What a step tells of the experts that it read, and what is made of it."""

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from engine.assembly import assemble
from engine.core.batch import Batch, StepOutput
from engine.core.config import EngineConfig
from engine.core.machine import Ceilings
from engine.kernels import load_kernels
from tests.engine.fakes import FakeRunner, add, fake_info
from tests.engine.tiny_models import load_tiny, make_checkpoint, tiny_engine


class SkewedRunner(FakeRunner):
    """A runner whose rows all choose the same experts, a quarter of them."""

    def _run(self, batch: Batch) -> StepOutput:
        return StepOutput(super()._run(batch).requests, 0.25)


def test_the_floor_of_a_step_has_the_experts_that_it_read() -> None:
    info = fake_info(64, 4)
    size = msgspec.structs.replace(info.size, layer_bytes=0, expert_bytes=1000, expert_share=0.25)
    ceilings = Ceilings(read_bytes_per_s=1e12, flops_per_s=1e30)
    info = msgspec.structs.replace(info, size=size, ceilings=ceilings)
    floors = []
    for runner in (SkewedRunner(4), FakeRunner(4)):
        engine = assemble(EngineConfig(model="fake", block_size=4), info, runner)
        for name in "abcd":
            add(engine, name, max_tokens=3)
        steps = [engine.step().stats for _ in range(2)]
        assert [step.num_tokens for step in steps] == [12, 4]
        floors.append([(step.experts_read, step.floor_s) for step in steps])
    assert floors[0] == [(0.25, pytest.approx(250e-12, rel=1e-9, abs=0))] * 2
    assert floors[1] == [(None, pytest.approx((1 - 0.75**num) * 1e-9, rel=1e-9, abs=0)) for num in (12, 4)]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.usefixtures("one_thread")
def test_a_model_tells_how_many_experts_its_rows_choose(name: str, tmp_path: Path) -> None:
    """Routers of zeros have all rows choose the same experts; others do not."""
    if load_kernels() is None:
        pytest.skip("no kernels here")
    path = make_checkpoint(name, tmp_path)
    shares = []
    for _ in range(2):
        engine = tiny_engine(model := load_tiny(path), num_speculative_tokens=0)
        for index in range(6):
            add(engine, str(index), [7 * index + 1, 11 * index + 2, index], max_tokens=3)
        shares.append({engine.step().stats.experts_read for _ in range(3)})
        file = path / "model.safetensors"
        save_file({key: tensor * (".gate.w" not in key) for key, tensor in load_file(file).items()}, file)
    assert min(shares[0], key=lambda share: share or 0) > model.size.expert_share
    assert shares[1] == {model.size.expert_share}


def test_a_dense_model_counts_no_experts(tmp_path: Path) -> None:
    engine = tiny_engine(load_tiny(make_checkpoint("llama", tmp_path)))
    add(engine, "a", max_tokens=1)
    assert engine.step().stats.experts_read is None
