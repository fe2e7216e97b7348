"""The adapters that are loaded over a model: read, checked against its layers, packed, and taken away again."""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from engine.checkpoint.adapters.files import AdapterFiles, Factors, read_adapter
from engine.core.adapters import AdapterInfo, Adapters, AdapterSource
from engine.core.errors import AdapterError
from engine.host.available_memory import available_bytes
from engine.model.adapter_targets import AdapterTarget, adapter_targets
from engine.model.text_part import TEXT_PART_NAMES
from engine.runner.forward import Forward
from engine.runner.loaded_model import LoadedModel
from engine.weights.packed_weight import KernelWeight, PackedWeight, pack_weight
from engine.weights.rank_group import ALONE, RankGroup

__all__ = ["ModelAdapters", "load_adapters"]

logger = logging.getLogger(__name__)

_READING_SHARE = 0.5
"""Share of the available memory that an adapter's file may take: while it is packed, it is in memory twice."""


class _Loaded(NamedTuple):
    number: int
    info: AdapterInfo
    targets: tuple[AdapterTarget, ...]


class _Packed(NamedTuple):
    """An adapter that fits the model."""

    digest: str
    path: str
    rank: int
    packed: list[tuple[AdapterTarget, PackedWeight, PackedWeight]]


class ModelAdapters:
    """Implements `engine.core.adapters.Adapters` over the layers that a model's forward pass runs."""

    def __init__(
        self, model: LoadedModel, forward: Forward, max_adapters: int, max_rank: int, group: RankGroup = ALONE
    ) -> None:
        """At most `max_adapters` are loaded at once, of ranks up to `max_rank`. Each rank of `group` has its part of
        the model, and of its adapters; all load and take away the same ones in the same order."""
        self._targets = adapter_targets(forward, model.module)
        self._has_kernels, self._dtype, self._device = model.has_kernels, model.dtype, model.device
        self._max_adapters, self._max_rank, self._group = max_adapters, max_rank, group
        self._loaded: dict[str, _Loaded] = {}
        self._unloaded: dict[str, None] = {}

    @torch.inference_mode()
    def load(self, path: str) -> AdapterInfo:
        new = self._agreed_on(path)
        if new.digest not in self._loaded:
            self._add(new)
        self._unloaded.pop(new.digest, None)
        return msgspec.structs.replace(self._loaded[new.digest].info, path=path)

    def _agreed_on(self, path: str) -> _Packed:
        """Reads and packs an adapter. Raises AdapterError on all ranks unless each of them can, and finds the same."""
        try:
            new = self._read(path)
        except AdapterError:
            self._group.have_all(None)
            raise
        if not self._group.have_all(int(new.digest[:12], 16)):
            raise AdapterError(
                f"The adapter {path} cannot be loaded by all processes of the model, or changed while they read it; "
                "the log says more."
            )
        return new

    def _read(self, path: str) -> _Packed:
        """Returns the adapter, with nothing packed if it is loaded already."""
        share = _READING_SHARE / self._group.size
        files = read_adapter(path, self._max_rank, int(available_bytes(self._device) * share))
        if files.digest in self._loaded:
            return _Packed(files.digest, path, files.rank, [])
        self._check_number(path)
        return self._pack_all(files, path)

    def number_of(self, digest: str) -> int | None:
        loaded = None if digest in self._unloaded else self._loaded.get(digest)
        return None if loaded is None else loaded.number

    def unload(self, digest: str) -> None:
        if digest in self._loaded:
            self._unloaded[digest] = None

    @property
    def unloaded(self) -> list[int]:
        return [self._loaded[digest].number for digest in self._unloaded]

    def release(self, number: int) -> None:
        (digest,) = [each for each in self._unloaded if self._loaded[each].number == number]
        del self._unloaded[digest]
        _take_from(self._loaded.pop(digest).targets, number)

    def _check_number(self, path: str) -> None:
        if len(self._loaded) >= self._max_adapters:
            raise AdapterError(
                f"The adapter {path} is one more than --max-loras allows, {self._max_adapters}: unload another one, "
                "whose requests must have ended."
            )

    def _pack_all(self, files: AdapterFiles, path: str) -> _Packed:
        factors = {_own_name(name): each for name, each in files.factors.items()}
        self._check(files, factors, path)
        packed: list[tuple[AdapterTarget, PackedWeight, PackedWeight]] = []
        for name, each in factors.items():
            target = self._targets[name]
            down, up = self._matrices(each, name, path)
            if len(target.columns):  # else all are other ranks'
                packed.append((target, self._pack(down), self._pack(target.own(up), len(up))))
        return _Packed(files.digest, path, files.rank, packed)

    def _add(self, new: _Packed) -> None:
        number = min({*range(len(self._loaded) + 1)} - {each.number for each in self._loaded.values()})
        for target, down, up in new.packed:
            target.layer.adapt(number, target.columns, down, up)
        num_bytes = sum(part.nbytes for _, *pair in new.packed for part in pair)
        info = AdapterInfo(new.path, new.digest, new.rank, int(self._group.sum(num_bytes)[0]))
        self._loaded[new.digest] = _Loaded(number, info, tuple(target for target, _, _ in new.packed))

    def _check(self, files: AdapterFiles, factors: Mapping[str, Factors], path: str) -> None:
        """Raises AdapterError unless the adapter has matrices for all layers that it means, and for no others, of
        shapes that fit."""
        if len(factors) < len(files.factors):
            raise AdapterError(f"The adapter {path} is damaged: it has matrices for one layer under two names.")
        for name, (down, up, _) in factors.items():
            target = self._targets.get(name)
            if target is None:
                raise AdapterError(
                    f"The adapter {path} does not fit the model: {name} is no linear layer that can have an adapter."
                )
            if (len(up), down.shape[1]) != target.shape:
                raise AdapterError(
                    f"The adapter {path} does not fit the model: its matrices for {name} make a layer of shape "
                    f"{[len(up), down.shape[1]]}, and the model's has {[*target.shape]}."
                )
        lacking = [name for name in self._targets if files.settings.means(name) and name not in factors]
        if lacking:
            raise AdapterError(
                f"The adapter {path} is incomplete: {len(lacking)} modules that it names lack, such as {lacking[0]}."
            )

    def _matrices(self, factors: Factors, name: str, path: str) -> tuple[Tensor, Tensor]:
        """Returns the matrices in the model's number format, the second one with the scale in it."""
        down, up = factors.down.to(self._dtype), (factors.up.float() * factors.scale).to(self._dtype)
        if not (down.isfinite().all() and up.isfinite().all()):
            raise AdapterError(f"The adapter {path} has numbers for {name} that are too large for {self._dtype}.")
        return down, up

    def _pack(self, matrix: Tensor, num_columns: int | None = None) -> PackedWeight:
        matrix = matrix.to(self._device)
        if self._has_kernels:
            return KernelWeight(matrix, may_be_coded=False)
        return pack_weight(matrix, False, num_columns)


def load_adapters(adapters: Adapters, sources: Iterable[AdapterSource]) -> dict[str, AdapterInfo]:
    """Loads the configured adapters, and returns them by name. Raises AdapterError; but an engine that restarts goes on
    without an adapter whose files are others than before, or gone."""
    loaded: dict[str, AdapterInfo] = {}
    for source in sources:
        try:
            info = adapters.load(source.path)
        except AdapterError as error:
            if source.digest is None:
                raise
            logger.error("the adapter %s is not loaded again: %s", source.name, error)
            continue
        if source.digest in (None, info.digest):
            loaded[source.name] = info
            continue
        logger.error("the adapter %s is not loaded again: the files in %s are others now", source.name, source.path)
        if all(info.digest != each.digest for each in loaded.values()):
            adapters.unload(info.digest)
    if loaded:
        num_bytes = sum({each.digest: each.num_bytes for each in loaded.values()}.values())
        logger.info("%d adapters loaded: %.1f MiB", len(loaded), num_bytes / 2**20)
    return loaded


def _take_from(targets: Iterable[AdapterTarget], number: int) -> None:
    for target in targets:
        target.layer.release(number)


def _own_name(module: Any) -> str:
    """Returns what a module of a multimodal checkpoint is called in its text model, which is the one that is served."""
    for pattern, replacement in TEXT_PART_NAMES.items():
        module = re.sub(pattern, replacement, module)
    return str(module)
