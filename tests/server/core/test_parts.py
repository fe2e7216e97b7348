"""Small parts without a server: generation defaults, logprobs, timings, and work that ends when the client leaves."""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.batch import TokenLogprobs
from engine.core.errors import ModelError
from engine.core.stats import RequestTimings
from server.completions.logprobs import LogprobsFormatter
from server.core.timings import PhaseReport, TokenCounts
from server.generation.logprobs import prompt_logprobs
from server.limits.disconnect import ClientLeftError, unless_client_leaves
from server.runtime.generation_defaults import GenerationDefaults, load_generation_defaults
from tests.server.byte_tokenizer import ByteTokenizer
from tests.server.live_server import FakeBackend, live_server


class TestGenerationDefaults:
    def load(self, tmp_path: Path, content: str | None, source: str = "auto") -> GenerationDefaults:
        if content is not None:
            (tmp_path / "generation_config.json").write_text(content)
        return load_generation_defaults(source, str(tmp_path), None)

    def test_the_models_own_are_used(self, tmp_path: Path) -> None:
        content = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1, "other": 1}
        expected = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1)
        assert self.load(tmp_path, json.dumps(content)) == expected

    @pytest.mark.parametrize("content", [None, "{}", '{"temperature": null}'])
    def test_without_any_they_are_neutral(self, tmp_path: Path, content: str | None) -> None:
        assert self.load(tmp_path, content) == GenerationDefaults()

    def test_a_model_that_does_not_sample_is_greedy(self, tmp_path: Path) -> None:
        content = '{"do_sample": false, "temperature": 0.7, "top_p": 0.5}'
        assert self.load(tmp_path, content) == GenerationDefaults(temperature=0.0, top_p=0.5)
        assert self.load(tmp_path, '{"do_sample": true}') == GenerationDefaults()

    def test_none_turns_them_off(self, tmp_path: Path) -> None:
        assert self.load(tmp_path, '{"temperature": 0.7}', "none") == GenerationDefaults()

    def test_another_directory_may_bring_them(self, tmp_path: Path) -> None:
        (tmp_path / "generation_config.json").write_text('{"top_k": -1, "top_p": 0.5}')
        assert load_generation_defaults(str(tmp_path), "org/model", None) == GenerationDefaults(top_p=0.5)

    @pytest.mark.parametrize(
        ("fields", "rule"),
        [
            ({"temperature": "0.7"}, "temperature must be a number, not '0.7'"),
            ({"top_p": True}, "top_p must be a number, not 'True'"),
            ({"top_k": "x"}, "top_k must be a whole number, not 'x'"),
            ({"top_k": 5.5}, "top_k must be a whole number, not '5.5'"),
            ({"min_p": [0.1]}, r"min_p must be a number, not '\[0.1\]'"),
            ({"do_sample": "false"}, "do_sample must be true or false, not 'false'"),
            ({"do_sample": 0}, "do_sample must be true or false, not '0'"),
        ],
    )
    def test_a_value_of_another_kind_is_refused_by_name(
        self, tmp_path: Path, fields: dict[str, Any], rule: str
    ) -> None:
        with pytest.raises(ModelError, match=rf"generation_config\.json: {rule}; .*--generation-config none"):
            self.load(tmp_path, json.dumps(fields))

    def test_whole_numbers_are_whole_numbers(self, tmp_path: Path) -> None:
        assert self.load(tmp_path, '{"top_k": 20.0, "temperature": 1}') == GenerationDefaults(top_k=20)
        assert isinstance(self.load(tmp_path, '{"top_k": 20.0}').top_k, int)

    @pytest.mark.parametrize("value", ["2147483648", "1e300", str(2**63)])
    def test_numbers_that_no_request_may_have_are_refused(self, tmp_path: Path, value: str) -> None:
        with pytest.raises(ModelError, match=r"top_k must be at most 2147483647.*--generation-config none"):
            self.load(tmp_path, '{"top_k": ' + value + "}")

    @pytest.mark.parametrize("content", ["{", "[]", '{"top_p": 7}', "\xff"])
    def test_a_damaged_file_is_refused(self, tmp_path: Path, content: str) -> None:
        with pytest.raises(ModelError, match="--generation-config none"):
            self.load(tmp_path, content)

    def test_a_directory_without_the_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="--generation-config"):
            self.load(tmp_path, None, str(tmp_path / "missing"))

    def test_a_hub_that_does_not_answer_is_not_one_that_has_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelError, match="cannot be fetched"):
            load_generation_defaults("auto", "org/model", "1" * 40)

    def test_requests_override_them_one_by_one(self) -> None:
        backend = FakeBackend(defaults=GenerationDefaults(temperature=0.5, top_k=7, top_p=0.9))
        with live_server(backend) as server:
            server.complete("Hi", top_p=1.0, temperature=None)
            params = server.engine.requests[0].params
            assert (params.temperature, params.top_k, params.top_p) == (0.5, 7, 1.0)


class TestLogprobs:
    def formatter(self, num_top: int = 1) -> LogprobsFormatter:
        return LogprobsFormatter(ByteTokenizer(), num_top, names_as_ids=False, skip_special_tokens=True)

    @pytest.mark.parametrize("value", [-math.inf, math.nan])
    def test_what_json_cannot_say_is_very_unlikely(self, value: float) -> None:
        score = TokenLogprobs(65, value, 1, (65,), (value,))
        assert [*self.formatter().generated([score])["token_logprobs"]] == [-9999.0]
        scored = list(prompt_logprobs([score], 1, ByteTokenizer()))
        assert scored == [{"65": {"logprob": -9999.0, "rank": 1, "decoded_token": "A"}}]

    def test_no_more_are_returned_than_requested(self) -> None:
        """The engine returns more where `prompt_logprobs` asks for more than `logprobs`."""
        score = TokenLogprobs(65, -1.0, 1, (65, 66, 67), (-1.0, -2.0, -3.0))
        assert [*self.formatter(2).generated([score])["top_logprobs"]] == [{"A": -1.0, "B": -2.0}]

    def test_an_echo_that_lost_its_leading_space_moves_all_offsets(self) -> None:
        pieces = self.formatter().prompt([32, 65, 32, 66], [None] * 4, "A B")
        assert [*pieces["text_offset"]] == [0, 0, 1, 2]

    def test_lists_are_made_as_they_are_written(self) -> None:
        for pieces in (self.formatter().prompt([65], [None], "A"), self.formatter().generated([])):
            assert all(isinstance(each, Iterator) for each in pieces.values())


class TestTimings:
    def test_of_several_sequences_the_first_token_and_the_last_count(self) -> None:
        early = RequestTimings(queue_s=0.001, prefill_s=0.002, inter_token_s=(0.010,), prefill_chunks=1)
        late = RequestTimings(queue_s=0.004, prefill_s=0.005, inter_token_s=(0.020, 0.030), prefill_chunks=2)
        body = PhaseReport.of([late, early], TokenCounts(7, 3, 5)).body()
        assert (body["queue_ms"], body["prefill_ms"], body["ttft_ms"]) == (1.0, 2.0, 3.0)
        assert (body["decode_ms"], body["e2e_ms"]) == (56.0, 59.0)
        assert (body["itl_ms"], body["itl_p50_ms"], body["itl_p99_ms"]) == (20.0, 20.0, 30.0)
        assert (body["prompt_tokens"], body["cached_tokens"], body["generated_tokens"]) == (7, 3, 5)
        assert body["prefill_chunks"] == 3


class TestRaceAgainstLeaving:
    def test_the_work_wins(self) -> None:
        async def work() -> int:
            return 3

        assert asyncio.run(race(work(), leaves=False)) == 3

    def test_the_works_error_is_the_races(self) -> None:
        async def work() -> int:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            asyncio.run(race(work(), leaves=False))

    def test_the_client_wins_and_the_work_has_ended_by_then(self) -> None:
        ended = []

        async def work() -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0)
                ended.append(True)

        with pytest.raises(ClientLeftError):
            asyncio.run(race(work(), leaves=True))
        assert ended == [True]

    def test_neither_outlives_a_race_that_is_cancelled(self) -> None:
        async def cancelled() -> set[Any]:
            racing = asyncio.ensure_future(race(asyncio.sleep(1000), leaves=False))
            await asyncio.sleep(0.01)
            racing.cancel()
            await asyncio.wait([racing])
            return asyncio.all_tasks() - {asyncio.current_task()}

        assert asyncio.run(cancelled()) == set()


async def race(work: Any, leaves: bool) -> Any:
    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01 if leaves else 1000)
        return {"type": "http.disconnect"}

    return await unless_client_leaves(receive, work)
