"""Predicted outputs: they reach the engine as tokens, change nothing of the answer, and usage tells how much of them
appeared in it."""

from typing import Any

import pytest

from tests.server.events import chunks_of, error_of
from tests.server.fake_engine import INFO, saying
from tests.server.live_server import LiveServer
from tests.server.tools.tool_chats import function

FILE = "def area(width, height):\n    return width * height\n"
EDITED = FILE.replace("area", "surface")


def predicting(content: Any = FILE) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def details_of(body: dict[str, Any]) -> tuple[int, int]:
    details = body["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize(
    "content", [FILE, [{"type": "text", "text": FILE[:9]}, {"type": "text", "text": FILE[9:]}]], ids=["text", "parts"]
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_the_prediction_reaches_the_engine(server: LiveServer, endpoint: str, content: Any) -> None:
    getattr(server, endpoint)("Hi", max_tokens=2, **predicting(content))
    assert server.engine.requests[0].params.predicted_token_ids == tuple(FILE.encode())


def test_special_tokens_are_not_added_to_it(server: LiveServer) -> None:
    server.complete("Hi", max_tokens=2, add_special_tokens=True, **predicting("ab"))
    assert server.engine.requests[0].params.predicted_token_ids == tuple(b"ab")


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_usage_tells_how_much_of_it_appeared(server: LiveServer, endpoint: str) -> None:
    server.engine.rule = saying(EDITED)
    body = getattr(server, endpoint)("Hi", max_tokens=100, **predicting()).json()
    assert details_of(body) == (len(FILE) - len("area"), len("area"))
    assert body["usage"]["completion_tokens"] == len(EDITED) + 1


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_without_a_prediction_none_is_told(server: LiveServer, endpoint: str) -> None:
    usage = getattr(server, endpoint)("Hi", max_tokens=2).json()["usage"]
    assert "accepted_prediction_tokens" not in usage.get("completion_tokens_details", {})


def test_an_answer_that_is_all_different_rejects_it(server: LiveServer) -> None:
    server.engine.rule = saying("12345")
    assert details_of(server.chat("Hi", **predicting()).json()) == (0, len(FILE))


def test_an_empty_prediction_predicts_nothing(server: LiveServer) -> None:
    server.engine.rule = saying("12345")
    assert details_of(server.chat("Hi", **predicting("")).json()) == (0, 0)
    assert details_of(server.chat("Hi", **predicting([])).json()) == (0, 0)


def test_tokens_behind_a_stop_string_did_not_appear(server: LiveServer) -> None:
    server.engine.rule = saying(FILE)
    assert details_of(server.chat("Hi", stop=[":\n"], **predicting()).json()) == (25, len(FILE) - 25)


def test_those_of_all_choices_are_told(server: LiveServer) -> None:
    server.engine.rule = saying(FILE)
    assert details_of(server.chat("Hi", n=3, **predicting()).json()) == (3 * len(FILE), 0)
    assert details_of(server.complete(["Hi", "Ho"], max_tokens=99, **predicting()).json()) == (2 * len(FILE), 0)


def test_a_stream_tells_the_same_as_a_whole_answer(server: LiveServer) -> None:
    server.engine.rule = saying(EDITED)
    asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **predicting()}
    last = chunks_of(server.chat("Hi", **asked))[-1]
    assert last["usage"] == server.chat("Hi", **predicting()).json()["usage"]


def test_usage_so_far_grows_with_the_answer(server: LiveServer) -> None:
    server.engine.rule = saying(FILE[:5])
    asked: dict[str, Any] = {"stream": True, "stream_options": {"continuous_usage_stats": True}, **predicting(FILE[:5])}
    chunks = chunks_of(server.chat("Hi", **asked))
    assert [details_of(chunk) for chunk in chunks] == [(1, 4), (2, 3), (3, 2), (4, 1), (5, 0), (5, 0)]


@pytest.mark.parametrize(
    "parameters",
    [
        {"n": 2},
        {"logprobs": True},
        {"tools": [function()]},
        {"response_format": {"type": "json_object"}},
        {"presence_penalty": 1.0},
        {"max_completion_tokens": 5},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_what_others_refuse_beside_it_is_served(agent: LiveServer, parameters: dict[str, Any]) -> None:
    """A draft changes no answer, whatever that is to be."""
    assert agent.chat("Hi", **parameters, **predicting()).status_code == 200
    assert all(each.params.predicted_token_ids for each in agent.engine.requests)


@pytest.mark.parametrize(
    ("prediction", "place"),
    [
        ("text", "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 1}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content.0.type"),
        ({"type": "content", "content": "a\0"}, "prediction.content"),
        ({"type": "content", "content": "a", "weight": 2}, "prediction.weight"),
    ],
)
def test_what_is_no_prediction_is_refused_with_its_place(server: LiveServer, prediction: Any, place: str) -> None:
    error = error_of(server.chat("Hi", prediction=prediction))
    assert error["param"] == "prediction" and error["message"].startswith(place)


def test_more_tokens_than_an_answer_can_have_are_refused(server: LiveServer) -> None:
    error = error_of(server.chat("Hi", **predicting("a" * (INFO.max_model_len + 1))))
    assert error["param"] == "prediction" and f"{INFO.max_model_len + 1} tokens" in error["message"]
    assert server.chat("Hi", max_tokens=1, **predicting("a" * INFO.max_model_len)).status_code == 200


def test_predictions_of_many_choices_are_bounded_together(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent to the engine for each sequence, as bad words are."""
    monkeypatch.setattr("server.generation.plan.MAX_SENT_IDS", 3 * len(FILE))
    assert server.chat("Hi", n=3, **predicting()).status_code == 200
    assert error_of(server.chat("Hi", n=4, **predicting()))["param"] == "n"


def test_other_apis_say_where_it_belongs(server: LiveServer) -> None:
    error = error_of(server.respond("Hi", **predicting()))
    assert error["param"] == "prediction" and "belongs to" in error["message"]
