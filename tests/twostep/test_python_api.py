"""The Python API over a real engine: the server's answers, in order, and nothing left behind by what is interrupted."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

import twostep
from tests.soak.server import ROOT, running_server
from twostep import LLM, AsyncEngine, RequestOutput, SamplingParams, TwostepError

SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "dtype": "float32"}
PROMPTS = ["A list is", "def add(a, b):", "The tuple"]
MESSAGES = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), str(value))]
    with running_server(*flags) as server:
        yield server.url


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lets SIGINT interrupt this process: one that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ask(llm: LLM, prompts: Any, params: Any = None) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def logprobs_of(output: RequestOutput) -> list[float]:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [logprobs[token_id].logprob for token_id, logprobs in zip(answer.token_ids, answer.logprobs, strict=True)]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 1.1, "top_p": 0.9, "seed": 7}])
def test_answers_are_those_of_the_server_to_the_last_bit(llm: LLM, url: str, how: dict[str, Any]) -> None:
    outputs = ask(llm, PROMPTS, SamplingParams(**how, max_tokens=24, logprobs=2))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        body = {"prompt": prompt, "max_tokens": 24, "logprobs": 2, "return_token_ids": True, **how}
        choice = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]
        (answer,) = output.outputs
        assert (answer.text, list(answer.token_ids)) == (choice["text"], choice["token_ids"])
        assert logprobs_of(output) == choice["logprobs"]["token_logprobs"]
        assert answer.finish_reason == choice["finish_reason"]


def test_a_chat_is_that_of_the_server(llm: LLM, url: str) -> None:
    (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 16}
    choice = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()["choices"][0]
    assert output.outputs[0].text == choice["message"]["content"] != ""
    assert output.prompt is not None and "What is a list?" in output.prompt


def test_many_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = [[token_id, token_id + 1] for token_id in range(60, 130)]
    outputs = ask(llm, prompts, SamplingParams(max_tokens=4, temperature=0))
    assert [output.prompt_token_ids for output in outputs] == prompts
    alone = ask(llm, prompts[33], SamplingParams(max_tokens=4, temperature=0))
    assert outputs[33].outputs == alone[0].outputs


def test_prompts_have_all_of_vllms_forms(llm: LLM) -> None:
    (text,) = ask(llm, "A list is", SamplingParams(temperature=0))
    ids = text.prompt_token_ids
    forms: list[Any] = [{"prompt": "A list is"}, {"prompt_token_ids": ids}, ids]
    assert [each.outputs for each in ask(llm, forms, SamplingParams(temperature=0))] == [text.outputs] * 3
    assert ask(llm, []) == []


def test_each_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    one, two = ask(llm, ["A list is"] * 2, [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2, n=2, seed=3)])
    assert [len(one.outputs), len(two.outputs)] == [1, 2] and two.seed == 3
    again = ask(llm, "A list is", SamplingParams(max_tokens=2, seed=4))
    assert again[0].outputs[0].token_ids == two.outputs[1].token_ids  # the second answer's seed
    with pytest.raises(TwostepError, match="2 prompts and 1 sampling_params"):
        ask(llm, ["a", "b"], [SamplingParams()])


def test_none_as_the_maximum_of_tokens_fills_the_context(llm: LLM) -> None:
    room = 5
    prompt = [70] * (llm.info.max_model_len - room)
    (output,) = ask(llm, prompt, SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == room


def test_structured_outputs_are_kept(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, structured_outputs={"choice": ["yes", "no"]}, seed=1)
    assert ask(llm, "Is it? ", params)[0].outputs[0].text in ("yes", "no")


def test_what_the_engine_refuses_ends_the_others_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(TwostepError, match="maximum context length"):
        ask(llm, ["A list", [70] * (llm.info.max_model_len + 1)])
    assert ask(llm, "A list")[0].finished


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        (None, None, "A prompt is a text, a list of token ids, or a dict"),
        ([b"ab"], None, "A prompt is a text"),
        (["a", 5], None, "A prompt is a text"),
        ("a\ud800", None, "prompt: Text must not contain lone surrogates"),
        ("", None, "The prompt must contain at least one token"),
        ([[]], None, "The prompt must contain at least one token"),
        ("a", {"max_tokens": 1}, "sampling_params are a SamplingParams, or a list"),
        (["a"], [{"max_tokens": 1}], "sampling_params are a SamplingParams, or a list"),
    ],
)
def test_what_is_no_prompt_or_no_parameters_is_told_in_one_sentence(
    llm: LLM, prompts: Any, params: Any, words: str
) -> None:
    with pytest.raises(TwostepError, match=words):
        ask(llm, prompts, params)


def test_a_closed_model_says_so() -> None:
    llm = LLM(**SETTINGS)
    llm.close()
    with pytest.raises(TwostepError, match="This LLM was closed"):
        ask(llm, "a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n: "),
        ({"stop": ["a"] * 100}, "stop"),
        ({"structured_outputs": {"foo": 1}}, "structured_outputs"),
    ],
)
def test_parameters_are_refused_by_name_when_they_are_made(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TwostepError, match=words):
        SamplingParams(**fields)


@pytest.mark.parametrize("name", ["port", "gpu_memory_utilization", "config"])
def test_settings_that_a_model_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(TwostepError, match=f"{name} is no setting of a model"):
        LLM(**{name: 1})


def test_a_model_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(TwostepError, match="/nowhere is not a checkpoint directory"):
        LLM("/nowhere")


@pytest.mark.parametrize("after_s", [0.0, 1.0])
def test_an_interrupted_call_ends_its_requests_and_the_next_one_works(
    after_s: float, llm: LLM, interruptible: None
) -> None:
    """As Ctrl-C does: SIGINT while the call begins, or waits."""
    timer = threading.Timer(after_s, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            ask(llm, [[70 + index] for index in range(8)], SamplingParams(max_tokens=1000, ignore_eos=True))
    backend = llm._engine._loaded
    assert backend.engine.num_live == 0
    assert ask(llm, "A list")[0].finished


def test_a_notebooks_running_loop_is_no_obstacle(llm: LLM) -> None:
    async def cell() -> list[RequestOutput]:
        return ask(llm, "A list", SamplingParams(max_tokens=2))

    assert asyncio.run(cell())[0].finished


def test_answers_stream_and_a_closed_stream_ends_its_request() -> None:
    async def run() -> None:
        async with AsyncEngine(**SETTINGS) as engine:
            texts = [output.outputs[0].text async for output in engine.generate("A list is", SamplingParams(seed=1))]
            assert len(texts) > 1 and all(later.startswith(text) for text, later in pairwise(texts))
            stream = engine.chat(MESSAGES, SamplingParams(max_tokens=500, ignore_eos=True))
            assert not (await anext(stream)).finished
            await stream.aclose()
            assert engine._loaded.engine.num_live == 0
        with pytest.raises(TwostepError, match=r"await start\(\) first"):
            await anext(engine.generate("x"))

    asyncio.run(run())


def test_chat_options_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(TwostepError, match="no option chat_template"):
        llm.chat(MESSAGES, use_tqdm=False, chat_template="x")


@pytest.mark.slow
def test_the_example_of_the_documentation_runs_and_ends_quietly() -> None:
    """It does not close its model."""
    script, *_ = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0 and ended.stdout.startswith("A list is"), ended.stderr
    assert "Prompts: 100%" in ended.stderr and "Traceback" not in ended.stderr and "Error" not in ended.stderr


def test_the_public_names_are_there_and_cost_nothing_before_they_are_used() -> None:
    assert set(twostep.__all__) <= set(dir(twostep))
    for name in twostep.__all__:
        assert getattr(twostep, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        twostep.Nothing  # noqa: B018
    script = "import sys, twostep; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0
    script = "import sys; from twostep import LLM; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0
