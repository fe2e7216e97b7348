"""The program as users start it: exit codes, one sentence on stderr, no traceback."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine.core.machine import Ceilings
from server.auth.api_keys import new_key
from server.banner import ready_banner, url_of
from server.cli import main
from server.serve import DrainingServer, serve
from server.settings.other_servers import OUR_NAMES
from server.settings.reading import flag_of
from server.settings.settings import Settings
from tests.server.events import chunks_of
from tests.server.fake_engine import INFO
from tests.server.live_server import FakeBackend, wait_until

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTEP_")}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Asserts exit code 2, and that the last line on stderr is one sentence with these words."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("twostep"), result.stderr
    for word in words:
        assert word in last


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0 and re.fullmatch(r"twostep \S+\n", result.stdout)


def help_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["serve"]])
def test_help_teaches_by_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(*arguments, capsys=capsys)
    for words in ("twostep serve Qwen/Qwen2.5-0.5B-Instruct", "TWOSTEP_API_KEY=secret", "curl -N http"):
        assert words in text


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("serve", capsys=capsys)
    for name in Settings.model_fields.keys() - {"model"}:
        assert f"--{name.replace('_', '-')}" in text


def test_numbers_are_called_n(capsys: pytest.CaptureFixture[str]) -> None:
    values = dict(re.findall(r"^  (--[\w-]+) (\S+)", help_of("serve", capsys=capsys), re.MULTILINE))
    assert {values[f"--{name}"] for name in ("port", "num-threads", "max-model-len", "num-gpu-blocks-override")} == {
        "N"
    }


def test_a_log_that_nobody_watches_has_no_progress_bars() -> None:
    script = (
        "from server.core.logs import configure_logging; configure_logging('info')\n"
        "from transformers.utils.logging import is_progress_bar_enabled; print(is_progress_bar_enabled())"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr


def test_without_a_command_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 2 and "usage: twostep" in capsys.readouterr().err


def test_flags_of_other_servers_lead_to_flags_that_there_are() -> None:
    ours = {flag_of(name) for name in Settings.model_fields if name != "model"}
    assert not ours & OUR_NAMES.keys()
    assert set(OUR_NAMES.values()) <= ours | {"twostep serve MODEL"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], ["--prot", "did you mean --port?", "twostep serve --help"]),
        (["serve", "--prot=1"], ["--prot=1", "did you mean --port?"]),
        (["serve", "--frobnicate"], ["--frobnicate; twostep serve --help"]),
        (["serve", "--wrong-flag"], ["--wrong-flag; twostep serve --help"]),
        (["serve", "--threads", "2"], ["did you mean --num-threads?"]),
        (["serve", "--model", "m"], ["did you mean twostep serve MODEL?"]),
        (["serve", "--ctx-size=4096"], ["did you mean --max-model-len?"]),
        (["serve", "m", "-c", "4096"], ["did you mean --max-model-len?"]),
        (["serve", "--port"], ["--port"]),
        (["serve", "a", "b"], ["b"]),
        (["sing"], ["sing"]),
        (["serve", "--port", "x"], ["--port: must be a whole number, got 'x'."]),
        (["serve", "--port", "70000"], ["--port: must be at most 65535, got '70000'."]),
        (["serve", "--max-body-bytes", "much"], ["--max-body-bytes: must be a size such as 2GiB, got 'much'."]),
        (["serve", "--dtype", "float99"], ["--dtype: must be one of 'auto', 'float32', 'bfloat16' or 'float16', got"]),
        (["serve", "models/llama/7b"], ["'models/llama/7b' is neither a directory here nor a hub id"]),
        (["serve", "--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
    ],
)
def test_what_cannot_be_is_one_sentence(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert_refused(subprocess.CompletedProcess(arguments, code, stderr=capsys.readouterr().err), *words)


def test_a_host_that_is_none_is_one_sentence() -> None:
    assert_refused(run("serve", "--host", "no.such.host.invalid", "--port", "0"), "--host", "no.such.host.invalid")


@pytest.mark.slow
def test_a_host_that_is_elsewhere_is_one_sentence() -> None:
    refused = run("serve", "--host", "192.0.2.1", "--port", "0")
    assert_refused(refused, "--host", "192.0.2.1")
    assert "another port" not in refused.stderr


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(run("serve", "--port", str(port)), str(port), "in use")


def test_what_needs_no_library_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    missing = run("serve", str(tmp_path / "missing"), "--port", "0")
    assert_refused(missing, "missing")
    (tmp_path / "config.json").write_text("{}")
    without_weights = run("serve", str(tmp_path), "--port", "0")
    assert_refused(without_weights, f"{tmp_path} has no weights")
    assert missing.stdout == without_weights.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft-quantization", "int4", "--quantization", "int4"], "--draft-quantization int4"),
        (["--quantization", "fp8", "--device", "cpu"], "--quantization fp8 runs on GPUs only"),
        (["--draft-quantization", "int4", "--device", "cuda"], "--draft-quantization int4 runs on the CPU only"),
        (["--gguf-activations", "int8", "--device", "cuda"], "--gguf-activations int8 runs on the CPU only"),
        (["--kv-store", "kept", "--device", "cuda"], "--kv-store kept runs on the CPU only"),
        (["--dtype", "float16", "--device", "cpu"], "--dtype float16 is not supported on the CPU"),
        (["--draft-model", "/nowhere"], "/nowhere is not a checkpoint directory"),
        (["--generation-config", "/nowhere"], "there is no /nowhere/generation_config.json"),
        (["--chat-template", "/nowhere"], "/nowhere is neither a template nor a file to read: No such file or dir"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["serve", *arguments])
    output = capsys.readouterr()
    assert_refused(subprocess.CompletedProcess(arguments, code, stderr=output.err), words)
    assert output.out == ""


def test_a_damaged_generation_config_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    assert_refused(run("serve", str(tmp_path), "--port", "0"), "top_p", "--generation-config none")


@contextmanager
def fake_program(*arguments: str) -> Generator[subprocess.Popen[str], None, None]:
    """Runs the program over an engine without a model."""
    command = [sys.executable, str(Path(__file__).parent / "fake_program.py"), *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def url_in(process: subprocess.Popen[str], words: str) -> str:
    """Waits for the line with these words and returns the URL in it."""
    assert process.stdout is not None
    line = next(line for line in process.stdout if words in line)
    (url,) = re.findall(r"http://127\.0\.0\.1:\d+(?= )", line)
    return str(url)


def assert_ended_well(process: subprocess.Popen[str]) -> str:
    """Asserts exit code 0 and no traceback, and returns the log."""
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (0, False), errors
    assert errors.endswith("INFO twostep.server: stopped\n")
    return errors


class TestSignals:
    def test_while_loading(self) -> None:
        with fake_program("loading") as process:
            assert httpx.get(url_in(process, "loading") + "/health").status_code == 503
            process.send_signal(signal.SIGINT)
            assert_ended_well(process)

    def test_while_idle(self) -> None:
        with fake_program("ready") as process:
            assert httpx.get(url_in(process, "listens") + "/health").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert_ended_well(process)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_streams_may_end(self, number: int) -> None:
        with fake_program("slow") as process:
            url = url_in(process, "listens")
            with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
                process.send_signal(number)
                assert len(chunks_of_text(response)) == 16
            assert "ending: 1 request may go on for" in assert_ended_well(process)

    def test_the_second_ends_at_once(self) -> None:
        with fake_program("stuck") as process:
            url = url_in(process, "listens")
            with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
                process.send_signal(signal.SIGINT)
                wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
                process.send_signal(signal.SIGINT)
                assert chunks_of_text(response)[-1]["error"]["code"] == "server_is_overloaded"
            assert_ended_well(process)


def test_hang_up_reads_the_keys_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(new_key("alice")[1])
    secret, entry = new_key("bob")
    headers = {"Authorization": f"Bearer {secret}"}
    with fake_program("ready", str(path)) as process:
        models = url_in(process, "listens") + "/v1/models"
        assert httpx.get(models, headers=headers).status_code == 401
        path.write_text(entry)
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: httpx.get(models, headers=headers).status_code == 200)
        process.send_signal(signal.SIGTERM)
        assert_ended_well(process)


def chunks_of_text(response: httpx.Response) -> list[dict[str, Any]]:
    response.read()
    return chunks_of(response)


def test_nobody_waits_for_the_document_of_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[Any] = []

    async def note_app(server: DrainingServer, sockets: list[socket.socket]) -> None:
        sockets[0].close()
        apps.append(server.config.app)

    monkeypatch.setattr(DrainingServer, "serve", note_app)
    settings = Settings(port=0)
    with asyncio.Runner() as runner:
        assert serve(settings, FakeBackend().opener(settings), runner) == 0
    wait_until(lambda: apps[0].openapi_schema is not None)


def test_a_bug_while_loading_is_exit_code_one() -> None:
    with fake_program("broken") as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and "ZeroDivisionError" in errors


class TestBanner:
    @pytest.mark.parametrize(
        ("environment", "shown"),
        [
            ({}, "YOUR_KEY"),
            ({"TWOSTEP_API_KEY": "secret"}, "$TWOSTEP_API_KEY"),
            ({"TWOSTEP_API_KEY": "secret,other"}, "YOUR_KEY"),
        ],
    )
    def test_the_curl_line_sends_a_key(
        self, environment: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TWOSTEP_API_KEY", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with_key, without = (ready_banner(Settings(api_key=keys), INFO, "http://x") for keys in (("secret",), ()))
        assert f"Authorization: Bearer {shown}" in with_key and "secret" not in with_key
        assert environment or "Authorization" not in without

    def test_the_curl_line_is_ready_to_paste(self) -> None:
        settings = Settings(model="org/it's", api_key=("secret",))
        banner = ready_banner(settings, INFO, "http://127.0.0.1:1")
        assert "64 KV blocks of 16 tokens = 1,024 tokens" in banner and "secret" not in banner
        assert "(1 MiB of float32, 1,024 bytes a token)" in banner
        assert "reads 30.0 GB/s from memory, multiplies 2,000 GFLOP/s (float32); one stream: at most 14,298" in banner
        assert "drafts  at most 32 tokens, from texts, predictions, grammars\n" in banner
        doubtful = msgspec.structs.replace(INFO, ceilings=Ceilings(30e9, 2e12, is_in_doubt=True))
        assert "GB/s" not in (told := ready_banner(settings, doubtful, "x")) and "not known" in told
        line = next(line for line in banner.splitlines() if "curl" in line)
        script = line.strip().replace("curl", "printf '%s|'", 1)
        words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("|")
        assert words[1] == "http://127.0.0.1:1/v1/completions" and '"model": "org/it\'s"' in words[-2]

    def test_it_tells_the_limits_of_steps_on_the_device(self) -> None:
        banner = ready_banner(Settings(max_num_seqs=9), INFO, "http://x")
        assert "at most 9 requests at once, 2,048 tokens of prompts; prompts of others make gaps of 250 ms\n" in banner
        banner = ready_banner(Settings(), msgspec.structs.replace(INFO, device="cuda"), "http://x")
        assert "at most 256 requests at once, 8,192 tokens of prompts; prompts of others make gaps of 50 ms\n" in banner

    def test_it_tells_of_random_weights(self) -> None:
        banner = ready_banner(Settings(), msgspec.structs.replace(INFO, load_format="dummy"), "http://x")
        assert "MiB of dummy weights: random, answers mean nothing)\n" in banner
        assert "dummy" not in ready_banner(Settings(), INFO, "http://x")

    def test_it_tells_of_draft_weights(self) -> None:
        info = msgspec.structs.replace(INFO, draft_size=msgspec.structs.replace(INFO.size, head_bytes=5 << 20))
        assert "from texts, predictions, grammars, int4 weights (6 MiB)\n" in ready_banner(
            Settings(draft_quantization="int4"), info, "http://x"
        )
        assert "drafts  none\n" in ready_banner(Settings(num_speculative_tokens=0), INFO, "http://x")

    def test_it_tells_of_the_memory_of_a_draft_model(self) -> None:
        size = msgspec.structs.replace(INFO.size, head_bytes=5 << 20)
        info = msgspec.structs.replace(INFO, draft_size=size, draft_kv_bytes=3 << 20)
        banner = ready_banner(Settings(draft_model="org/small"), info, "http://x")
        assert "predictions, grammars, org/small (6 MiB, and 3 MiB of the KV blocks)\n" in banner

    def test_it_tells_of_the_memory_of_an_mtp_head(self) -> None:
        size = msgspec.structs.replace(INFO.size, layer_bytes=7 << 20, expert_bytes=0, head_bytes=5 << 20)
        info = msgspec.structs.replace(INFO, draft_size=size, draft_kv_bytes=3 << 20, has_head=True)
        banner = ready_banner(Settings(), info, "http://x")
        assert "predictions, grammars, the checkpoint's MTP head (7 MiB, and 3 MiB of the KV blocks)\n" in banner

    def test_it_tells_of_recurrent_states(self) -> None:
        info = msgspec.structs.replace(INFO, num_state_slots=48, state_bytes_per_request=3 << 19)
        banner = ready_banner(Settings(), info, "http://x")
        assert "context 512; states of 48 requests, 1.5 MiB each; no prefix cache\n" in banner
        banner = ready_banner(Settings(), msgspec.structs.replace(info, num_state_checkpoints=7), "http://x")
        assert "; 7 copies for the prefix cache\n" in banner
        assert "drafts  at most 32 tokens, from texts, predictions, grammars\n" in banner

    @pytest.mark.parametrize(
        ("host", "url"),
        [
            ("127.0.0.1", "http://127.0.0.1:1"),
            ("0.0.0.0", "http://127.0.0.1:1"),
            ("::", "http://[::1]:1"),
            ("fe80::1", "http://[fe80::1]:1"),
            ("example.org", "http://example.org:1"),
        ],
    )
    def test_the_address_is_one_that_can_be_opened(self, host: str, url: str) -> None:
        assert url_of(host, 1) == url
