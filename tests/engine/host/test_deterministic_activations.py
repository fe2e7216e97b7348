"""Batch-invariant activations; each test runs in a process of its own, since they replace torch's for good."""

import subprocess
import sys
import textwrap

PRELUDE = """
import functools
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from engine.host.deterministic_activations import replace_activations
from engine.host.mkl_warmup import warm_up_vector_functions

warm_up_vector_functions()
torch.manual_seed(1)
ACTIVATIONS = [
    torch.sigmoid,
    F.silu,
    F.gelu,
    functools.partial(F.gelu, approximate="tanh"),
    lambda x: F.silu(x.clone(), inplace=True),
    lambda x: x.clone().sigmoid_(),
    lambda x: torch.ops.aten.gelu_(x.clone()),
]
INPUTS = [(torch.randn(40, 500) * 5).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
"""


def run(program: str) -> None:
    code = PRELUDE + textwrap.dedent(program)
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_replaced_activations_compute_what_torchs_do() -> None:
    run("""
        expected = [[activation(x) for activation in ACTIVATIONS] for x in INPUTS]
        replace_activations()
        for x, values in zip(INPUTS, expected):
            for activation, value in zip(ACTIVATIONS, values):
                assert_close(activation(x), value)
        extremes = torch.tensor([-1e4, -100.0, 0.0, 1e4])
        assert torch.sigmoid(extremes).tolist() == [0.0, 0.0, 0.5, 1.0]
        assert F.silu(extremes)[[0, 2, 3]].tolist() == [0.0, 0.0, 1e4]
    """)


def test_replaced_activations_of_a_row_do_not_depend_on_the_rows_around_it() -> None:
    run("""
        replace_activations()
        replace_activations()  # a second time changes nothing
        with torch.inference_mode():
            for x in INPUTS:
                for activation in ACTIVATIONS:
                    whole = activation(x)
                    for num_threads in (1, 2, 3, 4):
                        torch.set_num_threads(num_threads)
                        for rows in (1, 2, 3, 7, 33):
                            assert torch.equal(activation(x[5 : 5 + rows]), whole[5 : 5 + rows])
    """)


def test_softplus_is_torchs_and_does_not_depend_on_the_rows_around_it() -> None:
    run("""
        INPUTS.append(torch.linspace(-60, 60, 40 * 500).view(40, 500))
        settings = [{}, {"beta": 0.5, "threshold": 3.0}]
        expected = [[F.softplus(x.double(), **each).to(x.dtype) for x in INPUTS] for each in settings]
        replace_activations()
        with torch.inference_mode():
            for each, values in zip(settings, expected):
                for x, value in zip(INPUTS, values):
                    whole = F.softplus(x, **each)
                    assert_close(whole, value)
                    assert whole.dtype == x.dtype and (whole > 0).all()
                    for num_threads in (1, 2, 3):
                        torch.set_num_threads(num_threads)
                        for rows in (1, 2, 3, 7, 33):
                            assert torch.equal(F.softplus(x[5 : 5 + rows], **each), whole[5 : 5 + rows])
                            assert torch.equal(F.softplus(x[5 : 5 + rows].t(), **each).t(), whole[5 : 5 + rows])
    """)
