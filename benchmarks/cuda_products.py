"""`python -m benchmarks.cuda_products`: products with the weights of an 8 B model on this GPU, against torch's.

`speed` compares the product in Triton, torch's in fixed tiles of rows, and torch's own, which is not batch invariant.
`sweep` looks for the best tile of each weight and number of rows, and for the best number of segments along K. `bits`
checks that a row is the same in every batch and in every tile; it returns 1 where one is not.

Products run in a CUDA graph, each with another weight, as in a model: the L2 cache holds none of them.
"""

import argparse

import torch

from benchmarks.command import exit_with

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
"""N x K of Llama 3.1 8B."""
ROWS = (1, 8, 64, 128, 2048)


def main(arguments: list[str] | None = None) -> int:
    """Prints what the mode finds; returns 0, or 1 where bits differ. Does nothing where there is no GPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda_products", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("mode", nargs="?", choices=("speed", "sweep", "bits"), default="speed")
    parser.add_argument("--weights", nargs="+", choices=SHAPES, default=[*SHAPES], help="default: all")
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=[*ROWS], help="default: all")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 0
    from benchmarks import cuda_product_modes  # imports Triton, which CPU builds of torch do not bring

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    shapes = {name: SHAPES[name] for name in options.weights}
    return cuda_product_modes.MODES[options.mode](shapes, options.rows)


if __name__ == "__main__":
    exit_with(main)
