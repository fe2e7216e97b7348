"""What flags of other servers are called here, for whoever gives one of them."""

from collections.abc import Mapping

__all__ = ["OUR_NAMES"]

_MODEL = "twostep serve MODEL"

OUR_NAMES: Mapping[str, str] = {
    # vLLM
    "--model": _MODEL,
    "--gpu-memory-utilization": "--kv-cache-memory-bytes",
    "--enable-auto-tool-choice": "--tool-call-parser",
    "--enable-lora": "--lora",
    "--lora-modules": "--lora",
    "--speculative-config": "--draft-model",
    # SGLang
    "--model-path": _MODEL,
    "--context-length": "--max-model-len",
    "--mem-fraction-static": "--kv-cache-memory-bytes",
    "--max-running-requests": "--max-num-seqs",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    # llama.cpp
    "-m": _MODEL,
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-t": "--num-threads",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-ngl": "--device",
    "--n-gpu-layers": "--device",
    # TGI
    "--model-id": _MODEL,
    "--max-total-tokens": "--max-model-len",
    "--max-concurrent-requests": "--max-num-seqs",
}
"""The flag that says the same, or what to write instead."""
