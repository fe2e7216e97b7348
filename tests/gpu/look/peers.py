"""Stage: 64 requests of an 8 B model at once, by the engine here and by transformers' continuous batching."""

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from engine.assembly import load_engine
from engine.core.config import EngineConfig
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.gpu.look.llama import write_config
from tests.gpu.look.report import Look


def run(look: Look) -> None:
    num_clients, prompt_len, num_tokens = (3, 20, 4) if look.is_small else (64, 512, 128)
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), look.is_small)
        config = transformers.AutoConfig.from_pretrained(path)
        prompts = [
            [(13 * i + 977 * number + 5) % (config.vocab_size - 64) for i in range(prompt_len)]
            for number in range(num_clients)
        ]
        own = _own_tokens_per_s(look, path, prompts, num_tokens)
        look.report(f"twostep, {num_clients} requests at once", own, "tokens/s", "6,500")
        gc.collect()
        if look.device.type == "cuda":
            torch.cuda.empty_cache()
        other = _transformers_tokens_per_s(look, config, prompts, num_tokens)
        look.report(f"transformers, {num_clients} requests at once", other, "tokens/s")
        look.report("twostep / transformers", own / other, "", "3")


def _own_tokens_per_s(look: Look, path: Path, prompts: list[list[int]], num_tokens: int) -> float:
    engine = load_engine(
        EngineConfig(
            model=str(path),
            load_format="dummy",
            device=look.device.type,
            dtype="float32" if look.is_small else "bfloat16",
            kv_cache_bytes=(1 << 26) if look.is_small else (24 << 30),
            enable_prefix_caching=False,
        )
    )
    rates = []
    for attempt in range(2):  # the first one learns what steps take
        started_s = time.perf_counter()
        for number, prompt in enumerate(prompts):
            add(engine, f"{attempt}-{number}", prompt, max_tokens=num_tokens, temperature=0.0)
        updates = run_to_end(engine, 100_000)
        count = sum(len(tokens_of(each)) for each in updates.values())
        rates.append(count / (time.perf_counter() - started_s))
    engine.close()
    return rates[-1]


def _transformers_tokens_per_s(look: Look, config: Any, prompts: list[list[int]], num_tokens: int) -> float:
    dtype = torch.float32 if look.is_small else torch.bfloat16
    config.eos_token_id = None
    with torch.device(look.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    generation = transformers.GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1
    )
    sizes = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if look.is_small else None
    rates = []
    for _ in range(2):  # the first one records its CUDA graphs
        started_s = time.perf_counter()
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=sizes, persistent_manager=True
        )
        count = sum(len(each.generated_tokens) for each in outputs.values())
        rates.append(count / (time.perf_counter() - started_s))
    return rates[-1]
