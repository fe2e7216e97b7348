"""Harmful grammars: each costs the checker's child process at most, and the next grammar is checked as usual."""

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import EngineUnavailableError, GrammarError, OverloadedError, TwostepError
from engine.grammar import checker as grammar_checker
from engine.grammar import checker_child
from engine.grammar.checker import MAX_PENDING, GrammarChecker
from engine.grammar.lark import JSON_OBJECT, JsonSchema, Literal, Regex, Sequence, Token, to_lark


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def fault(checker: GrammarChecker, grammar: str) -> str | None:
    try:
        asyncio.run(checker.check(grammar))
    except GrammarError as error:
        return str(error)
    return None


def chain(length: int) -> str:
    """Returns a grammar in which each rule refers to the next, so that the compiler recurses `length` deep."""
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(length)) + f'\nr{length}: "a"'


def nested(depth: int) -> dict[str, Any]:
    return reduce(lambda inner, _: {"type": "array", "items": inner}, range(depth), {"type": "null"})


def crossed(count: int) -> dict[str, Any]:
    """Returns a schema with all combinations of alternatives, 2 ** count."""
    pairs = [[{"properties": {f"{name}{i}": {"type": name}}} for name in ("string", "integer")] for i in range(count)]
    return {"allOf": [{"anyOf": pair} for pair in pairs]}


SELF = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
HARMFUL: dict[str, tuple[str | dict[str, Any], str]] = {
    "refers to itself only": (SELF, "no text satisfies it"),
    "contradicts itself": ({"type": "integer", "minimum": 5, "maximum": 3}, r"minimum \(5\) is greater"),
    "false": ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
    "no value": ({"enum": []}, "empty"),
    "members overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "no text can match two"),
    "no such type": ({"type": "text"}, "Invalid type"),
    "look-ahead": (to_lark(Regex("(?=a)b")), "look-around"),
    "no regex": ({"pattern": "["}, "unclosed character class"),
    "combinations": (crossed(20), "too large"),
    "divisors": ({"type": "integer", "multipleOf": 99_999_999}, "too complex"),
    "many divisors": (
        {"properties": {f"p{i}": {"multipleOf": 17_011 + 2 * i, "type": "integer"} for i in range(40)}},
        "too complex",
    ),
    "ambiguity": ('start: e{1,500}\ne: "a"? "a"? "a"?', "too complex to be followed"),
    "intersections": ("start: A\nA: " + " & ".join(f"/.*{c}.{{2{i}}}/" for i, c in enumerate("abcd")), "fuel"),
    "a rule of itself": ("start: start", "no text satisfies it"),
    "no such rule": ("start: other", 'unknown name: "other"'),
    "no grammar": ("{}[]", "expecting rule"),
    "nested rules": ("start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "too deeply nested"),
    "a chain of rules": (chain(8_000), "too complex"),
}
HARMLESS: dict[str, str | dict[str, Any]] = {
    "recursion": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
    "recursion without end": {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}, "minItems": 1}}, "$ref": "#/$defs/t"},
    "depth": nested(40),
    "many values": {"enum": [f"value {i}" for i in range(3000)]},
    "much": {"type": "array", "minItems": 10**6, "maxItems": 10**9, "items": {"type": "string", "minLength": 10**6}},
    "backtracking": {"type": "string", "pattern": "^(a+)+$"},
    "powers of terminals": "start: A\n" + 'A: ("a"{1000} "b"){1000}',
    "powers of rules": 'start: (("a"{1000}){1000}){1000}',
    "negations": "start: A\nA: " + " & ".join(f"~/.*{c}.{{1{i}}}/" for i, c in enumerate("abcd")),
    "many optional properties": {"properties": {f"p{i}": {"const": i} for i in range(2000)}},
    "a long constant": {"const": "x" * 100_000},
    "many states": {"type": "string", "pattern": "^[ab]*a[ab]{40}$"},
}


def grammar_of(source: str | dict[str, Any]) -> str:
    return source if isinstance(source, str) else to_lark(JsonSchema(source))


@pytest.mark.parametrize("name", HARMFUL)
def test_what_cannot_be_followed_is_refused_with_the_reason(checker: GrammarChecker, name: str) -> None:
    source, reason = HARMFUL[name]
    with pytest.raises(GrammarError, match=reason):
        asyncio.run(checker.check(grammar_of(source)))
    assert fault(checker, to_lark(JSON_OBJECT)) is None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_bad_is_followed(checker: GrammarChecker, name: str) -> None:
    assert fault(checker, grammar_of(HARMLESS[name])) is None


def test_reasons_are_one_short_line(checker: GrammarChecker) -> None:
    reasons = [fault(checker, grammar) for grammar in ("start: /(/", "start: " + "x" * 5000, 'start: "a"\n\nb c')]
    assert all(reason and len(reason) <= 300 and "\n" not in reason for reason in reasons)


def test_what_takes_too_long_is_ended_once_and_for_all() -> None:
    checker = GrammarChecker(timeout_s=0.2, max_children=1)
    slow = grammar_of({"type": "integer", "multipleOf": 99_999_999})
    assert fault(checker, slow) == "it is too complex to be compiled"
    [child] = checker._children
    assert child._process is None
    child._command = [sys.executable, "-c", "raise AssertionError"]
    assert fault(checker, slow) == "it is too complex to be compiled"
    checker.close()


def test_the_pending_checks_are_bounded() -> None:
    async def ask_many() -> None:
        checker, release = GrammarChecker(max_children=1), threading.Event()
        checker._threads.submit(release.wait)
        checks = [asyncio.create_task(checker.check(f'start: "{number}"')) for number in range(MAX_PENDING)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="try again later"):
            await checker.check('start: "one more"')
        checks += [asyncio.create_task(checker.check('start: "0"')) for _ in range(99)]
        leaver = checks.pop(0)
        await asyncio.sleep(0)
        leaver.cancel()
        release.set()
        await asyncio.gather(*checks)
        await checker.check('start: "one more"')
        assert len(checker._faults) == MAX_PENDING + 1
        checker.close()

    asyncio.run(ask_many())


def test_tenants_take_turns_and_have_bounds_of_their_own() -> None:
    async def ask_many() -> None:
        checker, release, ended = GrammarChecker(max_children=1), threading.Event(), list[str]()
        checker._threads.submit(release.wait)

        async def ask(tenant: str, number: int) -> None:
            await checker.check(f'start: "{tenant}{number}"', tenant)
            ended.append(tenant)

        checks = [asyncio.create_task(ask("many", number)) for number in range(MAX_PENDING)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await checker.check('start: "one more"', "many")
        checks += [asyncio.create_task(ask("few", number)) for number in range(2)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*checks)
        assert ended[:5] == ["many", "few", "many", "few", "many"] and len(checker._checks._own) == 0
        checker.close()

    asyncio.run(ask_many())


def test_special_tokens_are_checked_as_texts(checker: GrammarChecker) -> None:
    part = Sequence((Token(7, "<call>"), Literal("<[8]>")))
    assert asyncio.run(checker.checked(part)) == to_lark(part) != to_lark(part, tokens_as_text=True)
    assert fault(checker, to_lark(part, tokens_as_text=True)) is None


def test_a_check_that_no_caller_waits_for_any_more_is_not_started() -> None:
    async def check() -> None:
        checker, release = GrammarChecker(max_children=1), threading.Event()
        await checker.check('start: "z"')
        checker._threads.submit(release.wait)
        started, left, kept, stayer = (asyncio.create_task(checker.check(f'start: "{name}"')) for name in "abcc")
        await asyncio.sleep(0.01)
        pending = list(checker._pending.values())
        for leaver in (started, left, kept):
            leaver.cancel()
        await asyncio.wait([started, left, kept])
        assert len(checker._pending) == 2 and [each.task.cancelling() for each in pending] == [0, 1, 0]
        release.set()
        await stayer
        assert len(checker._faults) == 3 and checker._pending == {}
        await checker.check('start: "b"')
        assert len(checker._faults) == 4
        checker.close()

    asyncio.run(check())


def test_a_grammar_is_checked_once() -> None:
    checker = GrammarChecker()
    assert fault(checker, "start: start") == fault(checker, "start: start") != fault(checker, 'start: "a"')
    assert len(checker._faults) == 2
    checker.close()


def test_a_grammar_that_crashed_the_child_is_checked_again(checker: GrammarChecker) -> None:
    before = len(checker._faults)
    fault(checker, chain(8_000))
    assert len(checker._faults) == before


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_child_that_was_stopped_or_ended_while_it_was_idle_is_no_verdict(is_stopped: bool) -> None:
    checker = GrammarChecker(max_children=1)
    assert fault(checker, 'start: "a"') is None
    process = checker._children[0]._process
    assert process is not None
    if is_stopped:
        process.send_signal(signal.SIGSTOP)
    else:
        process.kill()
        process.wait()
    assert fault(checker, 'start: "b"') is None
    checker.close()


@pytest.mark.parametrize(("is_started", "error"), [(True, TwostepError), (False, EngineUnavailableError)])
def test_closing_ends_a_check_under_way(is_started: bool, error: type[Exception]) -> None:
    async def check_and_close() -> None:
        checker = GrammarChecker(timeout_s=60, max_children=1)
        if is_started:
            await checker.check('start: "a"')
        check = asyncio.create_task(checker.check(grammar_of({"type": "integer", "multipleOf": 99_999_999})))
        await asyncio.sleep(0.01)
        while checker._children[0]._process is None:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(checker.close)
        with pytest.raises(error):
            await check

    asyncio.run(check_and_close())


def test_a_checker_without_checks_starts_no_child() -> None:
    checker = GrammarChecker(command=[sys.executable, "-c", "raise AssertionError"])
    checker.close()
    assert all(child._process is None for child in checker._children)


def test_a_child_that_cannot_start_is_no_verdict() -> None:
    for command in ([sys.executable, "-c", ""], ["no-such-program"]):
        checker = GrammarChecker(command=command)
        with pytest.raises(EngineUnavailableError, match="cannot be started now"):
            asyncio.run(checker.check(to_lark(Literal("a"))))
        assert len(checker._faults) == 0
        checker.close()


KILLED_ONCE = """
import os, pathlib, signal, sys
started = pathlib.Path(sys.argv[1])
if not started.exists():
    started.touch()
    os.kill(os.getpid(), signal.SIGKILL)
print("null", flush=True)
for line in sys.stdin:
    print("null", flush=True)
"""


def test_a_child_that_is_killed_as_it_starts_is_started_again(tmp_path: Path) -> None:
    checker = GrammarChecker(command=[sys.executable, "-c", KILLED_ONCE, str(tmp_path / "started")])
    assert fault(checker, 'start: "a"') is None
    checker.close()


LATE = """
import json, sys, time
time.sleep(float(sys.argv[1]))
print("null", flush=True)
for line in sys.stdin:
    print(json.dumps("about " + json.loads(line)), flush=True)
"""


def test_an_answer_that_comes_late_is_not_taken_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_child, "_START_S", 0.3)
    checker = GrammarChecker(command=[sys.executable, "-c", LATE, "0.6"])
    with pytest.raises(EngineUnavailableError):
        fault(checker, "first")
    monkeypatch.setattr(checker_child, "_START_S", 30.0)
    time.sleep(0.6)  # the first child would be ready now
    assert fault(checker, "second") == "about second"
    checker.close()


def test_many_open_files_do_not_matter() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    with ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        checker = GrammarChecker(command=[sys.executable, "-c", LATE, "0"])
        assert fault(checker, "it") == "about it"
        checker.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_timeout_is_cached_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "_TIMEOUT_TTL_S", 0.05)

    async def check() -> None:
        checker = GrammarChecker(timeout_s=0.2)
        with pytest.raises(GrammarError, match="too complex"):
            await checker.check(grammar_of({"type": "integer", "multipleOf": 99_999_999}))
        assert len(checker._faults) == 1
        while checker._faults:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(checker.close)

    asyncio.run(check())
