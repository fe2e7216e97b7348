"""The commands as users run them: answers on stdout, everything else on stderr, errors in one sentence."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.kv_groups import ONE_GROUP, KVGroups
from engine.core.machine import AttentionSize, Ceilings, ModelSize
from server.cli import parse_command
from server.settings.settings import Settings
from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.soak.server import ROOT
from twostep.cli import main
from twostep.commands import endpoint, run
from twostep.commands.burst import BurstTimes
from twostep.commands.client import Answer
from twostep.commands.completion import flags_of_commands
from twostep.commands.doctor import Finding, findings_of
from twostep.commands.host_facts import HostFacts
from twostep.commands.listing import COMMANDS
from twostep.commands.models import size_of
from twostep.commands.plan import Plan, bytes_of_weights, lines_of, quantized

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(api_key=("secret",)) as server:
        yield server


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_API_KEY", "secret")


def ended(*arguments: str) -> int:
    """Returns the exit code of a command line."""
    try:
        return main(arguments)
    except SystemExit as exit_:
        return int(str(exit_.code))


def refusal(capsys: Capture, *arguments: str) -> str:
    """Returns the one sentence with which a command line is refused."""
    assert ended(*arguments) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    return output.err


def test_help_lists_every_command_and_each_has_examples(capsys: Capture) -> None:
    assert ended("--help") == 0
    text = capsys.readouterr().out
    for name, summary in COMMANDS.items():
        assert f"  {name} " in text and summary in text
    for name in COMMANDS:
        assert ended(name, "--help") == 0
        text = capsys.readouterr().out
        assert f"usage: twostep {name}" in text and f"  twostep {name}" in text


def test_help_imports_nothing_that_takes_time() -> None:
    script = "import sys; from twostep.cli import main; main(['--help']); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chta"], "chta is no command; did you mean chat?"),
        (["sing"], "there are serve, chat, run"),
        (["pull", "a/b", "--revison", "x"], "did you mean --revision?"),
        (["run", "http://127.0.0.1:1", "Hi"], "Connection refused. Is the server running?"),
        (["bench", "http://127.0.0.1:1"], "twostep bench: cannot connect"),
        (["run", "http://127.0.0.1:1", "Hi", "--dtype", "x"], "--dtype is a flag of twostep serve"),
        (["run", "m", "Hi", "--raw", "--system", "x"], "--system is for chats"),
        (["plan", "embedded", "--output-tokens", "0"], "--output-tokens must be at least 1"),
        (["plan", "embedded", "--prompt-tokens", "2048"], "less than the model's context of 2,048 tokens"),
        (
            ["plan", "embedded", "--measure", "--prompt-tokens", "2000", "--output-tokens", "49"],
            "--prompt-tokens and --output-tokens exceed the model's context of 2,048 tokens",
        ),
        (["run", "Name three birds."], "name the model before the prompt"),
        (["run", "m", "Hi", "--temperature", "hot"], "--temperature: invalid float value: 'hot'"),
        (["run", "m", "Hi", "there"], "twostep run: unrecognized argument there (what has spaces is to be quoted)"),
        (
            ["chat", "m", "--max-token", "5"],
            "twostep chat: unrecognized argument --max-token (did you mean --max-t",
        ),
        (["chat", "m", "--dtyp", "x"], "twostep chat: unrecognized argument --dtyp (did you mean --dtype?)"),
        (["completion", "cmd"], "invalid choice: 'cmd'"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], words: str, capsys: Capture) -> None:
    assert words in refusal(capsys, *arguments)


def test_a_plan_without_the_hub_is_refused_at_once_and_in_one_sentence() -> None:
    script = "import socket, sys; socket.getaddrinfo = lambda *_: (_ for _ in ()).throw(socket.gaierror(-2, 'unknown'))"
    script += "; from twostep.cli import main; sys.exit(main(['plan', 'org/model']) + ('torch' in sys.modules))"
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and "HF_" not in name}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=kept, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    told, refused = done.stderr.splitlines()
    assert told.startswith("huggingface.co cannot be found") and "org/model is not a directory, and the hub" in refused


def test_run_prints_the_answer_alone(server: LiveServer, capsys: Capture) -> None:
    expected = server.chat(headers={"Authorization": "Bearer secret"}, max_tokens=5, temperature=0, seed=3).json()
    flags = ["--max-tokens", "5", "--temperature", "0", "--seed", "3"]
    assert main(["run", server.url, "Hi", *flags, "--timings"]) == 0
    output = capsys.readouterr()
    assert output.out == expected["choices"][0]["message"]["content"] + "\n"
    assert "first token " in output.err and "; 5 tokens" in output.err and "(queue 0.00, prefill 0.00)" in output.err


@pytest.mark.parametrize("place", [0, 1, 2])
def test_flags_may_stand_anywhere(place: int) -> None:
    arguments = ["m", "Hi"]
    arguments[place:place] = ["--temperature", "0", "--quantization", "int4", "--no-mtp", "--api-key=--key"]
    parsed = run.parser().parse(arguments)
    assert (parsed.model, parsed.prompt, parsed.temperature) == ("m", "Hi", 0.0)
    assert parsed.serve_flags == ["--quantization=int4", "--no-mtp", "--api-key=--key"]
    assert parse_command(["serve", "m", *parsed.serve_flags]) == (
        "serve",
        {"model": "m", "quantization": "int4", "mtp": False, "api_key": ["--key"]},
    )


def test_run_goes_on_with_a_raw_text_from_standard_input(
    server: LiveServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = server.complete("Hi", {"Authorization": "Bearer secret"}, max_tokens=4, seed=1).json()
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert main(["run", f"{server.url}/v1/", "--raw", "--max-tokens", "4", "--seed", "1"]) == 0
    assert capsys.readouterr().out == expected["choices"][0]["text"] + "\n"


def test_what_the_server_refuses_is_told_in_its_words(
    server: LiveServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "temperature" in refusal(capsys, "run", server.url, "Hi", "--temperature", "9")
    monkeypatch.setenv("TWOSTEP_API_KEY", "wrong")
    assert "key" in refusal(capsys, "run", server.url, "Hi")


def test_a_model_without_a_template_is_asked_with_raw(capsys: Capture) -> None:
    with live_server(FakeBackend(chat_templates={})) as server:
        assert ended("run", server.url, "Hi") == 2
        assert "--raw" in capsys.readouterr().err


def talk(server: LiveServer, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", server.url, "--max-tokens", "3", "--seed", "1"]) == 0


def test_a_conversation_grows_and_is_saved(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "talk.json"
    talk(server, monkeypatch, "/system Be brief.", "One\\", "and two", "Three", f"/save {file}", "/exit", "not read")
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", *(["user", "assistant"] * 2)]
    assert [message["content"] for message in messages[1::2]] == ["One\nand two", "Three"]
    assert capsys.readouterr().out == "".join(f"{message['content']}\n" for message in messages[2::2])


def test_commands_change_what_is_asked(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "talk.json"
    talk(server, monkeypatch, "One", "/set max_tokens 1", "/retry", "Two", "/undo", f"/save {file}", "/set")
    (_, answer) = json.loads(file.read_text())["messages"]
    assert len(answer["content"]) == 1  # a byte is a token here
    assert "max_tokens 1\n" in capsys.readouterr().out
    talk(server, monkeypatch, "One", "/clear", f"/save {file}")
    assert json.loads(file.read_text())["messages"] == []


def test_mistakes_in_a_conversation_do_not_end_it(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    mistakes = ["/foo", "/retry", "/set heat 3", "/set seed x", "/save", "/set temperature 9", "Hi"]
    talk(server, monkeypatch, *mistakes, "/help")
    output = capsys.readouterr()
    told = ["/foo is no command", "no question yet", "heat is no parameter", "must be a number", "Name the file, too"]
    for words in (*told, "temperature"):
        assert words in output.err
    assert "/retry " in output.out


def test_a_question_that_is_refused_again_is_not_forgotten(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    talk(server, monkeypatch, "One", "/set temperature 9", "/retry", f"/save {file}")
    question, answer = json.loads(file.read_text())["messages"]
    assert question["content"] == "One" and answer["role"] == "assistant"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(answer: Answer) -> None:
        next(iter(answer.pieces))
        raise KeyboardInterrupt

    monkeypatch.setattr("twostep.commands.chat._show", interrupted)
    talk(server, monkeypatch, "Hi")
    server.wait_until_idle()


def test_completion_knows_every_flag_of_serve() -> None:
    flags = flags_of_commands()
    assert flags.keys() == COMMANDS.keys()
    for name in Settings.model_fields.keys() - {"model"}:
        assert f"--{name.replace('_', '-')}" in flags["serve"]
    assert "--quantization" in flags["chat"] and "--timings" in flags["run"]


def test_bash_completes(capsys: Capture) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out + "\nCOMP_WORDS=(twostep ru); COMP_CWORD=1; _twostep; echo ${COMPREPLY[@]}"
    script += "\nCOMP_WORDS=(twostep run --tim); COMP_CWORD=2; _twostep; echo ${COMPREPLY[@]}"
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout == "run\n--timings\n"


FACTS: dict[str, Any] = {
    "cpu_name": "A CPU",
    "level": "avx512",
    "num_cpus": 8,
    "num_cores": 4,
    "num_threads": 4,
    "kernels": "avx512",
    "compiler": "g++",
    "available_bytes": 2**33,
    "total_bytes": 2**34,
    "read_bytes_per_s": 40e9,
    "flops_per_s": 1e12,
    "flops_dtype": "float32",
    "huge_pages": "madvise",
    "gpu": None,
    "load": 0.1,
}


def advised(**facts: Any) -> list[Finding]:
    return [finding for finding in findings_of(HostFacts(**{**FACTS, **facts})) if finding.advice]


def test_a_machine_without_faults_gets_no_advice() -> None:
    assert advised() == []


@pytest.mark.parametrize(
    ("facts", "name", "words"),
    [
        ({"kernels": None, "why_no_kernels": "no compiler"}, "kernels", "many times slower"),
        ({"kernels": "avx2"}, "kernels", "those for avx512 would be faster"),
        ({"level": "avx2", "kernels": "avx2"}, "cpu", "--quantization int8"),
        ({"num_threads": 1}, "threads", "there are 4 cores"),
        ({"num_threads": 9}, "threads", "threads wait for one another"),
        ({"huge_pages": "never"}, "huge pages", "madvise"),
        ({"read_bytes_per_s": 3e9}, "reads", "memory is slow"),
        ({"gpu_advice": "install torch with CUDA"}, "gpu", "install torch with CUDA"),
        ({"load": 5.0}, "load", "other programs are busy"),
    ],
)
def test_what_is_slow_is_told_with_a_cure(facts: dict[str, Any], name: str, words: str) -> None:
    (finding,) = advised(**facts)
    assert finding.name == name and words in str(finding.advice)
    assert finding.is_grave == (facts.get("kernels", "") is None or name == "gpu")


SIZE = ModelSize(
    layer_bytes=10 << 30,
    layer_flops=10 << 30,
    head_bytes=2 << 30,
    head_flops=2 << 30,
    attention=(AttentionSize(None, 1 << 16, 1 << 16),),
)


def plan_with(available: int, **facts: Any) -> str:
    known = {"architecture": "A", "num_weights": 6 << 30, "size": SIZE}
    known |= {"kv_groups": ONE_GROUP, "kv_block_bytes": 1 << 20}
    known |= {"max_model_len": 4096, "load_per_cpu": 0.0, "prompt_tokens": 512, "measure": None}
    known["quantizations"] = ("none", "int8", "int4")
    known |= {"ceilings": Ceilings(float(10 << 30), 1e15), "available_bytes": available << 30}
    return "\n".join(lines_of(Plan(**{**known, **facts})))


def test_a_plan_takes_the_most_exact_weights_that_fit() -> None:
    assert plan_with(64).endswith("\ntwostep serve MODEL")
    middle = plan_with(10)
    assert middle.count("do not fit") == 1 and middle.endswith("--quantization int8")
    assert "does not fit in any form" in plan_with(2)


def test_a_plan_knows_that_windows_give_back_blocks() -> None:
    contexts = {"max_model_len": 1 << 20, "prompt_tokens": 100_000 - 256}  # in 4 GiB
    assert "0 requests of 100,000 tokens" in plan_with(64, **contexts)
    assert "contexts are then at most 65,536 tokens" in plan_with(64, **contexts)
    windows = KVGroups((0, 1, 2, 3), num_groups=4, window=512)  # of which each has a quarter of a block
    text = plan_with(64, **contexts, kv_groups=windows, kv_block_bytes=1 << 18)
    assert "2 requests of 100,000 tokens" in text and "contexts are then at most 254,416 tokens" in text


def test_a_plans_times_are_those_of_the_roofline() -> None:
    exact, rounded, _ = plan_with(64).split("--quantization")[1:]
    assert "1 at once: TTFT 1.20 s at best" in exact and "32 at once: TTFT 38.50 s at best" in exact
    assert "ITL 1,203.1 ms (memory), 1 tokens/s at most" in exact
    assert "requests of 768" in rounded and "busy" not in exact
    assert "busy with other programs" in plan_with(64, load_per_cpu=2.0)


def test_a_plans_times_are_predictions_where_layers_were_measured() -> None:
    asked: list[str] = []

    def measure(quantization: str) -> list[BurstTimes]:
        asked.append(quantization)
        return [BurstTimes(0.5, 0.01, 90.0), BurstTimes(2.0, 0.02, 300.0), BurstTimes(8.0, 0.04, 700.0)]

    text = plan_with(10, measure=measure)
    assert asked == ["int8", "int4"]  # without rounding it does not fit: nothing to be measured
    assert " 1 at once: TTFT 0.50 s for the last of them, ITL 10.0 ms (memory), 90 tokens/s\n" in text
    assert " 8 at once: TTFT 2.00 s" in text and "32 at once: TTFT 8.00 s" in text and "700 tokens/s\n" in text


def test_a_plan_says_that_it_knows_nothing_of_gpus() -> None:
    assert "GPU" not in plan_with(64) and "on the H100: below is what the CPU takes" in plan_with(64, gpu="H100")


def test_embeddings_keep_sixteen_bits() -> None:
    untied = bytes_of_weights(SIZE, (6 << 30) + (1 << 30), "int8")
    tied = bytes_of_weights(SIZE, 6 << 30, "int8")
    assert tied == untied == quantized(SIZE, "int8").weight_bytes + (2 << 30)
    assert bytes_of_weights(SIZE, 6 << 30, "none") == 12 << 30


@pytest.mark.parametrize(("num_bytes", "shown"), [(3, "3 bytes"), (2**20, "1.0 MiB"), (3 * 2**29, "1.5 GiB")])
def test_sizes_are_told_in_the_largest_unit(num_bytes: int, shown: str) -> None:
    assert size_of(num_bytes) == shown


def test_models_are_listed_with_their_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["models"]) == 0
    assert "No model was downloaded" in capsys.readouterr().out
    for name, size in (("small", 10), ("large", 3 << 20)):
        repo = tmp_path / "hub" / f"models--org--{name}"
        (repo / "blobs").mkdir(parents=True)
        (repo / "blobs" / "b").write_bytes(bytes(size))
        (repo / "snapshots" / ("1" * 40)).mkdir(parents=True)
        (repo / "snapshots" / ("1" * 40) / "config.json").symlink_to(repo / "blobs" / "b")
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("1" * 40)
    assert main(["models"]) == 0
    first, second, total = capsys.readouterr().out.splitlines()
    assert first.startswith("org/large    3.0 MiB") and second.startswith("org/small   10 bytes")
    assert total == "2 models, 3.0 MiB"


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.04, 0.08, 0.3])
def test_a_server_that_is_ended_while_it_starts_says_nothing(
    seconds: float, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    def interrupt(*_: object) -> str:
        time.sleep(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint, "_url_of", interrupt)
    assert main(["run", "embedded", "Hi"]) == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_without_a_server_a_command_starts_its_own_and_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "twostep", "run", "embedded", "A list is", "--raw", "--temperature", "0"]
    flags = ["--max-tokens", "4", "--packed-cache", "off"]
    done = subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, " a list of all\n"), done.stderr
    wrong = subprocess.run([*command, "--draft-model", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "no config.json" in wrong.stderr and "Traceback" not in wrong.stderr
