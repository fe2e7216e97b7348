"""pip gets the index of PyTorch's CPU wheels where they are wanted and to be had, and nothing elsewhere."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tools.torch_index import torch_index

pytestmark = pytest.mark.skipif("platform.machine() != 'x86_64'", reason="other machines' torch has no CUDA")


class _Index(BaseHTTPRequestHandler):
    """An index with torch, and without anything else."""

    def do_HEAD(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/whl"
        server.shutdown()


def test_without_a_driver_the_index_is_used(address: str, tmp_path: Path) -> None:
    assert torch_index({}, tmp_path / "nvidiactl", f"{address}/cpu") == f"{address}/cpu"


def test_with_a_driver_pip_takes_the_default_build(address: str, tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert torch_index({}, tmp_path / "nvidiactl", f"{address}/cpu") is None


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"])
def test_indexes_that_the_user_chose_are_left_alone(name: str, address: str, tmp_path: Path) -> None:
    assert torch_index({name: "1"}, tmp_path / "nvidiactl", f"{address}/cpu") is None


def test_an_index_that_does_not_answer_is_not_used(address: str, tmp_path: Path) -> None:
    assert torch_index({}, tmp_path / "nvidiactl", f"{address}/rocm") is None
    assert torch_index({}, tmp_path / "nvidiactl", "http://127.0.0.1:1/whl/cpu") is None
