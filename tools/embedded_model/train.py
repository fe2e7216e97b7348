"""Trains the embedded model: tokenizer, weights and configuration, from Python's own documentation, on a CPU.

    python -m tools.embedded_model.train --minutes 60 --out DIR --docs python-docs-sources/

The learning rate follows the clock, not a step count: it warms up, holds, and is annealed to zero when --minutes are
over, so every budget ends in a finished model. After an interrupt, the same command with the same --work resumes it.
Weights are bf16 (what the CPU's matrix units multiply), with float32 master copies that the optimizers update.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.embedded_model.corpus import IM_END, Corpus, build_corpus
from tools.embedded_model.optimizer import MasterWeights, Workers
from tools.embedded_model.tokens import MAX_CONTEXT, batches, encode, train_tokenizer, wrap_tokenizer

TOKENS_PER_STEP = 4096
VALIDATION_TOKENS = 32_768
CHECKPOINT_SECONDS = 300.0
FINISH = 0.93  # fraction of the time budget: after it come short documents only, which teach to stop
WARM_UP, ANNEAL = 0.02, 0.55  # fractions of the time before FINISH in which the learning rate rises and falls
FINISH_RATE = 0.3  # fraction of the peak learning rate with which the finish starts
SHORT_TOKENS, SMALL_TALK_WEIGHT = 96, 40


@dataclass
class Progress:
    """The state of training that a resumed run continues from; ``elapsed_s`` is training time over all runs."""

    elapsed_s: float = 0.0
    step: int = 0
    tokens: int = 0
    train_loss: float = float("nan")
    validation_loss: float = float("nan")


def learning_rate_factor(done: float) -> float:
    """Returns the learning rate's factor at a fraction ``done`` of the time budget.

    It warms up, stays constant, and falls linearly to zero; for the finish it falls from a lower start once more.
    """
    if done >= FINISH:
        return max(0.0, FINISH_RATE * (1.0 - done) / (1.0 - FINISH))
    main = done / FINISH
    return min(1.0, (main + 1e-3) / WARM_UP, (1.0 - main) / ANNEAL)


def context_length(done: float) -> int:
    """Returns the length of rows: short first (cheap attention), then long, so that all positions are trained.

    The finish is short again.
    """
    main = done / FINISH
    return 256 if main < 0.72 or done >= FINISH else 1024 if main < 0.9 else MAX_CONTEXT


# Model


def new_model(vocab_size: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Returns a bf16 model whose residual projections start small, so that depth does not blow up the first steps."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.02 / (2 * config.num_hidden_layers) ** 0.5)
    end = tokenizer.convert_tokens_to_ids(IM_END)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=[tokenizer.eos_token_id, end], pad_token_id=tokenizer.pad_token_id
    )
    return model.to(torch.bfloat16)


def loss_of(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Returns the mean cross-entropy in float32; batch is [rows, length + 1], the last column only a target."""
    hidden = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).flatten(0, 1)  # [rows * length, vocab]
    return F.cross_entropy(logits.float(), batch[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, documents: list[list[int]]) -> float:
    stream = batches(documents, 512, TOKENS_PER_STEP, random.Random(0))
    losses = [loss_of(model, next(stream)).item() for _ in range(VALIDATION_TOKENS // TOKENS_PER_STEP)]
    return sum(losses) / len(losses)


# The run


class Run:
    """One training run: its files under ``work``, its exports under ``out``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._out: Path = args.out
        self._checkpoint: Path = args.work / "checkpoint.pt"
        self._budget_s: float = args.minutes * 60.0
        self._seed: int = args.seed
        args.work.mkdir(parents=True, exist_ok=True)
        corpus = build_corpus(args.docs, args.seed)
        self._tokenizer = _tokenizer(args.work / "tokenizer.json", corpus)
        self._train = encode(self._tokenizer, corpus.train)
        short = [ids for ids in self._train if len(ids) <= SHORT_TOKENS]
        self._finish = short + SMALL_TALK_WEIGHT * encode(self._tokenizer, corpus.small_talk)
        self._validation = encode(self._tokenizer, corpus.validation)
        torch.manual_seed(args.seed)
        self._model = new_model(len(self._tokenizer), self._tokenizer)
        self._workers = Workers(args.threads)
        self._loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
        self._warm_shape: torch.Size | None = None
        self._weights = MasterWeights(self._model, args.learning_rate, self._workers)
        self.progress = self._resumed()

    def describe(self) -> str:
        tokens = sum(map(len, self._train))
        return (
            f"{len(self._train):,} documents, {tokens:,} tokens ({sum(map(len, self._validation)):,} held out); "
            f"{self._model.num_parameters():,} parameters; resuming at step {self.progress.step}"
        )

    def train(self) -> None:
        progress, length = self.progress, 0
        saved_s = progress.elapsed_s
        bar = tqdm(total=round(self._budget_s), initial=round(progress.elapsed_s), unit="s", dynamic_ncols=True)
        while progress.elapsed_s < self._budget_s:
            started_s = time.monotonic()
            done = progress.elapsed_s / self._budget_s
            if context_length(done) != length:
                length = context_length(done)
                documents = self._train if done < FINISH else self._finish
                rng = random.Random(f"{self._seed} {length} {progress.step}")
                stream = batches(documents, length, TOKENS_PER_STEP, rng)
            self._step(next(stream), learning_rate_factor(done))
            progress.elapsed_s += time.monotonic() - started_s
            bar.set_postfix_str(f"step {progress.step} loss {progress.train_loss:.3f} rows of {length}", refresh=False)
            bar.update(round(progress.elapsed_s) - bar.n)
            if progress.elapsed_s - saved_s > CHECKPOINT_SECONDS:
                saved_s = progress.elapsed_s
                self.save(bar)
        self.save(bar)
        bar.close()

    def _step(self, batch: Tensor, factor: float) -> None:
        parts = batch.chunk(self._workers.size)
        if parts[0].shape != self._warm_shape:  # the first call compiles: alone, as the compiler is not reentrant
            self._warm_shape = parts[0].shape
            self._gradients(parts[0])
        losses, gradients = zip(*self._workers.map(self._gradients, parts), strict=True)
        shares = [len(part) / len(batch) for part in parts]
        value = sum(loss * share for loss, share in zip(losses, shares, strict=True))
        total = [sum(g * share for g, share in zip(each, shares, strict=True)) for each in zip(*gradients, strict=True)]
        self._weights.step(total, factor)
        progress = self.progress
        progress.train_loss = value if progress.step == 0 else 0.98 * progress.train_loss + 0.02 * value
        progress.step += 1
        progress.tokens += TOKENS_PER_STEP

    def _gradients(self, rows: Tensor) -> tuple[float, list[Tensor]]:
        """Returns the loss and float32 gradients, in the order of the model's parameters."""
        loss = self._loss(self._model, rows)
        return loss.item(), [g.float() for g in torch.autograd.grad(loss, list(self._model.parameters()))]

    def save(self, bar: tqdm[Any]) -> None:
        """Saves a checkpoint to resume from, and an export that loads; each file is replaced atomically."""
        self.progress.validation_loss = validation_loss(self._model, self._validation)
        speed = self.progress.tokens / self.progress.elapsed_s
        bar.write(json.dumps({**asdict(self.progress), "tokens_per_s": round(speed)}))
        state = {"progress": asdict(self.progress), "weights": self._weights.state()}
        torch.save(state, self._checkpoint.with_suffix(".new"))
        os.replace(self._checkpoint.with_suffix(".new"), self._checkpoint)
        self._out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._out.parent) as folder:
            self._tokenizer.save_pretrained(folder)
            self._model.save_pretrained(folder)
            for file in Path(folder).iterdir():
                file.chmod(0o644)
                os.replace(file, self._out / file.name)

    def _resumed(self) -> Progress:
        if not self._checkpoint.exists():
            return Progress()
        state = torch.load(self._checkpoint, weights_only=True)
        self._weights.load_state(state["weights"])
        return Progress(**state["progress"])


def _tokenizer(file: Path, corpus: Corpus) -> PreTrainedTokenizerFast:
    """Returns the run's tokenizer, trained only once: the embedding's rows belong to its merges when a run resumes."""
    if not file.exists():
        train_tokenizer(corpus.train).save(str(file))
    return wrap_tokenizer(Tokenizer.from_file(str(file)))


def keep_freed_memory() -> None:
    """Makes glibc reuse the activations' memory instead of returning it to the kernel: 1.3 to 2 times faster here."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8  # M_* of malloc.h
        for option, value in ((arena_max, 1), (mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**28)):
            mallopt(option, value)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="training time; the schedule fits itself to it (default 60)"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, loadable by from_pretrained")
    parser.add_argument(
        "--docs",
        type=Path,
        help="folder of Python's documentation sources: Doc/ of the CPython repository, or "
        "html/_sources of Debian's python3.11-doc. Without it the docstrings alone are used, a third of the text",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "twostep-embedded-model",
        help="folder for the checkpoint and the tokenizer (default %(default)s); delete it to start afresh",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=3e-3, help="peak, of both optimizers (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads (default: all)")
    parser.add_argument(
        "--compile", action="store_true", help="fuse operators: a fifth less work, needs a C++ compiler"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)  # see Workers
    run = Run(args)
    print(run.describe())
    run.train()


if __name__ == "__main__":
    main()
