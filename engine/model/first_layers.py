"""Models of fewer layers: the first ones of another, which hold one of each of its kinds."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["keep_layers", "num_distinct_layers"]


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
    """Returns a text that is the same for layers which differ by nothing but their weights and their index."""
    facts = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str, type(None))) and "idx" not in key and "index" not in key
        }
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        facts.append((name, type(module).__name__, sorted(settings.items()), shapes))
    return repr(facts)
