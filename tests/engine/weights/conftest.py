import pytest

from engine.weights.affine_quantization import BITS


@pytest.fixture(params=BITS.values(), ids=BITS)
def bits(request: pytest.FixtureRequest) -> int:
    """Bits of a quantized weight."""
    return int(request.param)
