"""What a conversation costs before the engine, compared with its prompt as plain text: validate, render, tokenize."""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.command import exit_with
from engine.text.tokenizer import Tokenizer
from loadtest.numbers import positive
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.settings.settings import EMBEDDED_MODEL_DIR
from server.templates.render import ChatRenderer

REPEATS = 200
SENTENCE = "Return the number of bytes that were read from the file, or None if there is nothing to read now. "


def conversation(tokenizer: Tokenizer, num_tokens: int) -> list[dict[str, str]]:
    """Returns messages of two sentences each, user and assistant alternating, of about `num_tokens` tokens together."""
    num_turns = max(1, round(num_tokens / (2 * len(tokenizer.encode(SENTENCE)))))
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": SENTENCE * 2} for turn in range(num_turns)]


def median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times) * 1e3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chat", description=__doc__)
    parser.add_argument("--tokens", type=positive, default=1000, help="length of the conversation (default: 1000)")
    parser.add_argument("--model", default=str(EMBEDDED_MODEL_DIR), help="checkpoint (default: the embedded model)")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_pretrained(options.model)
    renderer = ChatRenderer(tokenizer, None, trusts_requests=False)
    messages = conversation(tokenizer, options.tokens)
    request = ChatRequest.model_validate({"messages": messages})
    text = renderer.render(request)
    bodies = {"chat": json.dumps({"messages": messages}), "completion": json.dumps({"prompt": text})}
    costs = {
        "validate, chat": median_ms(lambda: ChatRequest.model_validate(json.loads(bodies["chat"]))),
        "validate, completion": median_ms(lambda: CompletionRequest.model_validate(json.loads(bodies["completion"]))),
        "render, chat": median_ms(lambda: renderer.render(request)),
        "tokenize, both": median_ms(lambda: tokenizer.encode(text)),
    }
    costs["chat over completion"] = costs["validate, chat"] + costs["render, chat"] - costs["validate, completion"]
    table = Table("step", "ms", title=f"{len(messages)} messages, {len(tokenizer.encode(text))} tokens")
    for step, cost_ms in costs.items():
        table.add_row(step, f"{cost_ms:.3f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    exit_with(main)
