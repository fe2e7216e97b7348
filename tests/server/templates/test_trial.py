"""A template that takes too much is refused at start, in bounded time and memory, and never run by the server."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from engine.core.errors import ConfigError, InvalidParameterError
from server.protocol.chat import ConversationParams
from server.settings.settings import Settings
from server.templates import render, trial
from server.templates.render import ChatRenderer
from server.templates.setting import load_chat_renderer
from server.templates.trial import try_template
from server.tools.model_format import DialectSettings
from tests.crossed import slow_but
from tests.engine.text.sample_templates import CHATML
from tests.server.byte_tokenizer import ByteTokenizer

PARAMS = ConversationParams.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
REPEATED = "{{% for i in range(300) %}}{} x {{% endfor %}}"
TAKES_TOO_MUCH = {
    "a constant of 10 GB": "{{ 'a' * 10**10 }}",
    "a wide line": "{{ 'a' | center(10**10) }}",
    "an endless power": "{{ 9 ** (9 ** 9) }}",
    "endless loops": "{% for i in range(10**5) %}{% for j in range(10**5) %}{% set x = j %}{% endfor %}{% endfor %}",
    "a text that doubles": "{% set n = namespace(a='a' * 1000) %}{% for i in range(40) %}{% set n.a = n.a + n.a %}"
    "{% endfor %}{{ n.a | length }}",
    "a source too long": "a" * (trial.MAX_SOURCE_CHARS + 1),
}


def tried(source: str) -> None:
    asyncio.run(try_template(source, {}, DialectSettings()))


@pytest.mark.parametrize(
    "what", slow_but(TAKES_TOO_MUCH, *(TAKES_TOO_MUCH.keys() - {"an endless power", "a constant of 10 GB"}))
)
def test_what_takes_too_much_is_refused(what: str) -> None:
    """Whatever does not end takes the whole limit of time."""
    with pytest.raises(InvalidParameterError, match=r"cannot be used: (trying )?it .*more than") as caught:
        tried(TAKES_TOO_MUCH[what])
    assert caught.value.param == "chat_template"


def test_what_is_not_valid_is_refused_with_its_reason() -> None:
    with pytest.raises(InvalidParameterError, match="is not valid: unexpected"):
        tried("{% if %")


def test_usual_templates_pass() -> None:
    tried(CHATML)
    tried("{{ raise_exception('No!') }}")  # refuses messages, and so it may


def test_constants_of_branches_that_are_not_taken_cost_nothing() -> None:
    for constant in ("'a' * 10**10", "'a' | center(10**10)"):
        tried("{% if false %}{% set x = " + constant + " %}{{ " + constant + " }}{% endif %}{{ messages[0].content }}")


def test_marks_of_arguments_in_all_orders_cost_little() -> None:
    """What a template writes around probes decides how long they are searched for the marks of calls."""
    calls = "".join(REPEATED.format(text) for text in ("fnAlpha keyOne", "vAluEone", "keyTwo"))
    tried("{% for m in messages %}{% if m.tool_calls %}" + calls + "{% else %}{{ m.content }}{% endif %}{% endfor %}")


def loaded(source: str) -> ChatRenderer:
    return asyncio.run(load_chat_renderer(ByteTokenizer({"default": source}), Settings()))


def test_the_server_does_not_run_what_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        renderer = loaded("{{ 'a' * 10**10 }}")
    assert "chat template cannot be used" in caplog.text
    uses = (renderer.render, renderer.dialect_for, lambda params: asyncio.run(renderer.encode(params)))
    for use in uses:
        with pytest.raises(InvalidParameterError, match="cannot be used"):
            use(PARAMS)


def test_a_given_one_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^--chat-template: .*more than 2 seconds"):
        asyncio.run(load_chat_renderer(ByteTokenizer({}), Settings(chat_template="{{ 'a' * 10**10 }}")))


def test_each_template_that_is_used_has_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    tried_sources = []

    async def note(source: str, *_: object) -> None:
        tried_sources.append(source)

    monkeypatch.setattr(render, "try_template", note)
    templates = {"default": "one", "tool_use": "two", "unused": "{{ 'a' * 10**10 }}"}
    asyncio.run(load_chat_renderer(ByteTokenizer(templates), Settings()))
    assert tried_sources == ["one", "two"]


def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    monkeypatch.setattr(trial, "COMMAND", (sys.executable, "-c", code))

    async def cancel() -> int:
        task = asyncio.create_task(try_template("x", {}, DialectSettings()))
        while not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return int(pid_file.read_text())

    with pytest.raises(ProcessLookupError):
        os.kill(asyncio.run(cancel()), signal.SIGCONT)
