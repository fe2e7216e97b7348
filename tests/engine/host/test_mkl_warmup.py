"""Each of MKL's vector functions is called by one thread alone first, so that a process's first step computes the same
as all later ones; see `engine.host.mkl_warmup`."""

import re
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.host.mkl_warmup import VECTOR_FUNCTIONS
from tests.engine.tiny_models import load_tiny, make_checkpoint

MKL_TYPES = {torch.float32, torch.float64}


class FirstCalls(TorchDispatchMode):
    """Records how many elements the first call of each function has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in VECTOR_FUNCTIONS and args[0].dtype in MKL_TYPES:
            self.sizes.setdefault((name, args[0].dtype), args[0].numel())
        return func(*args, **(kwargs or {}))


def test_threads_share_no_function_before_it_is_warmed_up(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path)
    with FirstCalls() as calls:
        load_tiny(checkpoint)
    assert calls.sizes == {(name, dtype): 1 for name in VECTOR_FUNCTIONS for dtype in MKL_TYPES}


def test_all_functions_that_torch_gives_to_mkl_are_known() -> None:
    header = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
    given = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.MULTILINE)
    assert sorted(given) == sorted(VECTOR_FUNCTIONS)
