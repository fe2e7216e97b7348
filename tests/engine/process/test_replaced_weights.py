"""A stream goes on after the engine's death with the weights that it began with, or ends with an error."""

import asyncio
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from engine.client.async_engine import AsyncEngine
from engine.core.config import EngineConfig
from engine.core.errors import EngineFailedError
from tests.engine.async_engines import Words, request
from tests.engine.process.restarts import Watcher, kill_engine

EMBEDDED_MODEL = Path(__file__).parents[3] / "engine" / "embedded_model"
WEIGHTS = "model.safetensors"


def flip_one_bit(folder: Path) -> None:
    """Replaces the file by one in which the lowest bit of one number is another."""
    content = bytearray((folder / WEIGHTS).read_bytes())
    (header_size,) = struct.unpack("<Q", content[:8])
    content[8 + header_size] ^= 1
    (folder / "new").write_bytes(content)
    os.replace(folder / "new", folder / WEIGHTS)


def write_again(folder: Path) -> None:
    shutil.copyfile(EMBEDDED_MODEL / WEIGHTS, folder / "new")
    os.replace(folder / "new", folder / WEIGHTS)


async def generate(folder: Path, meanwhile: Callable[[Path], None], watcher: Watcher) -> list[int]:
    """Returns the tokens of a stream whose engine is killed once `meanwhile` has changed the files."""
    config = EngineConfig(model=str(folder), device="cpu", num_blocks=64)
    engine = AsyncEngine(config, observer=watcher)
    await engine.start(Words())
    tokens: list[int] = []
    try:
        async with aclosing(engine.generate(request(max_tokens=900, ignore_eos=True, temperature=0.0))) as outputs:
            async for output in outputs:
                if not tokens:
                    meanwhile(folder)
                    kill_engine()
                tokens.extend(output.token_ids)
    finally:
        await engine.stop()
    return tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


@pytest.mark.slow
def test_the_same_weights_in_a_new_file_go_on(folder: Path) -> None:
    watcher = Watcher()
    assert len(asyncio.run(generate(folder, write_again, watcher))) == 900
    assert watcher.num_restarts == 1


@pytest.mark.slow
def test_other_weights_end_the_stream(folder: Path) -> None:
    with pytest.raises(EngineFailedError, match="not the one that was loaded first: another weights_fingerprint"):
        asyncio.run(generate(folder, flip_one_bit, Watcher()))
