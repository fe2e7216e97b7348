"""Whatever is in the files of a checkpoint, a start ends with one sentence or serves, in bounded time and memory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.kernels.build import cache_dir
from tests.engine.checkpoint.limited_starts import BROKEN, EMBEDDED, TOO_MUCH
from tests.engine.checkpoint.mutations import mutate
from tests.engine.checkpoint.weight_mutations import mutate_gguf, mutate_safetensors
from tests.engine.tiny_models import make_checkpoint
from tests.fuzz import num_examples

NUM_MUTATIONS = num_examples(2)
FIRST_SEED = int(os.environ.get("TWOSTEP_FUZZ_SEED", "0"))
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def ends_well(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[object], bool]]:
    """Whether the start of a checkpoint ends as it should."""
    command = [sys.executable, "-m", "tests.engine.checkpoint.limited_starts"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TWOSTEP_NUM_THREADS": "1"}
    environment["TWOSTEP_CACHE_DIR"] = str(cache_dir())  # of compiled kernels
    environment["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))  # of what GGUF files have beside weights
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(path: object) -> bool:
            print(path, file=process.stdin, flush=True)
            return process.stdout.readline() == "1\n"  # type: ignore[union-attr]

        yield ask
        process.stdin.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    for path in EMBEDDED.iterdir():
        if path.name.startswith(("tokenizer", "generation", "chat")):
            shutil.copy(path, folder)
    return folder


@pytest.mark.slow
def test_an_undamaged_checkpoint_starts_within_the_limits(
    checkpoint: Path, gguf_file: Path, ends_well: Callable[[object], bool]
) -> None:
    assert ends_well(checkpoint)
    assert ends_well(gguf_file)


@pytest.mark.parametrize("what", [TOO_MUCH, BROKEN])
def test_the_limits_are_seen(what: str, ends_well: Callable[[object], bool]) -> None:
    assert not ends_well(what)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_MUTATIONS))
def test_any_damage_is_told_in_a_sentence(
    checkpoint: Path, tmp_path: Path, seed: int, ends_well: Callable[[object], bool]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    change = mutate(folder, seed)
    assert ends_well(folder), change


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_MUTATIONS))
def test_any_damage_to_the_header_of_weights_is_told_in_a_sentence(
    checkpoint: Path, tmp_path: Path, seed: int, ends_well: Callable[[object], bool]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    change = mutate_safetensors(folder / "model.safetensors", seed)
    assert ends_well(folder), change


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_MUTATIONS))
def test_any_damage_to_the_header_of_a_gguf_file_is_told_in_a_sentence(
    gguf_file: Path, tmp_path: Path, seed: int, ends_well: Callable[[object], bool]
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(gguf_file, path)
    change = mutate_gguf(path, seed)
    assert ends_well(path), change
