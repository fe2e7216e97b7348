"""Whatever is in the files of a checkpoint, a start ends with one sentence or serves, in bounded time and memory."""

import asyncio
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint.local import check_checkpoint
from engine.checkpoint.weight_files import check_weights
from engine.core.config import EngineConfig
from engine.core.errors import TwostepError
from engine.model.setup import load_model_runner
from engine.text.tokenizer import Tokenizer
from server.runtime.generation_defaults import load_generation_defaults
from server.settings.settings import Settings
from server.templates.setting import load_chat_renderer
from tests.engine.checkpoint.mutations import mutate
from tests.engine.tiny_models import make_checkpoint
from tests.fuzz import num_examples

NUM_MUTATIONS = num_examples(10)
FIRST_SEED = int(os.environ.get("TWOSTEP_FUZZ_SEED", "0"))
MAX_BYTES = 1 << 30
MAX_SECONDS = 10
EMBEDDED = Path(__file__).resolve().parents[3] / "engine" / "embedded_model"


def start(folder: Path) -> None:
    """Does what a server does with a checkpoint until it serves, all in one process."""
    model = str(folder)
    check_checkpoint(model)
    check_weights(model)
    load_generation_defaults("auto", model, None)
    tokenizer = Tokenizer.from_pretrained(model)
    asyncio.run(load_chat_renderer(tokenizer, Settings(model=model)))
    load_model_runner(EngineConfig(model=model, device="cpu", num_blocks=8))


def ends_well(act: Callable[[], None]) -> bool:
    """Whether a child process, with limits on memory and CPU time, does this or refuses it in one sentence."""
    child = os.fork()
    if child == 0:
        os._exit(_outcome(act))
    return os.waitpid(child, 0)[1] == 0


def _outcome(act: Callable[[], None]) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
    signal.signal(signal.SIGXCPU, lambda *_: os._exit(2))
    try:
        act()
    except TwostepError as error:
        if "\n" in str(error) or len(str(error)) > 2000 or isinstance(error.__cause__, MemoryError):
            print(str(error)[:4000], file=sys.stderr)
            return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    for path in EMBEDDED.iterdir():
        if path.name.startswith(("tokenizer", "generation", "chat")):
            shutil.copy(path, folder)
    return folder


def test_an_undamaged_checkpoint_starts_within_the_limits(checkpoint: Path) -> None:
    assert ends_well(lambda: start(checkpoint))


def test_the_limits_are_seen() -> None:
    assert not ends_well(lambda: print(len("a" * (2 * MAX_BYTES))))
    assert not ends_well(lambda: 1 // 0 and None)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_MUTATIONS))
def test_any_damage_is_told_in_a_sentence(checkpoint: Path, tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    change = mutate(folder, seed)
    assert ends_well(lambda: start(folder)), change
