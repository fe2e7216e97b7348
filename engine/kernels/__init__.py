"""Finds or compiles the C++ kernels and loads them into torch (`torch.ops.twostep`); importing this imports no torch.

A library for the best ISA level of this CPU is looked up in `$TWOSTEP_KERNEL_PATH` (read-only, made beforehand), among
those that the wheel brought (`python -m tools.wheel`), then in the cache (`$TWOSTEP_CACHE_DIR`); else it is compiled.
Where that fails, a library for a lower level will do.
"""

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import ConfigError
from engine.kernels.build import KernelBuildError, build_library, cache_dir, find_library, prebuilt_dirs
from engine.kernels.cpu_features import IsaLevel, level_named, supported_levels

__all__ = ["KernelInfo", "are_kernels_enabled", "load_kernels"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelInfo:
    """The loaded library, whose operators are under `torch.ops.twostep`."""

    isa: str  # name of the level it was compiled for
    path: Path


@functools.cache
def load_kernels() -> KernelInfo | None:
    """Loads the best library, compiling it when needed (once, for minutes); the first call decides for the process.

    Returns None when there are no kernels: `TWOSTEP_KERNELS=off`, or (with one warning) no library and no way to
    compile one. Callers then use plain torch. `TWOSTEP_ISA` names a lower level than the CPU's best. Raises ConfigError
    if there is none of that name, and for a `TWOSTEP_KERNELS` that is neither on nor off.
    """
    if not are_kernels_enabled():
        logger.info("CPU kernels are off (TWOSTEP_KERNELS); plain torch instead, which is much slower")
        return None
    try:
        level, path = _find_or_build(_candidate_levels())
        _load(path)
    except KernelBuildError as error:
        logger.warning("no CPU kernels, plain torch instead, which is much slower: %s", error)
        return None
    logger.info("CPU kernels for %s from %s", level.name, path)
    return KernelInfo(isa=level.name, path=path)


def are_kernels_enabled() -> bool:
    """Whether kernels of this project are used, on any device: unless `TWOSTEP_KERNELS` is off. Raises ConfigError."""
    setting = os.environ.get("TWOSTEP_KERNELS", "").lower()
    if setting not in ("", "on", "1", "off", "0"):
        raise ConfigError(f"TWOSTEP_KERNELS must be on or off, got {setting!r}.")
    return setting not in ("off", "0")


def _candidate_levels() -> tuple[IsaLevel, ...]:
    """Returns the levels to try, best first: this CPU's, from the one that `TWOSTEP_ISA` names downwards."""
    levels = supported_levels()
    name = os.environ.get("TWOSTEP_ISA")
    if not name:
        return levels
    try:
        wanted = level_named(name)
    except ValueError as error:
        raise ConfigError(f"TWOSTEP_ISA: {error}.") from None
    if wanted not in levels:
        raise KernelBuildError(f"TWOSTEP_ISA={name}: this CPU supports {', '.join(level.name for level in levels)}")
    return levels[levels.index(wanted) :]


def _find_or_build(levels: Sequence[IsaLevel]) -> tuple[IsaLevel, Path]:
    prebuilt = prebuilt_dirs()
    for directory in prebuilt:
        if path := find_library(levels[0], directory):
            return levels[0], path
    try:
        return levels[0], build_library(levels[0], cache_dir())
    except KernelBuildError:
        for level in levels:
            for directory in (*prebuilt, cache_dir()):
                if path := find_library(level, directory):
                    return level, path
        raise


def _load(path: Path) -> None:
    import torch

    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise KernelBuildError(f"cannot load {path} ({error})") from error
