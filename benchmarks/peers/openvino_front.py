"""A `/v1/completions` server for OpenVINO GenAI, just enough for the load test: token ids in, greedy tokens out.

It runs in OpenVINO's own environment, so it imports nothing of twostep; `benchmarks/peers.toml` has the installation.
"""

import argparse
import asyncio
import json
import queue
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

MAX_BODY_BYTES = 64 << 20


@dataclass
class Answer:
    """A live request. Its queue gets lists of token ids as they are generated, then None."""

    prompt: list[int]
    max_tokens: int
    tokens: "asyncio.Queue[list[int] | None]"
    is_disconnected: bool = False  # the client has gone: the request is cancelled


class Pipeline:
    """The engine. It runs in a thread of its own, and nothing else touches it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._genai, self._openvino, self._numpy = map(import_module, ("openvino_genai", "openvino", "numpy"))
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = options.cache_gb
        scheduler.max_num_batched_tokens = options.batch_tokens
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        device = {"INFERENCE_NUM_THREADS": options.threads, "PERFORMANCE_HINT": "LATENCY"}
        device["INFERENCE_PRECISION_HINT"] = options.precision
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", device)
        self._incoming: queue.Queue[Answer] = queue.Queue()
        self._live: dict[int, tuple[Any, Answer]] = {}
        self._count = 0

    def add(self, answer: Answer) -> None:
        """Queues a request; callable from any thread."""
        self._incoming.put(answer)

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the engine step by step, forever."""
        while True:
            self._admit()
            for handle, answer in self._live.values():
                if answer.is_disconnected:
                    handle.cancel()  # its blocks are free after the step
            self._pipeline.step()
            for key, (handle, answer) in list(self._live.items()):
                if handle.can_read():
                    tokens = [token for output in handle.read().values() for token in output.generated_ids]
                    loop.call_soon_threadsafe(answer.tokens.put_nowait, tokens)
                elif handle.get_status() != self._genai.GenerationStatus.RUNNING:
                    del self._live[key]
                    loop.call_soon_threadsafe(answer.tokens.put_nowait, None)
            time.sleep(0.0002)  # step() holds the GIL: let the event loop send the tokens now

    def _admit(self) -> None:
        """Admits all queued requests; waits for one if none is running."""
        while not self._live or not self._incoming.empty():
            answer = self._incoming.get()
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = answer.max_tokens, True, False
            prompt = self._openvino.Tensor(self._numpy.array([answer.prompt], dtype="int64"))
            self._count += 1
            self._live[self._count] = (self._pipeline.add_request(self._count, prompt, config), answer)


def make_app(options: argparse.Namespace) -> Any:
    """Returns an aiohttp application, after the pipeline was loaded."""
    web, pipeline = import_module("aiohttp.web"), Pipeline(options)
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(options.model / "tokenizer.json"))

    async def completions(request: Any) -> Any:
        body = await request.json()
        answer = Answer(body["prompt"], body["max_tokens"], asyncio.Queue())
        pipeline.add(answer)
        try:
            return await stream(request, answer)
        except (asyncio.CancelledError, ConnectionError):
            answer.is_disconnected = True
            raise asyncio.CancelledError from None  # a broken connection would be a traceback in the log

    async def stream(request: Any, answer: Answer) -> Any:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_sent = 0
        while num_sent < answer.max_tokens and (tokens := await answer.tokens.get()) is not None:
            num_sent += len(tokens)
            if tokens:
                await response.write(_event({"choices": [{"index": 0, "text": tokenizer.decode(tokens)}]}))
        usage = {"prompt_tokens": len(answer.prompt), "completion_tokens": num_sent}
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response

    async def models(_: Any) -> Any:
        return web.json_response({"data": [{"id": "openvino"}]})

    async def start(_: Any) -> None:
        threading.Thread(target=pipeline.run, args=(asyncio.get_running_loop(),), daemon=True).start()

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.on_startup.append(start)
    return app


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="what optimum-cli exported")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=256, help="most tokens of a step (default: 256)")
    options = parser.parse_args()
    run_app = import_module("aiohttp.web").run_app
    run_app(make_app(options), host="127.0.0.1", port=options.port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
