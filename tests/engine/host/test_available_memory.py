"""How much memory is available for the KV cache."""

from pathlib import Path

import pytest
import torch

from engine.host.available_memory import available_bytes

CPU = torch.device("cpu")
FILES = {
    "memory.max": "1000000\n",
    "memory.current": "900000\n",
    "memory.stat": "anon 1\nfile 800000\ninactive_file 0\n",
}


@pytest.mark.parametrize(
    ("changed", "available"),
    [
        ({}, 100_000),
        ({"memory.stat": "anon 1\nfile 800000\ninactive_file 700000\nactive_file 100000\n"}, 900_000),
        ({"memory.stat": "inactive_file 900001\n"}, 1_000_000),
        ({"memory.stat": ""}, 100_000),
        ({"memory.current": "1000001\n"}, 0),
    ],
)
def test_a_container_has_its_limit_without_what_is_in_use(
    changed: dict[str, str], available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (FILES | changed).items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("engine.host.system_memory._CGROUP", tmp_path)
    assert available_bytes(CPU) == available


def test_without_a_limit_a_container_has_what_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.host.system_memory._CGROUP", tmp_path)
    assert available_bytes(CPU) > 1 << 20
    for name, text in (FILES | {"memory.max": "max\n"}).items():
        (tmp_path / name).write_text(text)
    assert available_bytes(CPU) > 1 << 20
