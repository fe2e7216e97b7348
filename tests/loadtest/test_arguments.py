import subprocess
import sys

import pytest

from loadtest.arguments import parse_config
from loadtest.config import Config
from loadtest.errors import UsageError
from loadtest.flags import _OUR_NAMES, flag_parser
from loadtest.stats import Targets
from loadtest.workload import WorkloadKind

URL = "http://127.0.0.1:1"


def config(*flags: str) -> Config:
    return parse_config([URL, *flags])


@pytest.mark.parametrize(
    ("name", "concurrency", "prompt_len", "output_len", "num_requests"),
    [("S1", 1, 128, 128, 8), ("S2", 8, 256, 128, 32), ("S3", 32, 256, 128, 96), ("S4", 4, 2048, 64, 8)],
)
def test_a_scenario_is_exactly_its_definition(
    name: str, concurrency: int, prompt_len: int, output_len: int, num_requests: int
) -> None:
    named = config("--scenario", name)
    assert (named.schedule.concurrency, named.schedule.num_requests) == (concurrency, num_requests)
    assert (named.shape.prompt_len, named.shape.output_len) == (prompt_len, output_len)
    assert (named.shape.kind, named.schedule.rate_per_s) == (WorkloadKind.RANDOM, None)


def test_s5_is_eight_streams_and_a_long_prompt_every_two_seconds() -> None:
    shape, schedule = config("--scenario", "S5").shape, config("--scenario", "S5").schedule
    assert shape.kind is WorkloadKind.LONG_AMONG_DECODERS
    assert (shape.prompt_len, shape.output_len, schedule.concurrency, schedule.num_requests) == (32, 256, 8, 8)
    assert (shape.long_prompt_len, shape.long_output_len, schedule.long_every_s) == (2048, 16, 2.0)


def test_a_flag_wins_over_the_scenario() -> None:
    named = config("--scenario", "S2", "--concurrency", "3", "--max-tokens", "9")
    assert (named.schedule.concurrency, named.shape.output_len, named.shape.prompt_len) == (3, 9, 256)


def test_a_duration_takes_the_place_of_the_number_of_requests() -> None:
    for flags in ((), ("--scenario", "S5"), ("--workload", "long-among-decoders")):
        assert config(*flags, "--duration", "5").schedule.num_requests is None
    assert config("--duration", "5", "--requests", "7").schedule.num_requests == 7


def test_a_rate_makes_an_open_loop_bounded_only_when_asked() -> None:
    assert config("--rate", "2").schedule.concurrency is None
    assert config("--rate", "2", "--scenario", "S2").schedule.concurrency is None
    assert config("--rate", "2", "--concurrency", "5").schedule.concurrency == 5


def test_steady_decoders_have_one_request_per_stream_by_default() -> None:
    schedule = config("--workload", "long-among-decoders", "--concurrency", "3").schedule
    assert (schedule.concurrency, schedule.num_requests) == (3, 3)
    assert config("--workload", "long-among-decoders").shape.prompt_len == 32


def test_without_a_seed_every_run_draws_another() -> None:
    assert config().seed != config().seed
    assert config("--seed", "0").seed == 0


def test_several_urls_are_measured_in_turns_by_default() -> None:
    assert parse_config([URL]).rounds == 1
    assert parse_config([URL, URL]).rounds == 2
    assert parse_config([URL, URL, "--rounds", "5"]).rounds == 5


def test_words_may_stand_beside_a_vocabulary_that_other_servers_of_a_plan_need() -> None:
    assert config("--vocab-size", "9", "--text").shape.is_text


def test_a_comparison_has_rounds_enough_for_an_interval() -> None:
    compared = config("--compare", "http://b")
    assert (compared.urls, compared.rounds) == ((URL, "http://b"), 5)
    assert config("--compare", "http://b", "--compare", "http://c", "--rounds", "3").rounds == 3
    assert parse_config(["--compare", "http://b"]).urls == ("http://127.0.0.1:8000", "http://b")


def test_goodput_takes_limits_as_vllm_writes_them() -> None:
    assert config("--goodput", "ttft:500", "tpot:50", "e2el:9000").targets == Targets(500, None, 50, 9000)
    assert config("--goodput", "itl:5.5").targets == Targets(itl_ms=5.5)


def test_the_api_key_comes_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWOSTEP_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    assert config().wire.api_key == "other"
    monkeypatch.setenv("TWOSTEP_API_KEY", "ours")
    assert config().wire.api_key == "ours"
    assert config("--api-key", "given").wire.request_headers() == {"authorization": "Bearer given"}


@pytest.mark.parametrize(
    "flags",
    [
        ("--workload", "shared-prefix"),
        ("--workload", "shared-prefix", "--prefix-len", "128"),
        ("--prefix-len", "5"),
        ("--scenario", "S5", "--rate", "1"),
        ("--api-key", "ключ"),
        ("--endpoint", "responses", "--no-include-usage"),
        ("--endpoint", "responses", "--no-done"),
        ("--endpoint", "chat", "--vocab-size", "9"),
        ("--goodput", "e2e:5", "e2el:6"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        config(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("--concurrency", "0"),
        ("--requests", "x"),
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--duration", "inf"),
        ("--warmup", "-1"),
        ("--warmup", "1_0"),
        ("--warmup", "9" * 5000),
        ("--header", "nonsense"),
        ("--header", "a: b\r\nc: d"),
        ("--header", "a(b: c"),
        ("--header", "Content-Length: 3"),
        ("--extra-body", "[1]"),
        ("--extra-body", "{"),
        ("--extra-body", '{"top_p": NaN}'),
        ("--extra-body", '{"top_p": 1e999}'),
        ("--scenario", "S9"),
        ("--goodput",),
        ("--goodput", "ttft"),
        ("--goodput", "ttft:0"),
        ("--goodput", "speed:3"),
        ("--goodput", "ttft:500", "http://127.0.0.1:8000"),
        ("--endpoint", "embeddings"),
        ("--unknown",),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        config(*flags)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "_whole" not in message


def test_a_mistyped_flag_is_reported_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--concurrncy", "8"), ("--concurrncy=8",)):
        with pytest.raises(SystemExit):
            config(*flags)
        assert "did you mean --concurrency?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "meant"), [("--base-url", "http://HOST:PORT without a flag"), ("--num-prompts=9", "--requests")]
)
def test_a_flag_of_another_load_test_is_reported_with_ours(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        config(flag, "x")
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_flags_of_other_load_tests_lead_to_flags_that_there_are() -> None:
    ours = {*flag_parser()._option_string_actions, "http://HOST:PORT without a flag"}
    assert not ours & _OUR_NAMES.keys()
    assert {*_OUR_NAMES.values()} <= ours


def test_the_load_generator_imports_neither_the_server_nor_the_engine() -> None:
    foreign = "{'server', 'engine', 'torch', 'transformers', 'fastapi', 'pydantic'}"
    code = f"import sys, loadtest.cli; found = {foreign} & set(sys.modules); print(*found); sys.exit(len(found))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
