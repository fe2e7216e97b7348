"""Models of random weights, for which config.json suffices: they take the time and memory of real ones.

The weights are made where they are used, as the model's authors begin a training: matrices of small normal numbers,
norms that do nothing. Nothing of them is on a disk.
"""

import hashlib

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.attention import registry
from engine.model.weights_fingerprint import weights_fingerprint

__all__ = ["dummy_fingerprint", "dummy_model"]

_SEED = 0


def dummy_model(
    hf_config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """Returns a model of this configuration on the device, with weights that are the same each time on one machine."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(_SEED)
        module = AutoModelForCausalLM.from_config(
            hf_config,
            dtype=dtype,
            attn_implementation=registry.ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
        )
    assert isinstance(module, nn.Module)
    return module


def dummy_fingerprint(module: PreTrainedModel, device: torch.device) -> str:
    """Returns what stands for the weights in place of `weights_fingerprint`, to which a GPU would have to hand all of
    them: there they follow from what made them."""
    if device.type != "cuda":
        return weights_fingerprint(module)
    source = torch.__version__, torch.cuda.get_device_name(device), str(module.dtype), _SEED
    return hashlib.sha256(f"dummy {source} {module.config.to_json_string()}".encode()).hexdigest()[:32]
