"""The documentation is true: examples run against a real server, tables are those of the code, links lead somewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from engine.core.batch import Batch, Phase
from engine.core.stats import stats_without_engine
from engine.scheduling.cost.step_trace import FileTracer
from server.core.errors import ERROR_TABLE, STATUS_TABLE
from server.metrics.metrics import Metrics
from server.middleware.auth import KEYLESS_PATHS
from server.settings.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("loadtest/*.md")]
}
API = PAGES["docs/api.md"]
EXAMPLES = PAGES["README.md"] + API  # in the order in which they are read
START_TIMEOUT_S = 240  # the first start of all compiles the kernels


def blocks(language: str) -> list[str]:
    """Returns the contents of the examples in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", EXAMPLES, re.MULTILINE | re.DOTALL)


def names_in(text: str) -> set[str]:
    """Returns the names of HTTP headers and JSON fields."""
    return set(re.findall(r"^([\w-]+): ", text, re.MULTILINE)) | set(re.findall(r'"(\w+)":', text))


def flag_table() -> list[str]:
    """Returns the lines that the settings table should have."""
    rows = [row(name, field) for name, field in Settings.model_fields.items()]
    return ["| flag | default | |", "|---|---|---|", *rows]


def row(name: str, field: FieldInfo) -> str:
    flag = name.replace("_", "-")
    shown = "MODEL" if name == "model" else f"--[no-]{flag}" if field.default is True else f"--{flag}"
    choices = [str(choice) for choice in get_args(field.annotation) if get_origin(field.annotation) is Literal]
    text = f"{field.description} One of {', '.join(choices)}." if choices else field.description
    return f"| `{shown}` | {default_of(field.default)} | {text} |"


def default_of(value: Any) -> str:
    if value in (None, ()):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value.human_readable().replace('.0', '') if isinstance(value, ByteSize) else value}`"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server as a reader starts it, with the embedded model, on a port of its own."""
    own = {f"TWOSTEP_{name.upper()}" for name in Settings.model_fields}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-m", "server", "serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        banner = "".join(takewhile(lambda line: line != "Try it:\n", process.stdout))
        address = re.search(r"http://127\.0\.0\.1:\d+", banner)
        assert address is not None
        yield address[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def run(command: list[str], block: str, url: str) -> str:
    script = block.replace("http://127.0.0.1:8000", url)
    result = subprocess.run([*command, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT_S)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_prints_what_is_shown(url: str) -> None:
    outputs = [run(["bash", "-euc"], block, url) for block in blocks("bash")]
    assert len(outputs) == len(blocks("http")) > 0
    for output, shown in zip(outputs, blocks("http"), strict=True):
        assert names_in(shown) <= names_in(output)
        assert shown.splitlines()[0] == output.splitlines()[0]
        assert shown.count("data: ") == output.count("data: ")


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT_S)
def test_the_python_example_prints_the_same_text_twice(url: str) -> None:
    example, *_ = blocks("python")
    output = run([sys.executable, "-c"], example, url)
    half = len(output) // 2
    assert output[:half] == output[half + 1 :] != ""  # between the two: the first one's end of line


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT_S)
def test_the_order_is_an_order(url: str) -> None:
    client, order, *_ = blocks("python")
    output = run([sys.executable, "-c"], client + order, url)  # the order comes after a text that may end anywhere
    assert re.search(r"item='(tea|coffee)' cups=[1-9]\n\Z", output)


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT_S)
def test_a_tool_is_called_and_its_result_is_sent(url: str) -> None:
    client, _, tools, _ = blocks("python")
    output = run([sys.executable, "-c"], client + tools, url)
    assert re.search(r"weather {'city': '(Oslo|Rome)', 'degrees': 21} ", output)


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT_S)
def test_the_other_client_is_answered(url: str) -> None:
    *_, anthropic = blocks("python")
    assert run([sys.executable, "-c"], anthropic, url) != ""


@pytest.mark.slow
@pytest.mark.timeout(START_TIMEOUT_S)
def test_endpoints_are_those_that_exist(url: str) -> None:
    table = API.partition("\n## Endpoints")[2].partition("\n## ")[0]
    listed = set(re.findall(r"[` ](/[\w./{}]+)", table))
    assert listed == httpx.get(f"{url}/openapi.json").json()["paths"].keys() | {"/docs", "/openapi.json"}


def test_errors_are_those_that_exist() -> None:
    table = API.partition("\n## Errors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", table, re.MULTILINE)
    listed = [(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)]
    kinds = {*ERROR_TABLE.values(), *STATUS_TABLE.values()}
    assert sorted(listed) == sorted({(kind.status, kind.code) for kind in kinds})


def test_settings_are_those_that_exist() -> None:
    assert [line for line in PAGES["docs/settings.md"].splitlines() if line.startswith("|")] == flag_table()


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("docs/operations.md", r"every request but (.*?) needs a key"),
        ("SECURITY.md", r"refused\. (.*?) never need one"),
    ],
)
def test_paths_that_need_no_key_are_named(page: str, sentence: str) -> None:
    (named,) = re.findall(sentence, PAGES[page], re.DOTALL)
    assert set(re.findall(r"`(.*?)`", named)) == KEYLESS_PATHS


def test_metrics_are_those_that_exist() -> None:
    families = text_string_to_metric_families(Metrics("model", with_vllm_names=False).render().decode())
    exposed = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    named = {name for text in PAGES.values() for name in re.findall(r"`(twostep_\w+)`", text)}
    assert len(named) > 30
    assert named - exposed == set()


def test_make_targets_are_those_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for text in PAGES.values() for name in re.findall(r"(?:^ *|`)make (\w+)", text, re.MULTILINE)}
    assert named - targets == set()


def test_programs_are_those_that_exist() -> None:
    program = re.compile(r"(?:python -m |`)((?:tests|benchmarks)\.[\w.]*\w)")
    named = {name for text in PAGES.values() for name in program.findall(text)}
    assert len(named) > 10
    assert {name for name in named if find_spec(name) is None} == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(PAGES[str(target.resolve().relative_to(ROOT))]), f"{path}#{anchor}"


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_of_the_trace_has_every_field(tmp_path: Path) -> None:
    tracer = FileTracer(str(tmp_path / "trace"))
    tracer.record(Batch(Phase.DECODE, ()), stats_without_engine(None, 0, 1))
    tracer.close()
    _, section = PAGES["docs/latency.md"].split("\n## The trace\n")
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(json.loads((tmp_path / "trace").read_text()))
