"""The tensor types of GGUF by number: their names, and how many numbers a block of how many bytes holds; torch-free."""

from dataclasses import dataclass

__all__ = ["BLOCK_TYPES", "NUMBER_OF", "OTHER_TYPES", "BlockType"]


@dataclass(frozen=True, slots=True)
class BlockType:
    """One tensor type. A row of a tensor is a sequence of blocks."""

    name: str
    num_numbers: int
    """Numbers in a block."""
    num_bytes: int
    """Bytes of a block."""


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
"""Number in the file -> type, of those that can be served."""

NUMBER_OF = {kind: number for number, kind in BLOCK_TYPES.items()}

OTHER_TYPES = {
    **{9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
"""Number -> name of types that are refused."""
