"""Stage: small random models of several architectures compute what transformers does on the same device."""

import multiprocessing
import random
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.assembly import assemble
from engine.core.config import EngineConfig
from engine.engine import Engine
from engine.model.setup import load_model_runner
from tests.engine.tiny_models import VOCAB_SIZE, WIDE, make_checkpoint
from tests.gpu.look.bits import Answer, answers_of, compare
from tests.gpu.look.report import Look

NAMES = (
    *(
        "llama",
        "qwen3",
        "gemma2",
        "gemma3",
        "gpt_oss",
        "deepseek_v3",
        "mixtral",
        "qwen3_moe",
        "phi3",
        "granite",
        "olmo2",
    ),
    *("glm4", "cohere2", "starcoder2", "exaone4"),
)
_TIE = 1e-3
"""Difference of logits, in their standard deviations, below which two tokens count as equally likely."""


def run(look: Look) -> None:
    """Looks at several at once, each in a process of its own: one core compiles the kernels of a model."""
    num_processes, names = (1, NAMES[:3]) if look.is_small else (14, NAMES)
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(num_processes, spawned) as processes:
        paths = {name: make_checkpoint(name, Path(folder)) for name in (*names, WIDE)}
        looks = [(name, dtype, "auto") for name in names for dtype in ("bfloat16", "float32")]
        looks += [(WIDE, "bfloat16", kv_dtype) for kv_dtype in ("int8", "int4")]
        ends = [processes.submit(_look_at, look, name, paths[name], *types) for name, *types in looks]
        for end in ends:
            end.result()


def _look_at(look: Look, name: str, path: Path, dtype: str, kv_dtype: str) -> None:
    try:
        _compare_all(look, name, path, dtype, kv_dtype)
    except Exception as error:  # the others go on
        traceback.print_exc()
        look.report(f"{name}, {dtype}, KV {kv_dtype}", f"{type(error).__name__}: {error}"[:300], ok=False)


def _compare_all(look: Look, name: str, path: Path, dtype: str, kv_dtype: str) -> None:
    settings: dict[str, Any] = {"device": look.device.type, "num_blocks": 512, "num_speculative_tokens": 0}
    settings["kv_cache_dtype"] = kv_dtype
    what = f"{name}, {dtype}" if kv_dtype == "auto" else f"{name}, {dtype}, KV {kv_dtype}"
    config = EngineConfig(model=str(path), dtype=dtype, max_num_seqs=16, max_num_batched_tokens=256, **settings)
    runner, info = load_model_runner(config)

    def new_engine() -> Engine:
        return assemble(config, info, runner)

    chance = random.Random(1)
    params = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 9, 20, 33, 70, 121, 150)]
    requests = [(prompt, params) for prompt in prompts]
    alone = [answers_of(new_engine(), [request])[0] for request in requests]
    compare(look, f"{what}: in a batch", alone, answers_of(new_engine(), requests))
    _compare_with_transformers(look, what, path, prompts, alone, is_exact=dtype == "float32")


@torch.inference_mode()
def _compare_with_transformers(
    look: Look, name: str, path: Path, prompts: list[list[int]], answers: list[Answer], is_exact: bool
) -> None:
    """Checks that each token is the likeliest one to transformers, which reads the tokens before it, in float32."""
    settings: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, **settings).to(look.device).eval()
    num_other, worst_lead, worst_score = 0, 0.0, 0.0
    for prompt, (tokens, scores) in zip(prompts, answers, strict=True):
        text = torch.tensor([[*prompt, *tokens]], device=look.device)
        logits = reference(text, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        own = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        leads = (logits.max(1).values - own) / logits.std()
        num_other += int((leads > 0).sum())
        worst_lead = max(worst_lead, float(leads.max()))
        exact = logits.log_softmax(1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        found = torch.tensor([score for _, score, _ in scores], device=look.device)
        worst_score = max(worst_score, float((exact - found).abs().max()))
    detail = f"{num_other} tokens not the likeliest, by up to {worst_lead:.2g} std; logprobs within {worst_score:.2g}"
    if is_exact:
        look.check(f"{name}: as transformers", worst_lead <= _TIE and worst_score < 0.01, detail)
    else:
        look.report(f"{name}: beside transformers in float32", detail)
