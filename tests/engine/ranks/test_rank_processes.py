"""Ranks as processes of their own: answers, refusals, and ends."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from engine.assembly import load_engine
from engine.client.async_engine import AsyncEngine
from engine.core.adapters import AdapterSource
from engine.core.config import EngineConfig
from engine.core.errors import AdapterError, ConfigError, ModelError
from engine.ranks.processes import RankProcesses
from tests.engine.async_engines import Words, eventually, request
from tests.engine.fakes import add, run_to_end
from tests.engine.process.restarts import Watcher
from tests.engine.ranks.rank_adapters import adapters_of
from tests.engine.tiny_models import ARCHITECTURES, make_checkpoint

pytestmark = pytest.mark.usefixtures("ops", "two_threads")

EMBEDDED_MODEL = Path(__file__).parents[3] / "engine" / "embedded_model"


def rank_pids(parent: int | None = None) -> list[int]:
    """Returns the ranks that a process has started, by default this one, and that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            status, command = (entry / "stat").read_text().rpartition(")")[2].split(), (entry / "cmdline").read_text()
            if "engine.ranks" in command and status[0] != "Z" and int(status[1]) == (parent or os.getpid()):
                found.append(int(entry.name))
    return found


def config(path: Path = EMBEDDED_MODEL, size: int = 2, **fields: object) -> EngineConfig:
    settings = {"device": "cpu", "num_blocks": 64, "num_threads": 2, **fields}
    return EngineConfig(model=str(path), tensor_parallel_size=size, **settings)  # type: ignore[arg-type]


def answers(settings: EngineConfig) -> object:
    engine = load_engine(settings)
    try:
        for seed in range(3):
            add(engine, str(seed), range(3, 40 + seed), max_tokens=6, logprobs=2, temperature=0.8 * seed, seed=seed)
        updates = run_to_end(engine)
        return {
            name: [(each.token_id, each.logprob, each.top) for update in own for each in update.logprobs]
            for name, own in updates.items()
        }
    finally:
        engine.close()


def test_processes_give_the_answers_of_one() -> None:
    assert answers(config()) == answers(config(size=1))
    assert rank_pids() == []


@pytest.mark.slow
def test_processes_load_adapters_as_one_does(tmp_path: Path) -> None:
    adapters = adapters_of(EMBEDDED_MODEL, tmp_path)
    found = []
    for size in (1, 2):
        engine = load_engine(config(size=size, adapters=(AdapterSource("a", str(adapters["a"])),)))
        try:
            digests = {"a": engine.info.adapters["a"].digest, "b": engine.load_adapter(str(adapters["b"])).digest}
            for name, digest in {"": "", **digests}.items():
                add(engine, name, range(3, 40), max_tokens=6, logprobs=2, temperature=0.0, adapter=digest)
            updates = run_to_end(engine)
            found.append({name: [each.logprobs for each in own] for name, own in updates.items()})
            engine.unload_adapter(digests["a"])
            run_to_end(engine)
            with pytest.raises(AdapterError, match="no directory"):
                engine.load_adapter(str(tmp_path / "nowhere"))
        finally:
            engine.close()
    assert found[0] == found[1]


TOO_MANY_RANKS = r"--tensor-parallel-size 3 is more than the 2 attention heads of .*: use 2"


@pytest.mark.parametrize("is_nested", [False, True])
def test_more_ranks_than_heads_are_refused_before_any_starts(
    is_nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": heads} if is_nested else heads))
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=TOO_MANY_RANKS):
        load_engine(config(tmp_path, 3))


@pytest.mark.slow
def test_the_heads_of_the_model_itself_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ranks.leading.check_written_heads", lambda _: None)
    monkeypatch.setitem(ARCHITECTURES, "llama", ("LlamaConfig", {"num_attention_heads": 2}))
    path = make_checkpoint("llama", tmp_path)
    with pytest.raises(ConfigError, match=TOO_MANY_RANKS):
        load_engine(config(path, 3))
    assert rank_pids() == []


def test_what_only_another_rank_finds_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = RankProcesses(config(size=2))
    try:
        ranks._failure = ModelError("A weight of the checkpoint has NaN.")
        assert (
            str(ranks.reason_of(RuntimeError("the ranks have been given up"))) == "A weight of the checkpoint has NaN."
        )
    finally:
        ranks.close()
    assert rank_pids() == []


def test_ranks_need_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ranks.groups.load_kernels", lambda: None)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 needs the CPU kernels"):
        load_engine(config())


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 0), ("cuda", 1), ("auto", 3)])
def test_each_rank_needs_a_gpu(device: str, num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(subprocess, "Popen", None)
    reason = rf"--tensor-parallel-size 4 needs a GPU for each rank, and torch sees {num_gpus}\. .* --device cpu\."
    with pytest.raises(ConfigError, match=reason):
        load_engine(config(size=4, device=device))


def test_gpus_of_ranks_are_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: ("H100", "L40S", "A10")[number])
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    with pytest.raises(
        ConfigError, match="--tensor-parallel-size 2 needs GPUs of one kind, and these are H100 and L40S"
    ):
        load_engine(config(device="cuda"))


def test_ranks_on_gpus_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 on GPUs needs a build of torch with NCCL"):
        load_engine(config(device="cuda"))


def test_no_file_keeps_the_kv_of_ranks() -> None:
    with pytest.raises(ConfigError, match="--kv-store: no file keeps the KV of several ranks yet"):
        config(kv_store="/nowhere")


def test_ranks_end_with_a_first_that_is_killed() -> None:
    code = f"""
import time
from engine.ranks.processes import RankProcesses
from engine.core.config import EngineConfig
RankProcesses(EngineConfig(model={str(EMBEDDED_MODEL)!r}, device="cpu", tensor_parallel_size=3))
print("started", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        pids = rank_pids(process.pid)
        assert len(pids) == 2
        process.kill()
    asyncio.run(eventually(lambda: not any(map(_is_alive, pids))))


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def _tokens(kills: int) -> tuple[list[int], int]:
    """Returns a stream's tokens, and how often the engine was restarted; a rank is killed after some tokens."""
    watcher = Watcher()
    engine = AsyncEngine(config(), observer=watcher)
    await engine.start(Words())
    tokens: list[int] = []
    try:
        async with aclosing(engine.generate(request(max_tokens=150, ignore_eos=True, temperature=0.0))) as outputs:
            async for output in outputs:
                tokens.extend(output.token_ids)
                if kills and len(tokens) > 20:
                    kills -= 1
                    for pid in _ranks_of_the_engine():
                        os.kill(pid, signal.SIGKILL)
    finally:
        await engine.stop()
    return tokens, watcher.num_restarts


def _ranks_of_the_engine() -> list[int]:
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [pid for child in own for pid in rank_pids(int(child))]


@pytest.mark.slow
def test_streams_go_on_when_a_rank_dies() -> None:
    whole, _ = asyncio.run(_tokens(kills=0))
    disturbed, num_restarts = asyncio.run(_tokens(kills=1))
    assert disturbed == whole and len(whole) == 150 and num_restarts == 1
