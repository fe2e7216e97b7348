import asyncio
import socket

import httpx
import pytest

from loadtest.discovery import find, first_model, http_client
from loadtest.errors import Unreachable, UsageError
from loadtest.target import Target, parse_target, resolve
from tests.loadtest.fake_server import FakeServer, running


@pytest.fixture
def closed_port_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("url", "base", "port", "path", "host_header"),
    [
        ("http://a:81", "http://a:81", 81, "", "a:81"),
        ("http://a/", "http://a", 80, "", "a"),
        ("http://a:81/v1/", "http://a:81", 81, "", "a:81"),
        ("https://a/x/v1", "https://a/x", 443, "/x", "a"),
        ("http://[::1]:81", "http://[::1]:81", 81, "", "[::1]:81"),
    ],
)
def test_a_url_may_name_the_server_or_its_v1(url: str, base: str, port: int, path: str, host_header: str) -> None:
    target = parse_target("A", url)
    assert (target.url, target.port, target.path, target.host_header) == (base, port, path, host_header)
    assert (target.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:80", "ftp://a", "http://", "http://a:x", "http://a?b=c", "http://u:p@a", "http://:p@a"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        parse_target("A", url)


def test_a_name_is_resolved_to_an_address_that_answers() -> None:
    with running(FakeServer()) as fake:
        named = parse_target("A", fake.url.replace("127.0.0.1", "localhost"))
        assert asyncio.run(resolve(named)).address == "127.0.0.1"


def test_a_closed_port_is_unreachable_in_one_sentence(closed_port_url: str) -> None:
    with pytest.raises(Unreachable, match=r"cannot connect to .*: connection refused\. Is the server running\?"):
        asyncio.run(find(parse_target("A", closed_port_url), {}, wait_s=0))


def test_waiting_ends_when_the_server_never_comes(closed_port_url: str) -> None:
    with pytest.raises(Unreachable, match=r"not ready after 0\.1 s: .*connection refused"):
        asyncio.run(find(parse_target("A", closed_port_url), {}, wait_s=0.1))


@pytest.mark.parametrize("probe", ["/ready", "/health"])
def test_a_loading_server_is_waited_for(probe: str) -> None:
    with running(FakeServer(probe=probe, num_not_ready=2)) as fake:
        asyncio.run(find(parse_target("A", fake.url), {}, wait_s=20))
        assert fake.num_not_ready < 0


def test_a_server_that_has_no_probe_is_ready_when_it_lists_its_models() -> None:
    with running(FakeServer(probe="/none")) as fake:
        assert asyncio.run(find(parse_target("A", fake.url), {}, wait_s=20)).address == "127.0.0.1"


def test_a_server_that_stays_loading_is_unreachable() -> None:
    with (
        running(FakeServer(num_not_ready=1000)) as fake,
        pytest.raises(Unreachable, match="/ready answers 503"),
    ):
        asyncio.run(find(parse_target("A", fake.url), {}, wait_s=0.1))


def test_a_server_that_does_not_answer_is_not_waited_for_any_longer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = parse_target("A", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(Unreachable, match=r"not ready after 0\.1 s: no answer"):
            asyncio.run(find(target, {}, wait_s=0.1))


def model_of(target: Target) -> str:
    async def ask() -> str:
        async with http_client(target, {}) as client:
            return await first_model(client)

    return asyncio.run(ask())


def test_the_model_is_the_first_that_is_listed() -> None:
    with running(FakeServer()) as fake:
        assert model_of(parse_target("A", fake.url)) == "fake"


def test_a_server_that_lists_no_model_is_an_error_that_says_so() -> None:
    with (
        running(FakeServer()) as fake,
        pytest.raises(Unreachable, match=r"GET http://.*/nowhere/v1/models answers 404"),
    ):
        model_of(parse_target("A", f"{fake.url}/nowhere"))


def test_a_server_that_wants_a_key_is_an_error_that_names_the_flag_and_the_variables_for_it() -> None:
    async def ask() -> None:
        refusal = httpx.MockTransport(lambda _: httpx.Response(401, json={"error": {"message": "no key"}}))
        async with httpx.AsyncClient(transport=refusal, base_url="http://a") as client:
            await first_model(client)

    with pytest.raises(Unreachable, match=r"401: no key \(--api-key KEY, or TWOSTEP_API_KEY or OPENAI_API_KEY in the"):
        asyncio.run(ask())
