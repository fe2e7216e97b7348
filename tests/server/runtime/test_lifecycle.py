"""Loading, failing, serving, draining, ending."""

import socket
from contextlib import closing

import httpx
import pytest
from sse_starlette.sse import AppStatus

from engine.core.errors import EngineUnavailableError, ModelError
from server.listener import listen
from server.runtime.lifecycle import State
from tests.server.events import chunks_of, error_of
from tests.server.live_server import FakeBackend, LiveServer, in_thread, live_server

OPEN_WHILE_LOADING = ["/metrics", "/version"]


class TestLoading:
    def test_the_port_answers_503_until_the_model_is_loaded(self) -> None:
        with live_server(FakeBackend(is_loading=True)) as server:
            for path in ("/health", "/ready", "/v1/models", "/load", "/server_info", "/openapi.json", "/nothing"):
                response = server.client.get(path)
                assert (response.status_code, error_of(response)["code"]) == (503, "server_is_overloaded")
                assert int(response.headers["retry-after"]) >= 1 and "loading" in response.text
            assert server.complete("Hi").status_code == 503
            assert [server.client.get(path).status_code for path in OPEN_WHILE_LOADING] == [200, 200]
            server.backend.is_loading = False
            server.wait_until(lambda: server.context.lifecycle.state is State.READY)
            assert server.complete("Hi").status_code == 200

    def test_it_can_be_ended(self) -> None:
        with live_server(FakeBackend(is_loading=True)) as server:
            server.server.should_exit = True
            server.wait_until(server.loop.is_closed)

    @pytest.mark.parametrize("failure", [ModelError("Nothing there."), ZeroDivisionError("oops")])
    def test_its_failure_ends_the_server(self, failure: Exception) -> None:
        with live_server(FakeBackend(failure=failure)) as server:
            server.wait_until(lambda: server.server.should_exit)
            assert server.context.lifecycle.failure is failure


def test_connections_do_not_collect_small_writes() -> None:
    with closing(listen("127.0.0.1", 0, 60.0)) as listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class TestHealth:
    def test_a_dead_or_silent_engine_does_not_look_healthy(self, server: LiveServer) -> None:
        assert server.client.get("/health").json() == {"status": "ok"}
        server.engine.health = EngineUnavailableError("The engine was silent for 31 seconds.")
        for path in ("/health", "/ready"):
            response = server.client.get(path)
            assert response.status_code == 503 and "silent" in error_of(response)["message"]

    def test_a_restarting_engine_is_alive_but_not_ready(self, server: LiveServer) -> None:
        server.engine.is_ready = False
        assert server.client.get("/health").json() == {"status": "restarting"}
        response = server.client.get("/ready")
        assert response.status_code == 503 and "restarted" in error_of(response)["message"]
        assert int(response.headers["retry-after"]) >= 1

    def test_load_tells_what_is_live(self, server: LiveServer) -> None:
        server.engine.hold_at = 0
        thread = in_thread(lambda: server.complete("Hi", n=3))
        server.wait_until(lambda: server.engine.num_live == 3)
        assert server.client.get("/load").json() == {
            "server_load": 3,
            "requests_running": 3,
            "requests_waiting": 0,
            "waiting_tokens": 7,
            "predicted_wait_ms": 500.0,
            "kv_cache_usage_ratio": 3 / 64,
            "kv_cache_tokens": 64 * server.engine.info.block_size,
        }
        server.engine.hold_at = None
        thread.join()


class TestDraining:
    def test_sse_starlette_leaves_it_to_us(self, server: LiveServer) -> None:
        """Under a plain uvicorn, sse-starlette's own drain would cut every stream off at SIGTERM."""
        assert not AppStatus.enable_automatic_graceful_drain

    def test_streams_go_on_and_new_work_gets_503(self) -> None:
        with live_server() as server:
            server.engine.hold_at = 3
            stream = OpenStream(server)
            server.call(server.server._on_signal)
            server.wait_until(lambda: server.context.lifecycle.state is State.DRAINING)
            refused = server.complete("Hi")
            assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
            assert "retry-after" in refused.headers
            assert server.client.get("/ready").status_code == 503
            assert server.client.get("/health").status_code == 200
            server.engine.hold_at = None
            assert len(chunks_of(stream.finish())) == 16
            server.wait_until(lambda: server.server.should_exit)

    def test_streams_that_outlast_the_timeout_end_with_an_error(self) -> None:
        with live_server(shutdown_timeout=0.1) as server:
            server.engine.hold_at = 3
            stream = OpenStream(server)
            server.call(server.server._on_signal)
            chunks = chunks_of(stream.finish())
            assert len(chunks) == 4 and chunks[-1]["error"]["code"] == "server_is_overloaded"

    def test_a_second_signal_does_not_wait(self) -> None:
        with live_server(shutdown_timeout=1000) as server:
            server.engine.hold_at = 3
            stream = OpenStream(server)
            server.call(server.server._on_signal)
            server.call(server.server._on_signal)
            assert chunks_of(stream.finish())[-1]["error"]["code"] == "server_is_overloaded"

    def test_an_idle_server_ends_at_once(self) -> None:
        with live_server(shutdown_timeout=1000) as server:
            server.call(server.server._on_signal)
            server.wait_until(lambda: server.server.should_exit)


class OpenStream:
    """A stream that has started, read in a thread."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._responses: list[httpx.Response] = []
        self.thread = in_thread(self._run)
        server.wait_until(lambda: server.engine.num_holding == 1)

    def _run(self) -> None:
        self._responses.append(self._server.complete("Hi", stream=True))

    def finish(self) -> httpx.Response:
        self.thread.join()
        return self._responses[0]
