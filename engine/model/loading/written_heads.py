"""What config.json says of attention heads, read before anything that takes long is imported."""

from engine.checkpoint.local import folder_of, is_gguf, is_local, read_config
from engine.core.config import EngineConfig
from engine.weights.partition import check_num_heads

__all__ = ["check_written_heads"]


def check_written_heads(config: EngineConfig) -> None:
    """Raises ConfigError if config.json has fewer heads than there are to be ranks: the model itself says so to ranks
    that have been started. Raises ModelError where it cannot be read."""
    if is_gguf(config.model) or not is_local(config.model):
        return
    written = read_config(folder_of(config.model))
    text = written.get("text_config")
    num_heads = (text if isinstance(text, dict) else written).get("num_attention_heads")
    if isinstance(num_heads, int):
        check_num_heads(config.model, num_heads, config.tensor_parallel_size)
