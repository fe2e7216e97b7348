"""One definition of all settings: flag over environment over file over default, and errors that name their source."""

from pathlib import Path
from typing import Any

import pytest

from engine.core.adapters import AdapterSource
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from server.settings.settings import Settings
from tests.server.given_settings import read, write

# A value unlike the default for each setting, as text, and what it becomes.
VALUES: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("1234", 1234),
    "api_key": ("secret", ("secret",)),
    "api_keys_file": ("keys.yaml", Path("keys.yaml")),
    "share_prefix_cache": ("true", True),
    "fair_by": ("address", "address"),
    "key_metrics": ("true", True),
    "allowed_origins": ("https://a.example", ("https://a.example",)),
    "max_waiting": ("3", 3),
    "max_waiting_tokens": ("1234", 1234),
    "max_queue_time": ("2.5", 2.5),
    "max_body_bytes": ("1KiB", 1024),
    "stall_timeout": ("1.5", 1.5),
    "shutdown_timeout": ("0", 0.0),
    "uds": ("/run/x.sock", Path("/run/x.sock")),
    "root_path": ("/llm", "/llm"),
    "ssl_certfile": ("cert.pem", Path("cert.pem")),
    "ssl_keyfile": ("key.pem", Path("key.pem")),
    "log_level": ("error", "error"),
    "log_format": ("json", "json"),
    "metrics_alias": ("none", "none"),
    "model": ("./m", "./m"),
    "served_model_name": ("mine", ("mine",)),
    "lora": ("sql=/adapters/sql", ("sql=/adapters/sql",)),
    "max_loras": ("7", 7),
    "max_lora_rank": ("32", 32),
    "allow_runtime_lora_updating": ("true", True),
    "revision": ("main", "main"),
    "trust_remote_code": ("true", True),
    "load_format": ("dummy", "dummy"),
    "generation_config": ("none", "none"),
    "chat_template": ("t.jinja", "t.jinja"),
    "trust_request_chat_template": ("true", True),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("think", "think"),
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int4", "int4"),
    "gguf_activations": ("int8", "int8"),
    "max_model_len": ("99", 99),
    "device": ("cpu", "cpu"),
    "num_threads": ("2", 2),
    "tensor_parallel_size": ("2", 2),
    "require_kernels": ("true", True),
    "enforce_eager": ("true", True),
    "max_num_seqs": ("5", 5),
    "max_num_batched_tokens": ("77", 77),
    "target_itl_ms": ("62.5", 62.5),
    "max_prefill_tokens_per_gap": ("33", 33),
    "block_size": ("8", 8),
    "kv_cache_dtype": ("int8", "int8"),
    "kv_cache_memory_bytes": ("2GiB", 2**31),
    "state_cache_memory_bytes": ("1GiB", 2**30),
    "state_checkpoint_interval": ("96", 96),
    "num_gpu_blocks_override": ("44", 44),
    "enable_prefix_caching": ("false", False),
    "free_window_blocks": ("false", False),
    "prefix_retention_share": ("0.25", 0.25),
    "kv_store": ("/tmp/kv", "/tmp/kv"),
    "kv_store_bytes": ("1GiB", 2**30),
    "packed_cache": ("/tmp/packed", "/tmp/packed"),
    "packed_cache_bytes": ("1GiB", 2**30),
    "num_speculative_tokens": ("3", 3),
    "draft_model": ("x/small", "x/small"),
    "draft_quantization": ("int4", "int4"),
    "mtp": ("false", False),
    "answer_memory_bytes": ("1GiB", 2**30),
    "max_header_bytes": ("4KiB", 4096),
    "max_connections": ("3", 3),
    "header_timeout": ("2.5", 2.5),
    "body_timeout": ("3.5", 3.5),
    "engine_timeout": ("30", 30.0),
    "spare_engine": ("false", False),
    "max_engine_restarts": ("0", 0),
    "trace": ("t.jsonl", "t.jsonl"),
    "otel": ("true", True),
    "role": ("prefill", "prefill"),
    "prefill_url": ("http://a:1", ("http://a:1",)),
    "prefill_api_key": ("secret", "secret"),
    "prefill_min_tokens": ("99", 99),
    "prefill_timeout": ("7.5", 7.5),
}
# What a setting needs beside it.
NEEDS = {"role": ["--kv-store", "/kv"], "prefill_url": ["--kv-store", "/kv", "--role", "decode"]}
# The setting's name in EngineConfig, where that differs.
ENGINE_NAMES = {
    "max_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "num_gpu_blocks_override": "num_blocks",
    "state_cache_memory_bytes": "state_cache_bytes",
}
SERVER_ONLY = {
    *(
        "fair_by",
        "key_metrics",
        "host",
        "port",
        "api_key",
        "api_keys_file",
        "share_prefix_cache",
        "allowed_origins",
        "max_waiting",
        "max_waiting_tokens",
        "max_queue_time",
        "max_body_bytes",
        "answer_memory_bytes",
        "stall_timeout",
    ),
    *("max_header_bytes", "max_connections", "header_timeout", "body_timeout"),
    *("uds", "root_path", "ssl_certfile", "ssl_keyfile"),
    *("engine_timeout", "spare_engine", "max_engine_restarts"),
    *("shutdown_timeout", "log_level", "log_format", "otel", "metrics_alias", "served_model_name", "generation_config"),
    *("lora", "allow_runtime_lora_updating"),
    *("role", "prefill_url", "prefill_api_key", "prefill_min_tokens", "prefill_timeout"),
    *("chat_template", "trust_request_chat_template", "tool_call_parser", "reasoning_parser"),
}


def flags_of(name: str, text: str) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if name == "model":
        return [text]
    if text in ("true", "false"):
        return [flag if text == "true" else flag.replace("--", "--no-", 1)]
    return [flag, text]


def test_every_setting_is_tested_here() -> None:
    assert set(Settings.model_fields) == VALUES.keys() | {"config"}


@pytest.mark.parametrize("name", VALUES)
class TestEachSetting:
    def test_has_a_flag(self, name: str) -> None:
        text, value = VALUES[name]
        given = read(*flags_of(name, text), *NEEDS.get(name, []))
        assert getattr(given, name) == value != getattr(read(), name)

    def test_has_an_environment_variable(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        text, value = VALUES[name]
        monkeypatch.setenv(f"TWOSTEP_{name.upper()}", text)
        assert getattr(read(*NEEDS.get(name, [])), name) == value

    @pytest.mark.parametrize("separator", ["-", "_"])
    def test_has_a_key_in_the_file(self, name: str, separator: str, tmp_path: Path) -> None:
        text, value = VALUES[name]
        path = write(tmp_path, f"{name.replace('_', separator)}: {text}\n")
        assert getattr(read("--config", path, *NEEDS.get(name, [])), name) == value

    def test_reaches_the_engine_if_it_concerns_it(self, name: str) -> None:
        text, value = VALUES[name]
        if name not in SERVER_ONLY:
            assert getattr(read(*flags_of(name, text)).engine_config(), ENGINE_NAMES.get(name, name)) == value


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--role", "prefill"], "--role prefill needs --kv-store"),
        (["--role", "decode", "--prefill-url", "http://a:1"], "--role decode needs --kv-store"),
        (["--role", "decode", "--kv-store", "/kv"], "belong together"),
        (["--role", "prefill", "--kv-store", "/kv", "--prefill-url", "http://a:1"], "belong together"),
        (["--prefill-url", "http://a:1"], "belong together"),
        (["--role", "both", "--prefill-url", "a:1"], "no address of a server"),
        (["--prefill-url", "http://a:1/v1"], "no address of a server"),
        (["--prefill-url", "http://a:x"], "no address of a server"),
        (["--role", "half"], "must be one of"),
    ],
)
def test_roles_that_cannot_work_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(*flags)


def test_the_key_of_a_prefill_server_is_not_told() -> None:
    with pytest.raises(ConfigError) as told:
        read("--prefill-api-key", "")
    assert "--prefill-api-key" in str(told.value)


def test_flag_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "port: 1\nhost: file\nmax-waiting: 1\nmodel: file\n")
    monkeypatch.setenv("TWOSTEP_CONFIG", path)
    monkeypatch.setenv("TWOSTEP_PORT", "2")
    monkeypatch.setenv("TWOSTEP_HOST", "environment")
    settings = read("--port", "3")
    found = (settings.port, settings.host, settings.max_waiting, settings.model, settings.block_size)
    assert found == (3, "environment", 1, "file", 16)


def test_defaults_are_the_engines_own() -> None:
    settings = read("m", "--packed-cache", "off")
    assert settings.engine_config() == EngineConfig(model="m")


def test_packed_models_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/cache")
    assert read("m").engine_config().packed_cache == "/home/me/cache/twostep/packed"


def test_a_home_directory_is_one_wherever_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("TWOSTEP_TRACE", "~/trace")
    settings = read("--config", write(tmp_path, "model: ~/model\n"))
    config = settings.engine_config()
    assert (config.model, config.trace, settings.model_names) == ("/home/me/model", "/home/me/trace", ("~/model",))


def test_empty_variables_are_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_MODEL", "")
    assert read().is_embedded_model


def test_lists_are_repeated_flags_comma_separated_variables_or_yaml_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read("--api-key", "a,b", "--api-key", "c").api_key == ("a,b", "c")
    assert read("--config", write(tmp_path, "api-key: [a, b]\n")).api_key == ("a", "b")
    monkeypatch.setenv("TWOSTEP_API_KEY", "a,b")
    assert read().api_key == ("a", "b")


def test_a_key_of_the_file_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="block-size in the --config file has no value: leave it out"):
        read("--config", write(tmp_path, "block-size:\n"))


def test_the_model_is_called_as_it_was_given_unless_named() -> None:
    assert read("org/model").model_names == ("org/model",)
    assert read("org/model", "--served-model-name", "a", "--served-model-name", "b").model_names == ("a", "b")


def test_adapters_are_names_and_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    adapters = read("m", "--lora", "a=~/a", "--lora", "org/b=/b=c").engine_config().adapters
    assert adapters == (AdapterSource("a", "/home/me/a"), AdapterSource("org/b", "/b=c"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"], "write NAME=DIR"),
        (["a="], "write NAME=DIR"),
        (["=/a"], "write NAME=DIR"),
        (["a=/a", "b=/b", "a=/c"], "the name a is given twice"),
        (["m=/a"], "the name m is given twice, or is the model's own"),
    ],
)
def test_adapters_whose_names_are_not_their_own_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("m", *(argument for each in given for argument in ("--lora", each))).engine_config()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "x"], ["--port", "'x'"]),
        (["--port", "65536"], ["--port", "65535", "'65536'"]),
        (["--dtype", "int8"], ["--dtype", "'float32'"]),
        (["--block-size", "0"], ["--block-size", "greater than 0"]),
        (["--max-queue-time", "inf"], ["--max-queue-time", "1000000"]),
        (["--stall-timeout", "1e12"], ["--stall-timeout", "1000000"]),
        (["--kv-cache-memory-bytes", "lots"], ["--kv-cache-memory-bytes"]),
        (["--host", ""], ["--host", "empty"]),
        (["--served-model-name", "a", "--served-model-name", ""], ["--served-model-name: a name must not be empty"]),
        ([""], ["MODEL", "empty"]),
        (["--config", "/nowhere/x.yaml"], ["--config", "/nowhere/x.yaml", "No such file"]),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], words: list[str]) -> None:
    assert_refused_with(words, lambda: read(*arguments))


def test_an_item_of_a_list_is_told_once() -> None:
    message = "^--allowed-origins: here is no origin: write https://example.org, with no path and no / at its end.$"
    with pytest.raises(ConfigError, match=message):
        read("--allowed-origins", "http://a", "--allowed-origins", "here")


def test_two_sizes_of_the_kv_cache_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--kv-cache-memory-bytes", "--num-gpu-blocks-override", "leave one out"]
    assert_refused_with(words, lambda: read("--kv-cache-memory-bytes", "1GiB", "--num-gpu-blocks-override", "9"))
    path = write(tmp_path, "num-gpu-blocks-override: 9\n")
    monkeypatch.setenv("TWOSTEP_KV_CACHE_MEMORY_BYTES", "1GiB")
    assert_refused_with(words, lambda: read("--config", path))


def test_wrong_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_PORT", "x")
    assert_refused_with(["TWOSTEP_PORT", "'x'"], read)


def test_a_variable_that_is_nearly_a_setting_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    services = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_80_TCP_PROTO")
    ours = ("CACHE_DIR", "KERNELS", "KERNEL_PATH", "ISA", "FUZZ", "MODEL_PATH")
    for anybodys in (*(f"TWOSTEP_{name}" for name in (*services, *ours)), "MAX_NUM_SEKS"):
        monkeypatch.setenv(anybodys, "x")
    read()
    for mistake, meant in {
        "MAX_NUM_SEKS": "MAX_NUM_SEQS",
        "PROT": "PORT",
        "HSOT": "HOST",
        "THREADS": "NUM_THREADS",
    }.items():
        with monkeypatch.context() as patch:
            patch.setenv(f"TWOSTEP_{mistake}", "5")
            assert_refused_with([f"TWOSTEP_{mistake}", f"did you mean TWOSTEP_{meant}?"], read)


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8000", "udp://10.0.0.1:8000"])
def test_the_address_of_a_service_of_this_name_is_no_port(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTEP_PORT", address)
    assert read().port == 8000
    assert read("--config", write(tmp_path, "port: 1\n")).port == 1


@pytest.mark.parametrize("origin", ["https://a.example/", "https://a.example/x", "a.example", "https://"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused_with(["--allowed-origins", origin, "no origin"], lambda: read("--allowed-origins", origin))
    monkeypatch.setenv("TWOSTEP_ALLOWED_ORIGINS", "*, null, http://localhost:3000,https://a.example")
    assert len(read().allowed_origins) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("port: x\n", ["port in the --config file", "'x'"]),
        ("max-num-seq: 3\n", ["unknown key max-num-seq", "did you mean max-num-seqs?"]),
        ("3: 4\n", ["unknown key 3"]),
        ("port: 1\nhost: a\nport: 2\n", ["'port' twice"]),
        ("config: other.yaml\n", ["unknown key config"]),
        ("- a\n", ["port: 8000"]),
        ("a: [\n", ["not YAML"]),
        ("\x00", ["not YAML"]),
        ("revision: 2024-02-30\n", ["not YAML", "day"]),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, content: str, words: list[str]) -> None:
    path = write(tmp_path, content)
    assert_refused_with(words, lambda: read("--config", path))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read("--config", write(tmp_path, "# nothing\n")).port == 8000


def assert_refused_with(words: list[str], act: Any) -> None:
    """Asserts that `act` raises a ConfigError of one line that contains the words."""
    with pytest.raises(ConfigError) as error:
        act()
    message = str(error.value)
    assert "\n" not in message and message.endswith((".", "?"))
    for word in words:
        assert word in message
