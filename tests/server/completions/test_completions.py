"""Completions, whole and streamed: text, choices, seeds, echo, logprobs, ranking, usage and timings."""

from typing import Any

import pytest

from engine.core.request import FinishReason
from tests.server.byte_tokenizer import BOS, EOS
from tests.server.events import chunks_of, error_of, text_of
from tests.server.fake_engine import saying
from tests.server.live_server import LiveServer


def test_sixteen_tokens_unless_asked_otherwise(server: LiveServer) -> None:
    body = server.complete("Hi").json()
    assert body["usage"]["completion_tokens"] == len(body["choices"][0]["text"]) == 16
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stream_adds_up_to_the_whole_completion(server: LiveServer) -> None:
    whole = server.complete("Hi", seed=5, n=3, max_tokens=9).json()
    chunks = chunks_of(server.complete("Hi", seed=5, n=3, max_tokens=9, stream=True))
    assert [text_of(chunks, index) for index in range(3)] == [choice["text"] for choice in whole["choices"]]


def test_streamed_choices_keep_their_own_prompts_and_counts(server: LiveServer) -> None:
    server.engine.delay_s = 0.001
    parameters: dict[str, Any] = {"seed": 5, "n": 2, "max_tokens": 4, "echo": True, "logprobs": 1}
    whole = server.complete(["one", "three"], **parameters).json()["choices"]
    chunks = chunks_of(server.complete(["one", "three"], stream=True, **parameters))
    for index, choice in enumerate(whole):
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name, entries in choice["logprobs"].items():
            assert [entry for piece in pieces for entry in piece["logprobs"][name]] == entries


def test_one_chunk_per_token_and_no_more(server: LiveServer) -> None:
    chunks = chunks_of(server.complete("Hi", max_tokens=7, stream=True))
    assert len(chunks) == 7
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 6 + ["length"]
    assert ["timings" in chunk for chunk in chunks] == [False] * 6 + [True]


def test_characters_are_never_split(server: LiveServer) -> None:
    server.engine.rule = saying("a€b")
    chunks = chunks_of(server.complete("Hi", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "€", "b", ""]


@pytest.mark.parametrize("text", ["€uro", "a€", "aSTO", "€"])
def test_tokens_whose_text_is_held_back_are_in_the_next_chunk(server: LiveServer, text: str) -> None:
    server.engine.rule = saying(text)
    asked: dict[str, Any] = {"logprobs": 1, "return_token_ids": True, "stop": ["STOP"], "max_tokens": 20}
    whole = server.complete("Hi", **asked).json()
    *chunks, usage = chunks_of(server.complete("Hi", stream=True, stream_options={"include_usage": True}, **asked))
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert all(piece["text"] for piece in pieces[:-1])
    for name, entries in whole["choices"][0]["logprobs"].items():
        assert [entry for piece in pieces for entry in piece["logprobs"][name]] == entries
    assert [each for piece in pieces for each in piece["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [each for piece in pieces for each in piece.get("prompt_token_ids", ())] == [BOS, 72, 105]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]


def test_a_stream_whose_first_text_is_held_back_begins_with_that_text(server: LiveServer) -> None:
    server.engine.rule = saying("€b")
    chunks = chunks_of(server.complete("Hi", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["€", "b", ""]
    echoed = chunks_of(server.complete("Hi", stream=True, echo=True))
    assert [chunk["choices"][0]["text"] for chunk in echoed] == ["Hi", "€", "b", ""]


def test_eos_stops_without_a_reason_to_name(server: LiveServer) -> None:
    server.engine.rule = saying("yes")
    choice = server.complete("Hi").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("yes", "stop", None)


def test_a_stop_string_is_named_and_cut(server: LiveServer) -> None:
    server.engine.rule = saying("one two three")
    choice = server.complete("Hi", stop=["three", "two"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "two")


def test_a_stop_token_is_named(server: LiveServer) -> None:
    server.engine.rule = saying("abc")
    choice = server.complete("Hi", stop_token_ids=[ord("c")]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("ab", ord("c"))


def test_every_prompt_gets_n_choices_in_order(server: LiveServer) -> None:
    both = server.complete(["one", "two"], n=2, temperature=0, max_tokens=4).json()
    one = server.complete("one", temperature=0, max_tokens=4).json()["choices"][0]["text"]
    two = server.complete("two", temperature=0, max_tokens=4).json()["choices"][0]["text"]
    assert [choice["text"] for choice in both["choices"]] == [one, one, two, two]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 16,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_streams_of_several_choices_interleave(server: LiveServer) -> None:
    server.engine.delay_s = 0.002
    chunks = chunks_of(server.complete("Hi", n=2, max_tokens=4, stream=True))
    indices = [chunk["choices"][0]["index"] for chunk in chunks]
    assert sorted(indices) == [0] * 4 + [1] * 4
    assert indices != sorted(indices)


@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105]]])
def test_prompts_may_be_token_ids(server: LiveServer, prompt: object) -> None:
    server.complete(prompt)
    assert server.engine.requests[0].prompt_token_ids == [72, 105]


def test_special_tokens_are_added_to_text_only_if_wanted(server: LiveServer) -> None:
    server.complete("Hi")
    server.complete("Hi", add_special_tokens=False)
    assert [request.prompt_token_ids for request in server.engine.requests] == [[BOS, 72, 105], [72, 105]]


class TestDefaultMaxTokens:
    def test_it_is_sixteen(self, server: LiveServer) -> None:
        assert server.complete("Hi").json()["usage"]["completion_tokens"] == 16

    @pytest.mark.parametrize("left", [1, 5, 15, 16])
    def test_it_shrinks_to_what_fits_behind_each_prompt(self, server: LiveServer, left: int) -> None:
        long, short = [65] * (512 - left), [65]
        choices = server.complete([long, short], n=2).json()["choices"]
        assert [len(choice["text"]) for choice in choices] == [left, left, 16, 16]
        assert {choice["finish_reason"] for choice in choices} == {"length"}

    def test_a_limit_that_was_asked_for_does_not(self, server: LiveServer) -> None:
        error = error_of(server.complete([65] * 507, max_tokens=16))
        assert error["code"] == "context_length_exceeded"

    @pytest.mark.parametrize("num_tokens", [512, 513])
    def test_a_prompt_that_fills_the_context_is_too_long(self, server: LiveServer, num_tokens: int) -> None:
        error = error_of(server.complete([65] * num_tokens))
        assert error["code"] == "context_length_exceeded" and "maximum context length" in error["message"]


class TestSeeds:
    def test_a_seed_is_drawn_and_returned(self, server: LiveServer) -> None:
        first, second = server.complete("Hi").json(), server.complete("Hi").json()
        assert first["seed"] != second["seed"]
        again = server.complete("Hi", seed=first["seed"]).json()
        assert again["choices"] == first["choices"]

    def test_choice_i_uses_seed_plus_i(self, server: LiveServer) -> None:
        both = server.complete("Hi", seed=7, n=2).json()
        second = server.complete("Hi", seed=8).json()
        assert both["choices"][1]["text"] == second["choices"][0]["text"]

    def test_negative_seeds_are_seeds(self, server: LiveServer) -> None:
        answer = server.complete("Hi", seed=-(2**63)).json()
        assert answer["seed"] == -(2**63)
        assert answer["choices"] == server.complete("Hi", seed=-(2**63)).json()["choices"]

    def test_a_stream_has_its_seed(self, server: LiveServer) -> None:
        chunks = chunks_of(server.complete("Hi", stream=True))
        assert len({chunk["seed"] for chunk in chunks}) == 1


class TestEcho:
    def test_the_prompt_comes_first(self, server: LiveServer) -> None:
        plain = server.complete("Hi", seed=1).json()["choices"][0]["text"]
        assert server.complete("Hi", seed=1, echo=True).json()["choices"][0]["text"] == "Hi" + plain
        assert text_of(chunks_of(server.complete("Hi", seed=1, echo=True, stream=True))) == "Hi" + plain

    def test_token_ids_are_echoed_as_text(self, server: LiveServer) -> None:
        assert server.complete([BOS, 72, 105], echo=True, max_tokens=0).json()["choices"][0]["text"] == "Hi"

    @pytest.mark.parametrize("stream", [False, True])
    def test_no_token_needs_to_be_generated(self, server: LiveServer, stream: bool) -> None:
        response = server.complete("Hi", echo=True, max_tokens=0, logprobs=1, stream=stream)
        (body,) = chunks_of(response) if stream else [response.json()]
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
        assert choice["logprobs"]["tokens"] == ["<s>", "H", "i"]

    def test_one_token_makes_one_entry_more_than_the_prompt(self, server: LiveServer) -> None:
        """Evaluation harnesses score so: they drop the last entry, and take the rest."""
        logprobs = server.complete("Hi", echo=True, max_tokens=1, logprobs=2).json()["choices"][0]["logprobs"]
        assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(logprobs, 4)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert None not in logprobs["token_logprobs"][1:]

    def test_an_end_at_once_still_makes_that_entry(self, server: LiveServer) -> None:
        server.engine.rule = saying("")
        logprobs = server.complete("Hi", echo=True, max_tokens=1, logprobs=2).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["<s>", "H", "i", "</s>"]

    def test_offsets_point_into_the_text(self, server: LiveServer) -> None:
        server.engine.rule = saying("€uro")
        choice = server.complete("Hü", echo=True, max_tokens=6, logprobs=0).json()["choices"][0]
        assert choice["text"] == "Hü€uro"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 3, 4, 5]

    def test_max_tokens_zero_needs_a_reason(self, server: LiveServer) -> None:
        assert error_of(server.complete("Hi", max_tokens=0))["param"] == "max_tokens"
        assert server.complete("Hi", max_tokens=0, prompt_logprobs=0).status_code == 200


class TestLogprobs:
    def test_the_token_itself_is_always_among_the_top(self, server: LiveServer) -> None:
        server.engine.rule = saying("az")
        logprobs = server.complete("Hi", max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]
        assert logprobs["top_logprobs"] == [{"a": -0.5, "b": -1.0}, {"a": -0.5, "b": -1.0, "z": -13.0}]
        assert logprobs["token_logprobs"] == [-0.5, -13.0]

    def test_parts_of_characters_are_written_as_bytes(self, server: LiveServer) -> None:
        server.engine.rule = saying("é")
        logprobs = server.complete("Hi", max_tokens=2, logprobs=0).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]

    def test_streamed_pieces_make_the_whole(self, server: LiveServer) -> None:
        whole = server.complete("Hi", seed=3, logprobs=2, echo=True).json()["choices"][0]["logprobs"]
        chunks = chunks_of(server.complete("Hi", seed=3, logprobs=2, echo=True, stream=True))
        pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert {name: [entry for piece in pieces for entry in piece[name]] for name in whole} == whole

    def test_none_unless_asked_for(self, server: LiveServer) -> None:
        assert server.complete("Hi").json()["choices"][0]["logprobs"] is None


class TestBestOf:
    def test_the_likeliest_candidates_are_returned_best_first(self, server: LiveServer) -> None:
        letters = "mcaz"
        server.engine.rule = lambda request, _: ord(letters[request.params.seed])
        body = server.complete("Hi", seed=0, best_of=4, n=2, max_tokens=3).json()
        assert [choice["text"] for choice in body["choices"]] == ["aaa", "ccc"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
        assert body["usage"]["completion_tokens"] == 12

    def test_the_mean_per_token_decides_not_the_sum(self, server: LiveServer) -> None:
        texts = {0: "b", 1: "aaaa"}
        server.engine.rule = lambda request, i: saying(texts[request.params.seed])(request, i)
        body = server.complete("Hi", seed=0, best_of=2, stop_token_ids=[EOS], ignore_eos=True).json()
        assert body["choices"][0]["text"] == "aaaa"

    def test_candidates_stay_with_their_prompt(self, server: LiveServer) -> None:
        body = server.complete([[65], [66]], best_of=2, max_tokens=1, echo=True).json()
        assert [choice["text"][0] for choice in body["choices"]] == ["A", "B"]

    @pytest.mark.parametrize("parameters", [{"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}])
    def test_what_cannot_be_is_refused(self, server: LiveServer, parameters: dict[str, Any]) -> None:
        assert error_of(server.complete("Hi", **parameters))["param"] == "best_of"

    @pytest.mark.parametrize("parameters", [{"best_of": 1}, {"best_of": 2, "n": 2}])
    def test_what_changes_nothing_may_be_streamed(self, server: LiveServer, parameters: dict[str, Any]) -> None:
        assert server.complete("Hi", stream=True, **parameters).status_code == 200


class TestUsage:
    def test_cached_tokens_are_reported(self, server: LiveServer) -> None:
        server.engine.num_cached_tokens = 2
        response = server.complete("Hi", n=2)
        assert response.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert response.headers["x-cached-tokens"] == "2"

    def test_a_stream_reports_it_last_and_only_if_asked(self, server: LiveServer) -> None:
        *chunks, last = chunks_of(server.complete("Hi", stream=True, stream_options={"include_usage": True}))
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 16
        assert set(last["metrics"]) == {"queue_time_ms", "time_to_first_token_ms", "mean_itl_ms"}
        assert all(chunk["usage"] is None for chunk in chunks)
        assert all("usage" not in chunk for chunk in chunks_of(server.complete("Hi", stream=True)))

    def test_a_stream_may_report_it_in_every_chunk(self, server: LiveServer) -> None:
        options = {"continuous_usage_stats": True}
        chunks = chunks_of(server.complete("Hi", stream=True, stream_options=options, max_tokens=3))
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]


def test_the_whole_answer_reports_all_phases_and_they_add_up(server: LiveServer) -> None:
    response = server.complete("Hi", max_tokens=5, n=2)
    timings, headers = response.json()["timings"], response.headers
    assert timings["queue_ms"] + timings["prefill_ms"] == timings["ttft_ms"] == 3.0
    assert timings["ttft_ms"] + timings["decode_ms"] == timings["e2e_ms"] == 5.0
    assert timings["generated_tokens"] == 10 and headers["x-generated-tokens"] == "10"
    for phase in ("Queue", "Prefill", "TTFT", "ITL", "ITL-P99", "Decode", "E2E"):
        assert float(headers[f"X-{phase}-Ms"]) == timings[f"{phase.lower().replace('-', '_')}_ms"]
    assert headers["server-timing"].startswith("queue;dur=1.0, prefill;dur=2.0, ttft;dur=3.0")


def test_a_streams_headers_report_what_is_known_at_the_first_token(server: LiveServer) -> None:
    headers = server.complete("Hi", stream=True).headers
    assert (headers["x-queue-ms"], headers["x-prefill-ms"], headers["x-ttft-ms"]) == ("1.0", "2.0", "3.0")
    assert (headers["x-prompt-tokens"], headers["x-cached-tokens"]) == ("3", "0")
    assert headers["server-timing"] == "queue;dur=1.0, prefill;dur=2.0, ttft;dur=3.0"
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert headers["content-type"].startswith("text/event-stream")
    assert "x-e2e-ms" not in headers and "connection" not in headers


def test_what_is_cached_of_several_prompts_is_not_known_at_the_first_token(server: LiveServer) -> None:
    headers = server.complete([[65], [66, 67]], stream=True).headers
    assert headers["x-prompt-tokens"] == "3" and "x-cached-tokens" not in headers
    assert "x-cached-tokens" in server.complete([[65], [66, 67]]).headers
    assert "x-cached-tokens" in server.complete([[65]], n=2, stream=True).headers


def test_a_gap_that_never_was_is_null(server: LiveServer) -> None:
    response = server.complete("Hi", max_tokens=1)
    assert response.json()["timings"]["itl_ms"] is None
    assert "x-itl-ms" not in response.headers


def test_an_engine_that_gives_up_early_is_an_error(server: LiveServer) -> None:
    server.engine.rule = lambda *_: EOS
    server.engine.end_early = FinishReason.ABORT
    assert server.complete("Hi").status_code == 500
