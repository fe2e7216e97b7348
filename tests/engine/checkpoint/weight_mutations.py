"""Random damage to the headers of weight files: sizes, names, types and places of tensors that no file has."""

import json
import random
from pathlib import Path
from typing import Any

_WORDS = (0, 1, 2, 3, 7, 8, 9, 64, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "U8", "BOOL", "F4", "", "x" * 1000)
_GGUF_HEAD = 1500
"""Bytes behind the name of the last norm, in which its entry and those of a few more tensors lie."""


def mutate_safetensors(path: Path, seed: int) -> str:
    """Damages the header of a safetensors file, and returns how, in a few words."""
    chance = random.Random(seed)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        path.write_bytes(_damaged(data, end, chance))
        return "bytes"
    header = json.loads(data[8:end])
    changes = [_change(header, chance) for _ in range(chance.randint(1, 3))]
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[end:])
    return ", ".join(changes)


def mutate_gguf(path: Path, seed: int) -> str:
    """Damages the header of a GGUF file, and returns how, in a few words."""
    chance = random.Random(seed)
    data = path.read_bytes()
    path.write_bytes(_damaged(data, data.index(b"output_norm.weight") + _GGUF_HEAD, chance))
    return "bytes"


def _damaged(data: bytes, end: int, chance: random.Random) -> bytes:
    """Returns the file with other bytes, numbers or parts before the byte `end`, or cut."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(end)
        match chance.randrange(4):
            case 0:
                changed[at] = chance.randrange(256)
            case 1:
                changed[at : at + 8] = chance.choice(_WORDS).to_bytes(8, "little")
            case 2:
                changed[at : at + 4] = (chance.choice(_WORDS) % 2**32).to_bytes(4, "little")
            case _:
                other, length = chance.randrange(end), chance.choice((4, 8, 12, 40))
                changed[at : at + length] = changed[other : other + length]
    cuts = (len(changed), len(changed), len(changed), len(changed) - 1, chance.randrange(end))
    return bytes(changed[: chance.choice(cuts)])


def _change(header: dict[str, Any], chance: random.Random) -> str:
    """Changes what the header says of one tensor."""
    name = chance.choice([name for name, each in header.items() if isinstance(each, dict) and "shape" in each] or ["x"])
    tensor = header.setdefault(name, {"dtype": "F32", "shape": [], "data_offsets": [0, 4]})
    match chance.randrange(7):
        case 0:
            del header[name]
            return f"no {name}"
        case 1:
            header[chance.choice(("", "x", "lm_head.bias", "\ud800", name + ".weight", "a" * 10**5))] = tensor
            return f"another {name}"
        case 2:
            header[name] = chance.choice((None, [], {}, "x", 1, {"dtype": "F32"}))
            return f"{name} = {header[name]}"
        case 3:
            tensor["dtype"] = chance.choice(_DTYPES)
            return f"dtype of {name}"
        case 4:
            header["__metadata__"] = chance.choice((None, 1, {}, {"format": "x"}, {"format": 1}, {"a": "b" * 10**6}))
            return "metadata"
    key = chance.choice(("shape", "data_offsets"))
    places = tensor.setdefault(key, [])
    if chance.random() < 0.2:
        places.insert(0, chance.choice(_WORDS))
    if places:
        places[chance.randrange(len(places))] = chance.choice((*_WORDS, -1, 10**30, 0.5, None))
    return f"{key} of {name}"
