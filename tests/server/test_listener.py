"""Where the server listens: a Unix socket, and HTTPS. The real program over an engine without a model."""

import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.core.errors import ConfigError
from server.banner import loading_banner, ready_banner
from server.listener import check_certificate, listen_on_file
from server.settings.settings import Settings
from tests.server.fake_engine import INFO

PROGRAM = Path(__file__).parent / "fake_program.py"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@contextmanager
def program(**settings: str) -> Generator[str, None, None]:
    """Runs the program with these settings, and returns what it said when it was ready."""
    environment = {**os.environ, **{f"TWOSTEP_{name.upper()}": value for name, value in settings.items()}}
    pipe = subprocess.PIPE
    command = [sys.executable, str(PROGRAM), "ready"]
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line for line in process.stdout if "listens" in line)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert (process.returncode, "Traceback" in errors) == (0, False), errors
        finally:
            process.kill()


def make_certificate(folder: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_a_unix_socket_is_answered_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    with program(uds=str(path)) as listens:
        assert str(path) in listens
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
            assert answer.json()["usage"]["completion_tokens"] == 3
            assert client.post("/v1/completions", json={"prompt": 3}).status_code == 400  # at the pace of one address
    assert not path.exists()


def test_what_an_ended_server_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    listen_on_file(path).close()
    listener = listen_on_file(path)  # nobody answers on the first one
    try:
        with pytest.raises(ConfigError, match=f"--uds: cannot listen on {path}: Address already in use"):
            listen_on_file(path)
    finally:
        listener.close()
        path.unlink()
    path.write_text("a file of somebody")
    with pytest.raises(ConfigError, match="Address already in use"):
        listen_on_file(path)
    assert path.read_text() == "a file of somebody"
    with pytest.raises(ConfigError, match="--uds: cannot listen on "):
        listen_on_file(tmp_path / ("long" * 40))


def test_banners_tell_how_to_ask_over_a_unix_socket() -> None:
    settings = Settings(uds=Path("/run/it is.sock"))
    assert "without a key" not in loading_banner(settings, "http://localhost", None)
    assert "curl -N --unix-socket '/run/it is.sock' http://localhost/v1/" in ready_banner(
        settings, INFO, "http://localhost"
    )


@needs_openssl
def test_https_is_served_with_refusals_and_streams(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    files = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    with program(**files) as listens, httpx.Client(verify=trusted) as client:
        url = listens.split()[1]
        assert url.startswith("https://127.0.0.1:") and client.get(f"{url}/health").status_code == 200
        body = {"prompt": "Hi", "max_tokens": 3, "stream": True}
        assert client.post(f"{url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with trusted.wrap_socket(socket.create_connection(address), server_hostname="127.0.0.1") as raw:
            raw.settimeout(20)
            raw.sendall(b"nonsense\r\n\r\n")
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")


@needs_openssl
def test_certificates_that_cannot_be_served_are_refused_by_name(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    check_certificate(certificate, key)
    check_certificate(None, None)
    for chain, own, words in (
        (None, key, "--ssl-keyfile needs --ssl-certfile"),
        (certificate, None, "cannot be used"),
        (certificate, tmp_path / "missing", "missing cannot be read: No such file"),
        (key, key, "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_certificate(chain, own)
    command = ["openssl", "rsa", "-in", "key.pem", "-aes256", "-passout", "pass:x1234", "-out", "locked.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="the key has a password"):
        check_certificate(certificate, tmp_path / "locked.pem")
