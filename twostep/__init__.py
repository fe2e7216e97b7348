"""Text from a language model in Python, without a server: `LLM` waits for its answers, `AsyncEngine` streams them.

    from twostep import LLM, SamplingParams

    llm = LLM("Qwen/Qwen2.5-0.5B-Instruct")
    for output in llm.generate(["A list is", "A tuple is"], SamplingParams(max_tokens=32, seed=1)):
        print(output.prompt, output.outputs[0].text)

The model runs in the engine process that the server has, too, by the same code: equal requests have equal tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.errors import TwostepError
    from twostep.offline.async_engine import AsyncEngine
    from twostep.offline.llm import LLM
    from twostep.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from twostep.offline.sampling_params import SamplingParams

_HOMES = {
    "AsyncEngine": "twostep.offline.async_engine",
    "CompletionOutput": "twostep.offline.outputs",
    "LLM": "twostep.offline.llm",
    "Logprob": "twostep.offline.outputs",
    "RequestOutput": "twostep.offline.outputs",
    "SamplingParams": "twostep.offline.sampling_params",
    "TwostepError": "engine.core.errors",
}
"""Where each public name is defined: imported when it is first used, since that takes a second."""

__all__ = ["LLM", "AsyncEngine", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "TwostepError"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'twostep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
