"""Does what a server does with a checkpoint until it serves, in a child process with limits on memory and CPU time.

`python -m tests.engine.checkpoint.limited_starts` reads the paths of checkpoints, a line each, and answers each with 1
if its start ended with one sentence or serves, else with 0. It is a process of its own because one whose libraries have
begun threads cannot be forked.
"""

import asyncio
import gc
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from engine.checkpoint.local import check_checkpoint
from engine.checkpoint.weight_files import check_weights
from engine.core.config import EngineConfig
from engine.core.errors import TwostepError
from engine.core.machine import Ceilings
from engine.model.setup import load_model_runner
from engine.text.tokenizer import Tokenizer
from server.runtime.generation_defaults import load_generation_defaults
from server.settings.settings import Settings
from server.templates.setting import load_chat_renderer

EMBEDDED = Path(__file__).resolve().parents[3] / "engine" / "embedded_model"
"""Whose tokenizer and template the checkpoints have, before they are damaged."""
MAX_BYTES = 1 << 30
MAX_SECONDS = 10
"""Of CPU time: an undamaged start takes a third of one."""
MAX_WALL_SECONDS = 120
"""A start that waits for something for so long is killed. The machine may be busy."""
TOO_MUCH, BROKEN = "too much", "broken"
"""In the place of a path: what takes too much memory, and what ends with an error that is no sentence."""


_IMPORTED_LATE = ("engine.model.forward_choice", "engine.model.loader", "engine.runner.model_runner")
"""What each start would import again."""
_CEILINGS = patch("engine.model.setup.measure_ceilings", return_value=Ceilings(1e10, 1e11, "float32"))
"""The machine's own speed is not measured: it would take three quarters of each start."""


def main() -> None:
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    tried = _templates_of(Tokenizer.from_pretrained(str(EMBEDDED)))
    gc.freeze()  # else the collector of each child would write to all of its memory, and so copy it
    for line in sys.stdin:
        print(int(_ends_well(line.rstrip("\n"), tried)), flush=True)


def _ends_well(path: str, tried: object) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(_outcome(lambda: _start(path, tried)))
    return os.waitpid(child, 0)[1] == 0


def _templates_of(tokenizer: Tokenizer) -> object:
    return tokenizer.chat_templates, dict(tokenizer.named_tokens)


def _start(path: str, tried: object) -> None:
    """Starts a checkpoint. Templates that are `tried` are known to be harmless."""
    if path == TOO_MUCH:
        len("a" * (2 * MAX_BYTES))
    if path == BROKEN:
        raise ZeroDivisionError
    check_checkpoint(path)
    check_weights(path)
    load_generation_defaults("auto", path, None)
    tokenizer = Tokenizer.from_pretrained(path)
    if _templates_of(tokenizer) != tried:
        asyncio.run(load_chat_renderer(tokenizer, Settings(model=path)))
    with _CEILINGS:
        load_model_runner(EngineConfig(model=path, device="cpu", num_blocks=8))


def _outcome(act: Callable[[], None]) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES,) * 2)
    used = resource.getrusage(resource.RUSAGE_SELF)
    max_cpu_s = int(used.ru_utime + used.ru_stime) + MAX_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s + 1))
    signal.signal(signal.SIGXCPU, lambda *_: os._exit(2))
    signal.alarm(MAX_WALL_SECONDS)
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


if __name__ == "__main__":
    main()
