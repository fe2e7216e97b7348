"""The routes beside generation, and the description of all routes in /openapi.json."""

import json
from typing import Any

import pytest
from pydantic import BaseModel

from engine.core.generation_request import Tenant
from server.core.version import VERSION
from server.generation import whole_answer
from server.protocol.chat import ChatChunk, ChatResponse
from server.protocol.completions import CompletionRequest, CompletionResponse
from server.routes.tokenization import TOKEN_BYTES
from tests.server.byte_tokenizer import BOS
from tests.server.events import chunks_of, error_of
from tests.server.live_server import FakeBackend, LiveServer, live_server


def test_models_are_listed_under_every_name() -> None:
    with live_server(model="org/model", served_model_name=["a", "org/b"]) as server:
        listed = server.client.get("/v1/models").json()
        assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["a", "org/b"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "org/b", False)
        card = server.client.get("/v1/models/org/b").json()
        assert card == {
            "id": "org/b",
            "object": "model",
            "type": "model",
            "display_name": "org/b",
            "created": 1_700_000_000,
            "created_at": "2023-11-14T22:13:20Z",
            "owned_by": "twostep",
            "root": "org/model",
            "max_model_len": 512,
            "parent": None,
        }
        assert server.complete("Hi", model="org/b").json()["model"] == "org/b"
        assert server.complete("Hi").json()["model"] == "a"
        assert error_of(server.complete("Hi", model="org/model"))["code"] == "model_not_found"


def test_version(server: LiveServer) -> None:
    assert server.client.get("/version").json() == {"version": VERSION}


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/v1/models", "/v1/models/fake", "/metrics", "/version", "/docs"]
)
def test_where_get_is_answered_head_is(server: LiveServer, path: str) -> None:
    got, head = server.client.get(path), server.client.head(path)
    assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"]) and not head.content
    assert server.client.head("/v1/completions").status_code == 405


def test_server_info_reports_settings_and_engine(server: LiveServer) -> None:
    info = server.client.get("/server_info").json()
    assert info["settings"]["max_num_seqs"] == 64 and info["engine"]["num_blocks"] == 64
    assert info["system_fingerprint"] == server.complete("Hi").json()["system_fingerprint"]


class TestTokenize:
    def test_text_to_ids(self, server: LiveServer) -> None:
        assert server.post("/tokenize", b'{"prompt": "Hi"}').json() == {
            "count": 3,
            "max_model_len": 512,
            "tokens": [BOS, 72, 105],
        }

    def test_options(self, server: LiveServer) -> None:
        body = server.post(
            "/tokenize", '{"prompt": "é", "add_special_tokens": false, "return_token_strs": true, "model": "fake"}'
        ).json()
        assert (body["tokens"], body["token_strs"]) == ([0xC3, 0xA9], ["bytes:\\xc3", "bytes:\\xa9"])

    def test_a_large_answer_is_written_in_pieces(self, server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
        body = {"prompt": "a" * 3000, "return_token_strs": True}
        whole = server.post_json("/tokenize", body)
        monkeypatch.setattr(whole_answer, "WHOLE_BYTES", 100)
        pieces = server.post_json("/tokenize", body)
        assert "content-length" in whole.headers and "content-length" not in pieces.headers
        assert pieces.content == whole.content == json.dumps(whole.json(), separators=(",", ":")).encode()

    def test_tokens_for_which_there_is_no_memory_are_not_told(self) -> None:
        with live_server(answer_memory_bytes=3 * TOKEN_BYTES) as server:
            memory = server.context.answer_memory
            assert server.post_json("/tokenize", {"prompt": "Hi"}).status_code == 200
            assert server.post_json("/tokenize", {"prompt": "Hit"}).status_code == 400
            with memory.reserved(Tenant(), 1):
                assert server.post_json("/tokenize", {"prompt": "Hi"}).status_code == 429
            server.wait_until(lambda: memory.num_bytes == 0)

    @pytest.mark.parametrize("body", ["{}", '{"prompt": 1}', '{"prompt": ["a"]}', '{"prompt": "\\ud800"}'])
    def test_what_is_no_text_is_refused(self, server: LiveServer, body: str) -> None:
        assert error_of(server.post("/tokenize", body))["param"] == "prompt"

    def test_ids_to_text(self, server: LiveServer) -> None:
        assert server.post("/detokenize", b'{"tokens": [256, 72, 105]}').json() == {"prompt": "<s>Hi"}
        assert server.post("/detokenize", b'{"tokens": []}').json() == {"prompt": ""}

    def test_ids_beyond_the_models_vocabulary_have_a_way_back(self) -> None:
        """Tokenizers may have more tokens than the model has rows of embeddings."""
        with live_server(FakeBackend(special_tokens={"<extra>": 1000})) as server:
            tokens = server.post_json("/tokenize", {"prompt": "a<extra>"}).json()["tokens"]
            assert tokens == [BOS, ord("a"), 1000]
            assert server.post_json("/detokenize", {"tokens": tokens}).json() == {"prompt": "<s>a<extra>"}
            assert error_of(server.post_json("/detokenize", {"tokens": [999]}))["param"] == "tokens"

    @pytest.mark.parametrize("tokens", ["[258]", "[-1]", "[1.5]", "1", '"a"', "[99999999999999999999]"])
    def test_what_are_no_ids_is_refused(self, server: LiveServer, tokens: str) -> None:
        assert error_of(server.post("/detokenize", f'{{"tokens": {tokens}}}'))["param"] == "tokens"


class TestOpenApi:
    def test_the_answers_are_as_documented(self, server: LiveServer) -> None:
        response = server.complete("Hi", n=2, echo=True, logprobs=2, prompt_logprobs=1, return_token_ids=True)
        assert_described(response.json())

    def test_the_chunks_are_as_documented(self, server: LiveServer) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for chunk in chunks_of(server.complete("Hi", stream=True, stream_options=options, logprobs=2)):
            assert_described(chunk)

    def test_the_answers_of_chats_are_as_documented(self, server: LiveServer) -> None:
        parameters: dict[str, Any] = {"n": 2, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
        parameters |= {"prompt_logprobs": 1, "return_token_ids": True}
        assert_described(server.chat("Hi", **parameters).json(), ChatResponse)
        options = {"include_usage": True, "continuous_usage_stats": True}
        for chunk in chunks_of(server.chat("Hi", stream=True, stream_options=options, **parameters)):
            assert_described(chunk, ChatChunk)

    def test_messages_are_described(self, schema: dict[str, Any]) -> None:
        properties = schema["components"]["schemas"]["ChatRequest"]["properties"]
        roles = [each["$ref"].rpartition("/")[2] for each in properties["messages"]["items"]["oneOf"]]
        assert roles == ["SystemMessage", "UserMessage", "AssistantMessage", "ToolMessage"]

    def test_the_request_is_described_by_its_own_model(self, schema: dict[str, Any]) -> None:
        operation = schema["paths"]["/v1/completions"]["post"]
        body = operation["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/CompletionRequest"}
        described = schema["components"]["schemas"]["CompletionRequest"]
        assert described["properties"].keys() == CompletionRequest.model_fields.keys()
        assert described["required"] == ["prompt"]
        kinds = [kind["type"] for kind in described["properties"]["prompt"]["anyOf"]]
        assert kinds == ["string", "array", "array", "array"]

    def test_errors_are_described_in_our_shape_only(self, schema: dict[str, Any]) -> None:
        responses = schema["paths"]["/v1/completions"]["post"]["responses"]
        for status in ("400", "401", "404", "413", "415", "429", "500", "503"):
            described = responses[status]["content"]["application/json"]["schema"]
            assert described == {"$ref": "#/components/schemas/ErrorResponse"}
        assert all("422" not in each["responses"] for path in schema["paths"].values() for each in path.values())

    def test_all_routes_are_described(self, schema: dict[str, Any]) -> None:
        assert schema["paths"].keys() == {
            *("/v1/chat/completions", "/v1/chat/completions/render", "/v1/responses"),
            *("/v1/messages", "/v1/messages/count_tokens"),
            *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
            *("/api/tags", "/api/ps", "/api/show", "/api/version"),
            *("/v1/completions", "/v1/embeddings", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize"),
            *("/v1/requests", "/v1/requests/{id}", "/v1/cache", "/reset_prefix_cache"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
            *(
                "/health",
                "/ready",
                "/load",
                "/stats",
                "/stats/timeline",
                "/stats/diagnosis",
                "/version",
                "/server_info",
                "/metrics",
            ),
        }

    def test_what_may_be_absent_may_be_null(self, schema: dict[str, Any]) -> None:
        """This holds in all bodies that clients send, down to their parts."""
        for name in ("CompletionRequest", "ResponsesRequest", "ToolResultBlock", "StreamOptions", "DetokenizeRequest"):
            described = schema["components"]["schemas"][name]
            for field, each in described["properties"].items():
                assert ({"type": "null"} in each.get("anyOf", ())) == (field not in described.get("required", ()))

    def test_docs_are_served(self, server: LiveServer) -> None:
        assert "openapi.json" in server.client.get("/docs").text

    @pytest.fixture
    def schema(self, server: LiveServer) -> dict[str, Any]:
        described: dict[str, Any] = server.client.get("/openapi.json").json()
        return described


def assert_described(body: dict[str, Any], model: type[BaseModel] = CompletionResponse) -> None:
    """Asserts that the response model validates the body and knows all of its fields."""
    parsed = model.model_validate(body)
    assert parsed.model_dump(exclude_unset=True) == body
