"""Stage: two ranks, each with a GPU of its own, answer as one does, bit for bit."""

import json
from typing import Any

import torch

from tests.gpu.look.report import Look
from tests.gpu.programs import output_of

_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"dtype": "bfloat16"}),
    ("llama", {"dtype": "bfloat16", "quantization": "int4", "enforce_eager": True}),
    ("mixtral", {"dtype": "bfloat16"}),
    ("gpt_oss", {"dtype": "bfloat16"}),
)
"""Models and settings."""


def run(look: Look) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2 and not look.is_small:
        look.report("two ranks", f"not run: they need two GPUs, and here is {num_gpus}")
        return
    for model, settings in _WAYS[:1] if look.is_small else _WAYS:
        given = model, json.dumps(settings)
        alone, *others = (_answers(look, *given, size) for size in _sizes(num_gpus))
        for other in others:
            look.check(f"{' '.join(given)}: ranks change no bit", other["answers"] == alone["answers"])
            look.report(f"{' '.join(given)}: forward", other["forward"])


def _sizes(num_gpus: int) -> list[int]:
    return [size for size in (1, 2, 4) if size <= max(2, num_gpus)]


def _answers(look: Look, model: str, settings: str, size: int) -> Any:
    kernels = {"TWOSTEP_KERNELS": "off"} if look.is_small else {}
    return json.loads(output_of("tests.gpu.device_ranks", model, str(size), settings, **kernels))
