"""Small copies of models: the first layers, which hold one of each kind, and narrow ones with random weights."""

import math

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["cut_config", "keep_layers", "num_distinct_layers", "randomize"]

NUM_VOCAB = 256
MAX_WIDTH = 64
"""Width of each MLP and expert. Attention and the residual stream keep their widths, which depend on one another."""
MAX_WINDOW = 8
MAX_COMPRESSION = 6
"""Tokens that an entry of compressed attention stands for."""
MIN_INDEX_HEADS = 16
"""Heads of indexers that choose positions. With few the product of none may be positive: such scores are equal, and
torch chooses any."""
MAX_DECAY = -1.0
"""Logarithm of how fast states decay: of those that decay faster nothing might be left after a token."""
MAX_POOL = 4
"""Positions of a pool that indexers choose."""
MAX_HASHED = 64
"""Rows of an embedding of n-grams that a hash finds."""

_LIMITS = {"indexer_compress_ratio": MAX_POOL, "ngram_vocab_size_base": MAX_HASHED}
_NOT_OF_A_KIND = "idx", "index", "limit", "num_embeddings", "total_vocab_size", "lambda_init"
"""Parts of names of what layers of one kind may differ by."""


def cut_config(config: PreTrainedConfig, num_layers: int) -> None:
    """Cuts a text model's configuration, in place, to that of a model of a few narrow layers."""
    keep_layers(config, num_layers)
    for name, value in [*vars(config).items()]:
        if name.endswith("token_id") and value is not None:
            setattr(config, name, 0)
        elif type(value) is int and not name.endswith("layers"):
            setattr(config, name, min(value, _limit_of(name)))
    if isinstance(rates := getattr(config, "compress_rates", None), dict):
        config.compress_rates = {kind: min(rate, MAX_COMPRESSION) for kind, rate in rates.items()}
    if isinstance(heads := getattr(config, "index_n_heads", None), int) and hasattr(config, "index_topk"):
        config.index_n_heads = max(heads, MIN_INDEX_HEADS)
    if isinstance(heads := getattr(config, "indexer_n_heads", None), int):
        config.indexer_n_heads = max(heads, MIN_INDEX_HEADS)
        config.indexer_budget = min(config.indexer_budget, 2 * config.indexer_compress_ratio)


def _limit_of(name: str) -> float:
    """Returns how large the number of this name may stay."""
    if name == "vocab_size":
        return NUM_VOCAB
    if name.endswith(("sliding_window", "sliding_window_size", "index_topk", "index_block_size")):
        return MAX_WINDOW
    if name in ("rel_extent", "log_scaling_n_floor"):  # of a bias by distance, and of a scaling
        return MAX_WINDOW
    if name.endswith(("index_topk_blocks", "index_kpool")):
        return 2
    if name in _LIMITS:
        return _LIMITS[name]
    return MAX_WIDTH if name.endswith(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")) else math.inf


def randomize(module: nn.Module) -> None:
    """Sets all weights to numbers with which each layer adds about as much as it gets.

    Those that the model's code has drawn are scaled, which is faster than to draw them again.
    """
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.empty_like(parameter).normal_(generator=generator), alpha=0.1)
            if name.endswith("A_log"):
                parameter.clamp_(max=MAX_DECAY)
            elif name.endswith("temp"):  # scales of keys, which begin with none that matters
                parameter.add_(1.0)
            continue
        std = 1.0 if id(parameter) in embeddings else max(1, parameter.shape[-1]) ** -0.5
        own = float(parameter[:1].std()) if parameter[:1].numel() > 1 else 0.0
        if own > 0:
            parameter.mul_(std / own)
        else:
            parameter.normal_(std=std, generator=generator)


def keep_layers(config: PreTrainedConfig, num_layers: int) -> None:
    """Cuts a text model's configuration, in place, to its first layers."""
    all_layers = config.num_hidden_layers
    for name, value in [*vars(config).items()]:
        if isinstance(value, list) and len(value) == all_layers:
            setattr(config, name, value[:num_layers])
        elif name.endswith("layers") and value == all_layers:
            setattr(config, name, num_layers)
    config.num_hidden_layers = num_layers  # where that stands for a field of another name


def num_distinct_layers(module: PreTrainedModel) -> int:
    """Returns how many of the first layers hold one layer of each kind."""
    num_layers = module.config.get_text_config(decoder=True).num_hidden_layers
    lists = (each for each in module.modules() if isinstance(each, nn.ModuleList))
    layers = next((each for each in lists if len(each) == num_layers), None)
    if layers is None:
        return int(num_layers)
    kinds = [_kind(layer) for layer in layers]
    return 1 + max(kinds.index(kind) for kind in {*kinds})


def _kind(layer: nn.Module) -> str:
    """Returns a text that is the same for layers which differ by nothing but their weights, their index, how many rows
    their embeddings have, and bounds of numbers, which concern each token alone."""
    facts = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, type(None))) and not any(map(key.__contains__, _NOT_OF_A_KIND))
        }
        rows = 1 if isinstance(module, nn.Embedding) else 0
        shapes = [tuple(parameter.shape[rows:]) for parameter in module.parameters(recurse=False)]
        facts.append((name, type(module).__name__, sorted(settings.items()), shapes))
    return repr(facts)
