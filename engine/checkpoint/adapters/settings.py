"""The adapter_config.json of PEFT: which modules an adapter changes, by which rank and scale. Whatever would make it
something else than B(Ax) beside a layer is refused by name."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.core.errors import AdapterError

__all__ = ["AdapterSettings", "read_settings"]

Number = TypeVar("Number", int, float)

_FILE = "adapter_config.json"
_MAX_BYTES = 1 << 20
_NAME = re.compile(r"\^?[\w.]+")  # a module's name, or its end; PEFT writes ^ before whole ones

_WITHOUT_EFFECT = frozenset(
    (
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "fan_in_fan_out",
            "inference_mode",
            "loftq_config",
            "lora_dropout",
        ),
        *("layers_pattern", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type"),
        *("ensure_weight_tying", "exclude_modules", "eva_config", "runtime_config"),
    )
)
"""Settings of training, of PEFT itself, or of where the adapter comes from."""
_READ = frozenset(
    (
        *("alpha_pattern", "bias", "init_lora_weights", "layers_to_transform", "lora_alpha", "peft_type", "r"),
        *("rank_pattern", "target_modules", "use_rslora"),
    )
)
_REFUSED = {
    "alora_invocation_tokens": "it is an activated LoRA (aLoRA)",
    "corda_config": "its first numbers changed the model's own weights (CorDA)",
    "layer_replication": "it replicates layers of the model",
    "lora_bias": "it has biases of its own (lora_bias)",
    "modules_to_save": "it brings whole modules of the model (modules_to_save)",
    "target_parameters": "it changes parameters that are no linear layers (target_parameters)",
    "trainable_token_indices": "it brings embeddings of tokens (trainable_token_indices)",
    "use_dora": "it is a DoRA, whose scale depends on the model's own weights",
    "use_qalora": "it is a QALoRA, which pools its inputs",
}
"""Settings that change what an adapter computes, and what they mean."""
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to start training (`init_lora_weights`) that leave the model's own weights alone."""


class AdapterSettings(msgspec.Struct, frozen=True):
    """Which modules an adapter changes, and how much."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    target_modules: tuple[str, ...] | None
    """Names of modules, or ends of such names; None if any may be meant."""
    layers: tuple[int, ...] | None
    """Numbers of the layers whose modules are meant; None for all."""
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module's matrices."""
        return _matching(self.rank_pattern, module) or self.rank

    def scale_of(self, module: str) -> float:
        """Returns the factor of what the adapter adds (Kalajdzievski, Rank-stabilized LoRA, 2023, for the root)."""
        rank, own = self.rank_of(module), _matching(self.alpha_pattern, module)
        return (self.alpha if own is None else own) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def means(self, module: str) -> bool:
        """Whether the adapter must have matrices for this linear layer of the model."""
        if self.target_modules is None or not any(_ends_with(module, name) for name in self.target_modules):
            return False
        number = re.search(r"\.(\d+)\.", module)
        return self.layers is None or (number is not None and int(number[1]) in self.layers)

    def may_mean(self, name: str) -> bool:
        """Whether the adapter may have matrices for linear layers whose names end so."""
        return self.target_modules is None or any(_ends_with(target, name) for target in self.target_modules)


def read_settings(folder: Path) -> AdapterSettings:
    """Reads the settings of the adapter in `folder`. Raises AdapterError."""
    if not folder.is_dir():
        raise AdapterError(f"{folder} is no directory of an adapter: give one with adapter_config.json in it.")
    content = _read_object(folder / _FILE)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{folder} is an adapter of type {str(kind)[:40]!r}: only LORA can be loaded.")
    for name, value in content.items():
        if name in _REFUSED and value not in (None, False, [], {}):
            raise AdapterError(f"The adapter {folder} cannot be loaded: {_REFUSED[name]}.")
        if name not in _READ | _WITHOUT_EFFECT | _REFUSED.keys() and value not in (None, False, [], {}):
            raise AdapterError(f"The adapter {folder} has the setting {name[:40]!r}, which is not known here.")
    if (bias := content.get("bias", "none")) != "none":
        raise AdapterError(f"The adapter {folder} trains biases (bias {str(bias)[:40]!r}): only 'none' can be loaded.")
    start = content.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise AdapterError(
            f"The adapter {folder} began as {str(start)[:40]!r}, which changed the model's own weights: convert it to "
            "a plain LoRA first (PEFT's path_initial_model_for_weight_conversion)."
        )
    return _settings_of(content, folder)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{path.parent} is no adapter: {path.name} cannot be read: {error.strerror}.") from error
    try:
        content = json.loads(text) if len(text) <= _MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {str(error)[:200]}.") from error
    if not isinstance(content, dict):
        raise AdapterError(f"{path} is damaged: it holds no JSON object of at most {_MAX_BYTES >> 20} MiB.")
    return content


def _settings_of(content: Mapping[str, Any], folder: Path) -> AdapterSettings:
    try:
        settings = AdapterSettings(
            rank=content["r"],
            alpha=float(content["lora_alpha"]),
            is_rank_stabilized=bool(content.get("use_rslora")),
            target_modules=_targets(content),
            layers=_layers(content.get("layers_to_transform")),
            rank_pattern=dict(content.get("rank_pattern") or {}),
            alpha_pattern={name: float(alpha) for name, alpha in (content.get("alpha_pattern") or {}).items()},
        )
        msgspec.convert(msgspec.to_builtins(settings), AdapterSettings)  # checks types
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise AdapterError(f"{folder / _FILE} is damaged: {type(error).__name__}: {str(error)[:200]}.") from error
    ranks, alphas = (settings.rank, *settings.rank_pattern.values()), (settings.alpha, *settings.alpha_pattern.values())
    if min(ranks) < 1 or not all(map(math.isfinite, alphas)):
        raise AdapterError(f"{folder / _FILE} is damaged: ranks must be at least 1, and alphas finite.")
    for name in (*settings.rank_pattern, *settings.alpha_pattern):
        if not _NAME.fullmatch(name):
            raise AdapterError(
                f"{folder / _FILE} has the pattern {name[:80]!r}: only names of modules, or their ends, can be read."
            )
    return settings


def _targets(content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns the names of a list of which nothing is excluded. Others are regular expressions, or mean all layers:
    those that the adapter has are those that were meant."""
    value = content.get("target_modules")
    return tuple(value) if isinstance(value, list) and not content.get("exclude_modules") else None


def _layers(value: Any) -> tuple[int, ...] | None:
    return (value,) if isinstance(value, int) else tuple(value) if value else None


def _ends_with(module: str, name: str) -> bool:
    """Whether `name` is a module's name or the end of it, from a dot on."""
    return module == name or module.endswith(f".{name}")


def _matching(patterns: Mapping[str, Number], module: str) -> Number | None:
    """Returns the value of the first pattern that matches."""
    for name, value in patterns.items():
        if module == name[1:] if name.startswith("^") else _ends_with(module, name):
            return value
    return None
