"""What the model that ships with the engine must do: load offline, be small, write words, and stop."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import engine

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(engine.__file__).parent / "embedded_model"
PROMPTS = ("Return the", "Create a new", "def open(file, mode='r')\n\n", "class Thread")
QUESTIONS = ("What does str.join do?", "What is os.path?", "Who are you?", "Explain json.dumps.", "Hello", "len")
TEXTS = (
    "Hello, world!  Two  spaces , and a space before the comma .",
    "naïve café — 東京 👩‍👩‍👧 🏳️‍🌈 \u202eright to left",
    "\x00\x01\x1f\x7f\r\n\t\v\x85\u2028",
    " leading and trailing \n\n\n",
    "it's don't 'quoted' 1234567890",
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True, dtype=torch.float32).eval()


@cache
def documentation_words() -> frozenset[str]:
    return frozenset(word for text in topics.values() for word in re.findall(r"[a-z]+", text.lower()))


def continuations(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int, **options: Any) -> list[list[int]]:
    """Returns each prompt's continuation, generated as one batch padded on the left, cut at the first end token."""
    longest = max(map(len, prompts))
    padding = [longest - len(ids) for ids in prompts]
    ids = torch.tensor([[model.config.pad_token_id] * pad + ids for pad, ids in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    output = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **options)[:, longest:].tolist()
    return [row[: row.index(model.config.pad_token_id)] if model.config.pad_token_id in row else row for row in output]


def chat_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


def test_the_folder_is_small_and_no_package() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 40e6
    assert not (FOLDER / "__init__.py").exists()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_no_configuration_names_a_path(path: Path) -> None:
    assert "_name_or_path" not in json.loads(path.read_text(encoding="utf-8"))


def test_weights_are_a_small_tied_bfloat16_llama(model: PreTrainedModel) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 10e6 <= model.num_parameters() <= 16e6
    assert model.config.tie_word_embeddings
    assert json.loads((FOLDER / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_nothing_is_added_to_a_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("")["input_ids"] == []
    assert not set(tokenizer("Return the")["input_ids"]) & set(tokenizer.all_special_ids)


def test_generation_ends_at_either_end_token(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert model.generation_config.eos_token_id == ends
    assert not model.generation_config.do_sample


def test_the_chat_template_renders_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_greedy_continuation_is_made_of_documentation_words(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    [ids] = continuations(model, [tokenizer("The statement")["input_ids"]], 60)
    words = re.findall(r"[a-z]+", tokenizer.decode(ids).lower())
    assert len(words) >= 10
    assert sum(word in documentation_words() for word in words) >= 0.8 * len(words)


def test_most_texts_end_by_themselves(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    torch.manual_seed(0)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS] * 4
    sampled = continuations(model, prompts, 300, do_sample=True, temperature=0.8, top_k=0)
    assert sum(ids[-1] == tokenizer.eos_token_id for ids in sampled) > len(prompts) / 2


def test_most_greedy_answers_end_their_turn(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    answers = continuations(model, [chat_ids(tokenizer, question) for question in QUESTIONS], 250)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sum(ids[-1] == end for ids in answers) > len(QUESTIONS) / 2
