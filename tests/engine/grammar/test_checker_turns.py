"""One tenant's grammars do not hold up another's, in translation and in the check."""

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from engine.grammar import checker as grammar_checker
from engine.grammar.checker import GrammarChecker
from engine.grammar.lark import Lark

WAITING = """
import pathlib, sys, time
print("null", flush=True)
for line in sys.stdin:
    while "slow" in line and not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.001)
    print("null", flush=True)
"""


def test_a_slow_grammar_holds_up_its_own_tenant_only(tmp_path: Path) -> None:
    release = tmp_path / "release"

    async def ask() -> None:
        checker = GrammarChecker(timeout_s=60.0, command=[sys.executable, "-c", WAITING, str(release)])
        held = [asyncio.create_task(checker.check(text, "many")) for text in ("slow 1", "slow 2", "quick")]
        await asyncio.sleep(0)
        for tenant in ("few", "fewer", "few"):
            await checker.check(f"of {tenant}", tenant)
        assert not any(each.done() for each in held) and len(checker._pending) == 3
        assert sum(child._process is not None for child in checker._children) == 2
        release.touch()
        await asyncio.gather(*held)
        checker.close()

    asyncio.run(ask())


LATE_SECOND = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
name = "end" if (folder / "started").exists() else "started"
(folder / "started").touch()
while not (folder / name).exists():
    time.sleep(0.001)
print("null", flush=True)
for line in sys.stdin:
    while not (folder / "release").exists():
        time.sleep(0.001)
    print("null", flush=True)
"""


def test_a_grammar_waits_for_no_child_that_starts_if_another_is_idle_before(tmp_path: Path) -> None:
    async def ask() -> None:
        checker = GrammarChecker(command=[sys.executable, "-c", LATE_SECOND, str(tmp_path)], timeout_s=60.0)
        first = asyncio.create_task(checker.check("first", "many"))
        while not any(each.is_running for each in checker._pending.values()):
            await asyncio.sleep(0.001)
        second = asyncio.create_task(checker.check("second", "few"))
        while checker._children[-2]._process is None:
            await asyncio.sleep(0.001)
        (tmp_path / "release").touch()
        await asyncio.gather(first, second)
        (tmp_path / "end").touch()
        idle = {id(await checker._idle.get()) for _ in range(2)}
        assert idle == {id(child) for child in checker._children[-2:]}, "each child is idle once"
        checker.close()

    asyncio.run(ask())


def test_grammars_are_translated_in_turns_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    release, translated = threading.Event(), list[str]()

    def translate(source: Lark) -> tuple[str, str]:
        release.wait()
        translated.append(source.text)
        return source.text, source.text

    async def ignore(*_: object) -> None:
        pass

    monkeypatch.setattr(grammar_checker, "_translated", translate)
    monkeypatch.setattr(GrammarChecker, "check", ignore)

    async def ask() -> None:
        checker = GrammarChecker()
        asked = [asyncio.create_task(checker.checked(Lark(f"many {number}"), "many")) for number in range(99)]
        await asyncio.sleep(0)
        asked += [asyncio.create_task(checker.checked(Lark(f"few {number}"), "few")) for number in range(2)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*asked)
        checker.close()

    asyncio.run(ask())
    assert translated[:5] == ["many 0", "few 0", "many 1", "few 1", "many 2"] and len(translated) == 101
