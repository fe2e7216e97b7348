"""Turns documents into batches of token ids: trains the tokenizer, and packs documents into rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tools.embedded_model.corpus import IM_END, IM_START

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
VOCAB_SIZE = 6144
MAX_CONTEXT = 2048
SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Trains a byte-level BPE over all 256 bytes: every text round-trips, nothing is unknown, and nothing is added."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (END_OF_TEXT, IM_START, IM_END, PAD)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(documents, trainer)
    return bpe


def wrap_tokenizer(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """Returns the tokenizer as transformers saves and loads it, with the chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[IM_START, IM_END],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    """Returns the token ids of each document, ended by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    return [[*ids, end] for ids in tokenizer(documents)["input_ids"]]


def rows(documents: list[list[int]], length: int) -> Iterator[list[int]]:
    """Packs documents into rows of ``length + 1`` tokens.

    A row starts where a document starts, as a prompt does: a document cut by a row's end is repeated in the next row,
    unless it is longer than a row; then it is continued.
    """
    row: list[int] = []
    for document in documents:
        rest = document
        while len(row) + len(rest) > length:
            taken = length + 1 - len(row)
            yield row + rest[:taken]
            if len(rest) == taken:
                rest = []
            elif row:
                rest = document
            else:
                rest = rest[taken - 1 :]  # the last target is the next row's first input
            row = []
        row = row + rest


def batches(documents: list[list[int]], length: int, num_tokens: int, rng: random.Random) -> Iterator[Tensor]:
    """Yields endless int64 batches [num_tokens / length, length + 1], reshuffled every epoch."""
    held: list[list[int]] = []
    while True:
        for row in rows(rng.sample(documents, len(documents)), length):
            held.append(row)
            if len(held) * length == num_tokens:
                yield torch.tensor(held)
                held = []
