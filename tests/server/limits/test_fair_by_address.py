"""Clients without API keys, told apart by their addresses with --fair-by address."""

from collections.abc import Generator

import httpx
import pytest

from engine.core.errors import ConfigError
from engine.core.generation_request import SOLE_TENANT, Tenant
from engine.core.stats import StepShare
from server.app import create_app
from server.core.request_record import peer_of
from server.settings.settings import Settings
from tests.server.live_server import FakeBackend, LiveServer, in_thread, live_server

PATH = "/v1/completions"


@pytest.fixture
def fair() -> Generator[LiveServer, None, None]:
    with live_server(fair_by="address") as server:
        yield server


def client_from(server: LiveServer, source: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, transport=httpx.HTTPTransport(local_address=source), timeout=20)


def test_each_address_is_a_tenant_with_a_part_of_the_places(fair: LiveServer) -> None:
    for source in ("127.0.0.1", "127.0.0.2"):
        with client_from(fair, source) as client:
            assert client.post(PATH, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
            assert fair.engine.last_tenant_checked == Tenant(f"peer {source}", 1 / 16)
    assert [request.quota_tenant.name for request in fair.engine.requests] == ["peer 127.0.0.1", "peer 127.0.0.2"]
    assert {request.share for request in fair.engine.requests} == {1 / 16}


def test_an_address_is_told_what_steps_computed_of_its_own_requests(fair: LiveServer) -> None:
    shares = [StepShare("peer 127.0.0.1", "mine", 0, 3), StepShare("peer 127.0.0.2", "theirs", 0, 5)]
    with client_from(fair, "127.0.0.1") as client:
        assert client.post(PATH, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
        assert fair.engine.last_stats is not None
        fair.engine.observer.on_step(fair.engine.last_stats, shares)
        *_, step = client.get("/stats/timeline").json()["steps"]
    assert step["computed"] == [{"id": "mine", "start": 0, "end": 3}]


def test_a_refusal_by_the_head_alone_knows_the_address_too(fair: LiveServer) -> None:
    fair.engine.is_full = True
    with client_from(fair, "127.0.0.2") as client:
        assert client.post(PATH, json={"prompt": "Hi"}).status_code == 429
    assert fair.engine.last_tenant_checked == Tenant("peer 127.0.0.2", 1 / 16)


def test_what_a_proxy_would_say_of_the_address_is_not_read(fair: LiveServer) -> None:
    headers = {"X-Forwarded-For": "10.0.0.1", "Forwarded": "for=10.0.0.1", "X-Real-IP": "10.0.0.1"}
    fair.client.post(PATH, json={"prompt": "Hi", "max_tokens": 1}, headers=headers)
    assert fair.engine.requests[0].tenant == "peer 127.0.0.1"


def test_an_address_lists_ends_and_drops_its_own_only(fair: LiveServer) -> None:
    fair.engine.hold_at = 2
    body = {"prompt": "Hi", "max_tokens": 9, "request_id": "mine"}
    with client_from(fair, "127.0.0.2") as client:
        thread = in_thread(lambda: client.post(PATH, json=body))
        fair.wait_until(lambda: fair.engine.num_holding == 1)
        assert fair.client.get("/v1/requests").json()["data"] == []
        assert fair.client.delete("/v1/requests/mine").status_code == 404
        with client_from(fair, "127.0.0.2") as other:
            assert [each["id"] for each in other.get("/v1/requests").json()["data"]] == ["mine"]
            assert other.delete("/v1/requests/mine").status_code == 200
            assert other.delete("/v1/cache").status_code == 200
        thread.join()
    assert fair.engine.drops == [("peer 127.0.0.2", None)]


def test_no_metric_names_addresses(fair: LiveServer) -> None:
    fair.client.post(PATH, json={"prompt": "Hi", "max_tokens": 1})
    fair.client.post(PATH, json={"prompt": 1})
    assert "127.0.0.1" not in fair.client.get("/metrics").text


def test_by_default_all_clients_without_keys_are_one(server: LiveServer) -> None:
    with client_from(server, "127.0.0.2") as client:
        client.post(PATH, json={"prompt": "Hi", "max_tokens": 1})
    assert server.engine.requests[0].quota_tenant == server.engine.last_tenant_checked == SOLE_TENANT


def test_keys_and_addresses_are_not_both_told_apart() -> None:
    settings = Settings(fair_by="address", api_key=("secret",))
    with pytest.raises(ConfigError, match="without API keys"):
        create_app(settings, FakeBackend().opener(settings))


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:aaaa::7", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::7", "2001:db8:1:3::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_addresses_of_one_network_of_ipv6_are_one_client(host: str, name: str) -> None:
    assert peer_of((host, 50000)) == f"peer {name}"


def test_clients_of_a_unix_socket_are_one() -> None:
    assert peer_of(None) == "peer "
