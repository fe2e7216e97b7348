"""Logits of every architecture in each format are as close to those of transformers in float32 as was measured."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from engine.runner.loaded_model import LoadedModel
from tests.crossed import slow_but
from tests.engine.logit_errors import reference_logits, relative_error, runner_logits, sequences
from tests.engine.tiny_models import ARCHITECTURES, WIDE, load_reference, load_tiny, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

STD = 0.12  # of weights: so small that errors do not grow from layer to layer until all is noise
FORMATS = {"bfloat16": "none", "int8": "int8", "int4": "int4"}  # -> quantization, all of them with bfloat16 activations
HEADROOM = 1.5
FLOAT32_ERROR = 3e-6  # measured: 0.2e-6 to 2.1e-6
DRAWS = (3, 4, 5)  # seeds of the sequences; `make test` takes the first
# The largest relative RMS error of all draws, measured with AVX2. The reference computes in float32 with the float32
# weights of the checkpoint, so what bfloat16 rounds of weights is an error, too.
MEASURED: dict[str, tuple[float, float, float]] = {  # by architecture, in the order of FORMATS
    "llama": (0.014, 0.028, 0.29),
    "qwen2": (0.012, 0.028, 0.26),
    "qwen3": (0.014, 0.031, 0.28),
    "mistral": (0.012, 0.024, 0.21),
    "gemma2": (0.013, 0.027, 0.27),
    "gemma3": (0.015, 0.035, 0.29),
    "gemma4": (0.067, 0.11, 0.68),  # scores of normed queries and keys are not scaled: small errors of them count
    "gemma4_e": (0.083, 0.13, 0.62),
    "gemma4_moe": (0.16, 0.25, 0.82),
    "phi3": (0.013, 0.025, 0.28),
    "gpt2": (0.0079, 0.017, 0.17),
    "gpt_neox": (0.0065, 0.014, 0.12),
    "starcoder2": (0.01, 0.02, 0.2),
    "starcoder2_mqa": (0.007, 0.014, 0.14),
    "mixtral": (0.088, 0.085, 0.3),
    "qwen3_moe": (0.019, 0.035, 0.26),
    "gpt_oss": (0.044, 0.079, 0.27),
    "deepseek_v3": (0.051, 0.11, 0.35),
    "opt": (0.0077, 0.016, 0.15),
    "olmo2": (0.018, 0.038, 0.39),
    "granite": (0.0084, 0.014, 0.11),
    "cohere": (0.011, 0.024, 0.23),
    "stablelm": (0.014, 0.03, 0.3),
    "smollm3": (0.014, 0.028, 0.29),
    "lfm2": (0.016, 0.031, 0.28),
    "qwen3_5": (0.068, 0.093, 0.6),
    "granite4": (0.04, 0.036, 0.24),
    "jamba": (0.058, 0.061, 0.32),
    "kimi_linear": (0.17, 0.21, 0.52),
    "minimax": (0.021, 0.022, 0.1),
    "recurrent_gemma": (0.0063, 0.0099, 0.062),
    "smollm3_nope": (0.014, 0.028, 0.29),
    "phi3_partial": (0.012, 0.026, 0.3),
    "seed_oss": (0.012, 0.02, 0.25),
    "olmo3": (0.017, 0.036, 0.38),
    "exaone4": (0.017, 0.038, 0.36),
    "glm": (0.013, 0.021, 0.25),
    "glm4": (0.016, 0.032, 0.31),
    "ernie4_5": (0.0086, 0.021, 0.16),
    "cohere2": (0.011, 0.023, 0.22),
    "gemma1": (0.0073, 0.014, 0.12),
    "ministral": (0.012, 0.025, 0.23),
    "olmoe": (0.023, 0.061, 0.27),
    "qwen2_moe": (0.029, 0.033, 0.24),
    "glm4_moe": (0.05, 0.057, 0.34),
    "dots1": (0.059, 0.088, 0.36),
    "ernie4_5_moe": (0.026, 0.029, 0.31),
    "hunyuan_moe": (0.032, 0.06, 0.37),
    "hunyuan": (0.014, 0.026, 0.25),
    "ministral3": (0.013, 0.022, 0.24),
    "nemotron": (0.019, 0.038, 0.33),
    "diffllama": (0.013, 0.023, 0.21),
    "zaya": (0.014, 0.021, 0.12),
    "arcee": (0.013, 0.027, 0.25),
    "granitemoe": (0.039, 0.037, 0.13),
    "granitemoeshared": (0.039, 0.042, 0.14),
    "minimax_m2": (0.034, 0.053, 0.26),
    "exaone_moe": (0.061, 0.073, 0.32),
    "hy_v3": (0.022, 0.042, 0.28),
    "mellum": (0.057, 0.05, 0.28),
    "flex_olmo": (0.066, 0.078, 0.47),
    "olmo": (0.012, 0.027, 0.31),
    "apertus": (0.013, 0.027, 0.25),
    "helium": (0.013, 0.025, 0.3),
    "vaultgemma": (0.0075, 0.015, 0.12),
    "youtu": (0.011, 0.021, 0.22),
    "deepseek_halves": (0.022, 0.059, 0.23),
    "glm4_moe_lite": (0.032, 0.065, 0.29),
    "minicpm3": (0.0087, 0.013, 0.11),
    "deepseek_v2": (0.031, 0.044, 0.23),
    "phimoe": (0.082, 0.12, 0.33),
    "phi3_long": (0.012, 0.027, 0.31),
    "gpt_neox_serial": (0.0064, 0.014, 0.11),
    "phi": (0.0077, 0.015, 0.11),
    "phi_normed": (0.008, 0.017, 0.16),
    "persimmon": (0.0091, 0.019, 0.19),
    "stablelm_parallel": (0.011, 0.029, 0.25),
    "cohere_normed": (0.011, 0.025, 0.21),
    "llama4": (0.037, 0.058, 0.31),
    "granite_swa": (0.0084, 0.013, 0.099),
    "granitemoe_swa": (0.021, 0.021, 0.13),
    "cohere2_moe": (0.012, 0.028, 0.21),
    "cohere2_moe_sigmoid": (0.036, 0.063, 0.25),
    "afmoe": (0.07, 0.077, 0.36),  # of bfloat16 0.08 with AVX2, 0.053 with AMX
    "bamba": (0.012, 0.024, 0.22),
    "qwen3_5_moe": (0.079, 0.14, 0.6),
    "lfm2_moe": (0.056, 0.07, 0.32),
    "nemotron_h": (0.0096, 0.02, 0.17),
    "falcon_h1": (0.0079, 0.013, 0.12),
    "deepseek_v32": (0.29, 0.35, 0.72),  # rounded index keys choose other positions
    "glm_moe_dsa": (0.2, 0.27, 0.56),
    "glm5_next": (0.27, 0.22, 0.64),
    "hy_v4": (0.16, 0.22, 0.58),
    "minimax_m3": (0.15, 0.2, 0.53),
    "mistral_large4": (0.2, 0.29, 0.54),
    "deepseek_v4": (0.13, 0.15, 0.53),
    "inkling": (0.013, 0.015, 0.059),
    "inkling2": (0.046, 0.035, 0.21),
    "qwen4": (0.069, 0.093, 0.42),
    "wide": (0.013, 0.033, 0.28),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda architecture: make_checkpoint(architecture, directory, STD))


@pytest.fixture(scope="module")
def truth(checkpoint: Callable[[str], Path]) -> Callable[[str, int], list[Tensor]]:
    reference = cache(lambda architecture: load_reference(checkpoint(architecture)))
    return cache(lambda architecture, draw: reference_logits(reference(architecture), token_ids(architecture, draw)))


def token_ids(architecture: str, draw: int) -> list[list[int]]:
    """Returns sequences of several chunks; the wide model's longest chunk has more rows than one task of a kernel."""
    return sequences((230, 40, 17) if architecture == WIDE else (60, 41, 17), draw)


EVERY_WAY = (
    *("llama", "gpt2", "gemma3", "mixtral", "gpt_oss", "deepseek_v3"),
    *("qwen3_5", "granite4", "lfm2", "kimi_linear"),
)
"""Architectures whose layers and states are of all kinds that are not rare."""


def error_of(model: LoadedModel, architecture: str, draw: int, truth: Callable[[str, int], list[Tensor]]) -> float:
    logits = runner_logits(model, token_ids(architecture, draw), chunk=200 if architecture == WIDE else 11)
    return relative_error(logits, truth(architecture, draw))


@pytest.mark.parametrize("architecture", slow_but([*ARCHITECTURES, WIDE], *EVERY_WAY, WIDE))
def test_logits_err_as_little_as_measured(
    architecture: str, checkpoint: Callable[[str], Path], truth: Callable[[str, int], list[Tensor]]
) -> None:
    for quantization, measured in zip(FORMATS.values(), MEASURED[architecture], strict=True):
        model = load_tiny(checkpoint(architecture), "bfloat16", quantization)
        assert error_of(model, architecture, DRAWS[0], truth) <= HEADROOM * measured, quantization


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, WIDE])
def test_logits_of_other_sequences_err_as_little_as_measured(
    architecture: str, checkpoint: Callable[[str], Path], truth: Callable[[str, int], list[Tensor]]
) -> None:
    for quantization, measured in zip(FORMATS.values(), MEASURED[architecture], strict=True):
        model = load_tiny(checkpoint(architecture), "bfloat16", quantization)
        errors = [error_of(model, architecture, draw, truth) for draw in DRAWS]
        assert measured / HEADROOM <= max(errors) <= HEADROOM * measured, quantization


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, WIDE])
def test_float32_errs_by_summation_order_alone(
    architecture: str, checkpoint: Callable[[str], Path], truth: Callable[[str, int], list[Tensor]]
) -> None:
    model = load_tiny(checkpoint(architecture), "float32")
    assert error_of(model, architecture, DRAWS[0], truth) <= FLOAT32_ERROR


def test_the_documented_errors_are_those_measured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = [f"| {name} | {' | '.join(map(str, errors))} |" for name, errors in MEASURED.items()]
    assert [row for row in rows if row not in page] == []
