"""Random damage to the files of a checkpoint: values, names, bytes and templates that no model has."""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
TEMPLATE = "chat_template.jinja"
_VALUES: list[Any] = [
    *(None, True, False, "", "x", "a" * 10**5, "\ud800", [], {}, [1], [[]], {"x": 1}),
    *(-1, 0, 1, 2, 3, 7, 64, 1000, 10**5, 10**6, 2**31, 2**40, 2**63, 2**70, 10**400),
    *(0.5, 1.5, -1.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
]
_EXTRA: dict[str, Any] = {
    "rope_scaling": {"rope_type": "yarn", "factor": 0.0},
    "rope_parameters": {"rope_type": "dynamic", "factor": 1e308, "rope_theta": 10.0},
    "layer_types": ["sliding_attention"] * 3,
    "sliding_window": -1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]},
    "text_config": {},
    "num_experts": 10**6,
    "auto_map": {"AutoConfig": "x.Y"},
    "model_type": "mixtral",
    "architectures": ["MambaForCausalLM"],
    "added_tokens_decoder": {"1000000000000": {"content": "x"}},
    "chat_template": "{{ 'a' * 10**10 }}",
    "truncation": {"direction": "Right", "max_length": 2**63, "strategy": "LongestFirst", "stride": 2**63},
    "padding": {"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
    "normalizer": {"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": "a" * 1000},
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 500}, "behavior": "Isolated", "invert": False},
}
_PIECES = [
    *(
        "{{ 'a' * 10**10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ messages }}",
        "{{ messages[0].content }}",
        "{{ x.y.z }}",
        "text",
    ),
    *(
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if tools %}",
        "{% endif %}",
    ),
    *("{% set n = namespace(a='aa') %}", "{% for i in range(64) %}{% set n.a = n.a * 2 %}{% endfor %}", "{{ n.a }}"),
    *("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('no') }}", "{{ '%1000000000d' % 1 }}"),
    *(
        "fnAlpha keyOne vAluEone keyTwo vAluEtwo",
        "<think>",
        "{{ m.tool_calls }}",
        "{{ m | tojson }}",
        "{{ 'a' | center(10**9) }}",
    ),
    *("[" * 2000, "{{ " + "(" * 500, "<" * 1000, "{{ messages | tojson(indent=10**8) }}", "\0", "{{ '\\ud800' }}"),
]


def mutate(folder: Path, seed: int) -> str:
    """Damages one file of the folder, and returns which and how, in a few words."""
    chance = random.Random(seed)
    name = chance.choice([*CONFIGS, "config.json", TEMPLATE])
    path = folder / name
    if name == TEMPLATE:
        path.write_text("".join(chance.choices(_PIECES, k=chance.randint(1, 6))), errors="surrogatepass")
        return name
    if chance.random() < 0.15:
        path.write_bytes(_damaged(path.read_bytes(), chance))
        return f"{name}: bytes"
    content = json.loads(path.read_bytes())
    changes = [_change(content, chance) for _ in range(chance.randint(1, 3))]
    path.write_text(json.dumps(content))
    return f"{name}: {', '.join(changes)}"


def _damaged(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed[: chance.choice([len(changed), len(changed), chance.randrange(len(changed))])])


def _change(content: dict[str, Any], chance: random.Random) -> str:
    """Changes one value, somewhere in the content."""
    if chance.random() < 0.15:
        name = chance.choice(list(_EXTRA))
        content[name] = deepcopy(_EXTRA[name])
        return name
    inner: Any = content
    while True:
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not (isinstance(inner[key], dict | list) and inner[key] and chance.random() < 0.6):
            break
        inner = inner[key]
    if chance.random() < 0.15:
        del inner[key]
        return f"no {key}"
    inner[key] = deepcopy(chance.choice(_VALUES))
    return f"{key} = {str(inner[key])[:20]}"
