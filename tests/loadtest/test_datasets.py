"""Requests of a file: what each form means, what is refused, and what is sent."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.arguments import parse_config
from loadtest.datasets.entries import Dataset, Entry, TracedPrompt, dataset_stream
from loadtest.datasets.file import read_dataset
from loadtest.endpoints import Endpoint
from loadtest.errors import UsageError
from loadtest.workload import Conversation, Shape
from tests.loadtest.fake_server import FakeServer, running
from tests.loadtest.program import Capture, Run


def written(tmp_path: Path, *records: Any) -> str:
    """Returns the name of a file with a record a line; a string stands for a line as it is."""
    path = tmp_path / "requests"
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records), encoding="utf-8")
    return str(path)


def read(tmp_path: Path, *records: Any, endpoint: Endpoint = Endpoint.CHAT, num: int | None = None) -> Dataset:
    return read_dataset(written(tmp_path, *records), endpoint, num)


def spoken(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


QUESTION, ANSWER = ("human", "Why?"), ("gpt", "Because it is.")


def test_a_conversation_is_its_first_question_with_an_answer_of_the_length_that_is_there(tmp_path: Path) -> None:
    records = [spoken(QUESTION, ANSWER), spoken(("gpt", "Hi"), QUESTION, ANSWER, ("human", "Really?"), ("gpt", "Yes"))]
    array = json.dumps(records, indent=1)
    for text in (array, "\n".join(map(json.dumps, records))):
        assert read(tmp_path, text).entries == (Entry("Why?", 4), Entry("Why?", 4))


def test_a_system_message_is_sent_where_messages_are(tmp_path: Path) -> None:
    record = spoken(("system", "Be brief."), QUESTION, ANSWER)
    [chat] = read(tmp_path, record).entries
    told = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    assert chat.prompt == Conversation(told)
    assert read(tmp_path, record, endpoint=Endpoint.COMPLETIONS).entries == (Entry("Why?", 4),)


def test_conversations_without_a_question_and_its_answer_are_skipped_and_counted(tmp_path: Path) -> None:
    dataset = read(tmp_path, spoken(), spoken(QUESTION), spoken(QUESTION, ANSWER), spoken(("gpt", "Hi")))
    assert (len(dataset.entries), dataset.num_skipped) == (1, 3)


def traced(timestamp: int, length: int, *hash_ids: int) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 7, "hash_ids": list(hash_ids)}


def test_a_trace_has_lengths_blocks_and_milliseconds(tmp_path: Path) -> None:
    dataset = read(tmp_path, traced(2000, 600, 3, 4), traced(3500, 512, 3))
    assert dataset.entries == (Entry(TracedPrompt(600, (3, 4)), 7, 2.0), Entry(TracedPrompt(512, (3,)), 7, 3.5))
    assert list(dataset.offsets_s(2.0)) == [0.0, 0.75]


def test_equal_hash_ids_are_equal_tokens_and_nothing_else_is(tmp_path: Path) -> None:
    dataset = read(tmp_path, traced(0, 1100, 3, 4, 5), traced(1, 1024, 3, 4), traced(2, 1024, 9, 4), traced(3, 600))
    a, b, c, alone = (spec.prompt for spec in dataset_stream(dataset, Shape(), "1", is_salted=True))
    assert [len(prompt) for prompt in (a, b, c, alone)] == [1100, 1024, 1024, 600]
    assert (a[:1024] == b, c[512:] == b[512:], c[:512] == b[:512]) == (True, True, False)
    other = next(iter(dataset_stream(dataset, Shape(), "2", is_salted=True)))
    assert other.prompt != a and other.max_tokens == 7


def test_a_line_is_a_request_with_its_own_length_and_time(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    first, second = {"id": 1, "prompt": "Why?", "arrival_s": 1}, {"messages": said, "tools": tools, "max_tokens": 5}
    dataset = read(tmp_path, first, "", {**second, "arrival_s": 1.5})
    assert dataset.entries == (Entry("Why?", None, 1.0), Entry(Conversation(tuple(said), tuple(tools)), 5, 1.5))


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_MESSAGES = [
    [],
    [{"role": "robot", "content": "x"}],
    [{"role": "user", "content": 3}],
    [{"role": "user"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}],
]


@pytest.mark.parametrize(
    ("records", "line", "why"),
    [
        (["{"], 1, "not JSON"),
        (["", "[1]"], 2, "not a JSON object"),
        (['[{"prompt": "a"},', '{"prompt": "a"', "]"], 3, "not JSON"),
        (['[{"prompt": "a"}', '{"prompt": "a"}]'], 2, "a comma"),
        (['[{"prompt": "a"},', ' {"prompt": 3}]'], 2, "prompt is not a string"),
        ([{"prompt": "a"}, {"text": "a"}], 2, "none of conversations"),
        ([{"prompt": "a", "temperature": 1}], 1, "'temperature' is not known"),
        ([{"prompt": "a", "messages": []}], 1, "neither with messages"),
        ([{"prompt": "x" * 4_000_001}], 1, "more than 4,000,000 characters"),
        ([{"prompt": "a", "max_tokens": 0}], 1, "max_tokens is not a whole number"),
        ([{"prompt": "a", "max_tokens": True}], 1, "max_tokens is not a whole number"),
        (['{"prompt": "a", "arrival_s": NaN}'], 1, "arrival_s is not a number"),
        ([{"prompt": "a", "arrival_s": 1}, {"prompt": "a"}], 2, "all requests have an arrival time or none"),
        ([{"prompt": "a", "arrival_s": 1}, {"prompt": "a", "arrival_s": 0}], 2, "arrives before"),
        ([{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}], 1, "1 hash_ids"),
        ([{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}], 1, "whole numbers"),
        ([{"timestamp": 1, "input_length": 10**9, "output_length": 1}], 1, "input_length is not"),
        ([{"timestamp": 1, "input_length": 5, "output_length": 1, "session_id": 1}], 1, "'session_id' is not known"),
        ([{"conversations": "x"}], 1, "conversations is not a list"),
        ([{"conversations": [{"from": "human"}]}], 1, "value is not a string"),
        *[([{"messages": messages}], 1, "") for messages in BAD_MESSAGES],
        ([{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]}], 1, "of type function"),
    ],
)
def test_a_record_that_makes_no_sense_is_one_sentence_with_its_line(
    records: list[Any], line: int, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, *records)
    assert f", line {line}: " in str(refused.value) and why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_or_has_too_few_requests_is_refused(tmp_path: Path) -> None:
    one = written(tmp_path, {"prompt": "a"})
    for path, num, why in (
        (f"{tmp_path}/no", None, "cannot read"),
        (str(tmp_path), None, "cannot"),
        (one, 2, "too few"),
    ):
        with pytest.raises(UsageError, match=why):
            read_dataset(path, Endpoint.CHAT, num)
    Path(one).write_bytes(b"[\n\xff]")
    with pytest.raises(UsageError, match="line 2: it is not UTF-8"):
        read_dataset(one, Endpoint.CHAT, None)


def test_messages_are_not_sent_to_completions(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1: it has messages"):
        read(tmp_path, {"messages": [{"role": "user", "content": "a"}]}, endpoint=Endpoint.COMPLETIONS)


@pytest.mark.parametrize(
    "flags",
    [
        ("--workload", "random"),
        ("--prompt-len", "5"),
        ("--scenario", "S1"),
        ("--arrivals",),
        ("--speedup", "2"),
        ("--vocab-size", "9"),
        ("--requests", "3"),
    ],
)
def test_flags_that_a_file_takes_the_place_of_are_refused(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a"})
    parse_config(["http://a", "--dataset", path])
    with pytest.raises(UsageError):
        parse_config(["http://a", "--dataset", path, *flags])


@pytest.mark.parametrize("flags", [("--arrivals",), ("--no-arrivals",), ("--speedup", "2"), ("--no-salt",)])
def test_flags_of_a_file_are_refused_without_one(flags: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="belongs to --dataset"):
        parse_config(["http://a", *flags])


def test_arrival_times_make_an_open_loop_unless_told_otherwise(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a", "arrival_s": 0}, {"prompt": "b", "arrival_s": 9})
    flags = ("http://a", "--dataset", path)
    kept, closed = parse_config([*flags, "--speedup", "3"]).schedule, parse_config([*flags, "--no-arrivals"]).schedule
    assert (kept.keeps_arrivals, kept.speedup, kept.concurrency, kept.num_requests) == (True, 3.0, None, 2)
    assert (closed.keeps_arrivals, closed.concurrency) == (False, 1)
    assert not parse_config([*flags, "--rate", "2"]).schedule.keeps_arrivals
    for both in (("--rate", "2", "--arrivals"), ("--rate", "2", "--speedup", "2")):
        with pytest.raises(UsageError):
            parse_config([*flags, *both])


def test_every_request_is_sent_once_and_no_two_runs_share_a_prompt(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, *({"prompt": f"the same words, {number}", "max_tokens": 3} for number in range(4)))
    with running(FakeServer()) as fake:
        run = Run(capsys, fake.url, "--dataset", path, "--rounds", "2", "--warmup", "1", "--quiet", "--strict")
    assert run.code == 0
    prompts = [body["prompt"] for body in fake.bodies]
    assert len(set(prompts)) == len(prompts) == 10
    marks = [prompt.partition(" ")[0] for prompt in prompts]
    assert [len(set(marks[1:5])), len(set(marks[6:])), len(set(marks))] == [1, 1, 4]
    assert [prompt.partition(" ")[2] for prompt in prompts[1:5]] == [f"the same words, {n}" for n in range(4)]
    assert run.document["config"]["dataset"] == {"file": path, "num_requests": 4, "num_skipped": 0}


def test_without_salt_prompts_are_those_of_the_file(tmp_path: Path, capsys: Capture) -> None:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = written(tmp_path, {"messages": said, "max_tokens": 2})
    with running(FakeServer()) as fake:
        Run(capsys, fake.url, "--dataset", path, "--endpoint", "chat", "--no-salt", "--warmup", "1", "--quiet")
        Run(capsys, fake.url, "--dataset", path, "--endpoint", "chat", "--warmup", "0", "--quiet")
    warm_up, plain, salted = (body["messages"] for body in fake.bodies)
    assert plain == said
    assert all(told[0]["content"].endswith("] s") and told[1:] == said[1:] for told in (warm_up, salted))


def test_a_trace_is_sent_when_it_is_due(tmp_path: Path, capsys: Capture) -> None:
    path = written(tmp_path, *(traced(1000 + 20 * number, 5, number) for number in range(3)))
    with running(FakeServer(first_token_s=0.2)) as fake:
        run = Run(capsys, fake.url, "--dataset", path, "--warmup", "0", "--quiet")
    assert run.group["send_lag_ms"]["count"] == run.group["requests"]["ok"] == 3
    assert fake.peak_in_flight > 1
    assert {len(body["prompt"]) for body in fake.bodies} == {5}


def test_calls_and_their_results_become_the_items_of_a_response(tmp_path: Path, capsys: Capture) -> None:
    said = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    tool = {"name": "f", "parameters": {}}
    path = written(tmp_path, {"messages": said, "tools": [{"type": "function", "function": tool}], "max_tokens": 2})
    flags = ("--dataset", path, "--no-salt", "--warmup", "0", "--quiet")
    with running(FakeServer()) as fake:
        Run(capsys, fake.url, *flags, "--endpoint", "responses")
        Run(capsys, fake.url, *flags, "--endpoint", "chat")
    response, chat = fake.bodies
    assert response["tools"] == [{"type": "function", **tool}]
    assert response["input"] == [
        {"role": "user", "content": "u"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
    ]
    assert (chat["messages"], chat["tools"][0]["function"]) == (said, tool)
