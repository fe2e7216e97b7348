"""System messages behind the first turn reach every chat template: where it takes none, as text of the user."""

from typing import Any

import pytest

from tests.server.live_server import FakeBackend, LiveServer, live_server
from tests.server.model_talk import prompt_of

SAID = "[{{ m.role }}]{{ m.content }}"
NO = "{{ raise_exception('No.') }}"
IS_LATE = "m.role == 'system' and not loop.first"


def template(line: str) -> str:
    """Returns a template that writes this for each message `m`."""
    return f"{{% for m in messages %}}{line}{{% endfor %}}"


FIRST_ONLY = template(f"{{% if {IS_LATE} %}}{NO}{{% endif %}}{SAID}")
SILENT = template(f"{{% if not ({IS_LATE}) %}}{SAID}{{% endif %}}")
IN_TURNS = template(f"{{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}}{NO}{{% endif %}}{SAID}")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


HI = {"role": "assistant", "content": "Hi"}


def prompt(server: LiveServer, messages: list[dict[str, Any]]) -> str:
    response = server.chat(messages, max_tokens=1)
    assert response.status_code == 200, response.text
    return prompt_of(server)


@pytest.mark.parametrize("source", [FIRST_ONLY, SILENT])
def test_a_template_that_takes_them_first_only_gets_them_as_text_of_the_user(source: str) -> None:
    with live_server(FakeBackend(chat_templates={"default": source})) as server:
        assert prompt(server, [system("S"), user("a"), system("b")]) == "[system]S[user]a\n\nb"
        assert prompt(server, [user("a"), system("b"), HI, user("c")]) == "[user]a\n\nb[assistant]Hi[user]c"
        assert prompt(server, [user("a"), HI, system("b"), user("c")]) == "[user]a[assistant]Hi[user]b\n\nc"
        assert prompt(server, [user("a"), system("b"), system("c"), user("d")]) == "[user]a\n\nb\n\nc\n\nd"
        assert prompt(server, [user("a"), user("b")]) == "[user]a[user]b"
        assert prompt(server, [user("a"), {"role": "developer", "content": "b"}]) == "[user]a\n\nb"


def test_user_and_assistant_still_take_turns() -> None:
    with live_server(FakeBackend(chat_templates={"default": IN_TURNS})) as server:
        assert prompt(server, [user("a"), HI, system("b"), user("c")]) == "[user]a[assistant]Hi[user]b\n\nc"


def test_a_template_that_takes_them_anywhere_gets_them_where_they_stand() -> None:
    with live_server(FakeBackend(chat_templates={"default": template(SAID)})) as server:
        assert prompt(server, [user("a"), system("b"), user("c")]) == "[user]a[system]b[user]c"


def test_messages_of_agents_have_them_behind_the_users() -> None:
    with live_server(FakeBackend(chat_templates={"default": FIRST_ONLY})) as server:
        assert server.message([user("a"), system("b")], system="S", max_tokens=1).status_code == 200
        assert prompt_of(server) == "[system]S[user]a\n\nb"
