"""Trains the MTP head of the embedded model, which drafts for it, on a CPU.

    python -m tools.embedded_model.train_mtp_head --minutes 30 --docs python-docs-sources/ --out DIR

The head learns what the model would say (distillation): from its distributions over the corpus, and over what the model
itself goes on with. Like that of the model, its learning rate follows the clock, and the same command resumes it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tools.embedded_model.continuations import continued, program_pieces, prompts_of
from tools.embedded_model.corpus import build_corpus
from tools.embedded_model.mtp_head import MtpHead
from tools.embedded_model.optimizer import MasterWeights, Workers
from tools.embedded_model.tokens import encode, rows
from tools.embedded_model.train import keep_freed_memory

MODEL = Path(__file__).parents[2] / "engine" / "embedded_model"
LENGTH = 256
ROWS_PER_STEP = 8
NUM_PASSES = 3
STRIDE = 4  # positions of which one is learnt from in a step: the vocabulary costs more than the head
FITTED_ROWS = 400
OWN_SHARE = 0.75  # of the rows that the model wrote itself
CHECKPOINT_SECONDS = 120.0
WARM_UP, ANNEAL = 0.02, 0.6


def learning_rate_factor(done: float) -> float:
    """Returns the learning rate's factor at a fraction ``done`` of the time budget."""
    return max(0.0, min(1.0, (done + 1e-3) / WARM_UP, (1.0 - done) / ANNEAL))


def texts_of(args: argparse.Namespace) -> dict[str, Tensor]:
    """Returns rows of tokens [rows, LENGTH]: `corpus`, `own`, which the model went on with, and of what neither of them
    knows, `held_out`. They are made once."""
    path: Path = args.work / "texts.pt"
    if not path.exists():
        rng = random.Random(args.seed)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        corpus = build_corpus(args.docs, args.seed)
        train, validation = (
            [row[:LENGTH] for row in rows(encode(tokenizer, rng.sample(documents, len(documents))), LENGTH)]
            for documents in (corpus.train, corpus.validation)
        )
        programs, held_out_programs = program_pieces(tokenizer, argparse, args.continuations // 3, rng)
        prompts = prompts_of(train, args.continuations - len(programs), rng) + programs
        held_out = prompts_of(validation, len(held_out_programs), rng) + held_out_programs
        texts = continued(MODEL, rng.sample(prompts, len(prompts)) + held_out, LENGTH)
        own, unseen = texts[: len(prompts)], texts[len(prompts) :]
        made = {"corpus": torch.tensor(train), "own": torch.tensor(own), "held_out": torch.tensor(unseen)}
        torch.save(made, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
    return {name: ids.long() for name, ids in torch.load(path, weights_only=True).items()}


def batches(texts: dict[str, Tensor], rng: random.Random) -> Iterator[Tensor]:
    """Yields endless batches [ROWS_PER_STEP, LENGTH]; the rows of each kind come in another order every epoch."""
    kinds = [_endless(texts["own"], rng), _endless(texts["corpus"], rng)]
    num_own = round(OWN_SHARE * ROWS_PER_STEP)
    while True:
        yield torch.stack([next(kinds[index >= num_own]) for index in range(ROWS_PER_STEP)])


def _endless(texts: Tensor, rng: random.Random) -> Iterator[Tensor]:
    while True:
        yield from texts[torch.tensor(rng.sample(range(len(texts)), len(texts)))]


class Distillation:
    """The model as the head's teacher."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._decoder: Any = model.model
        self._vocabulary = model.lm_head.weight.detach()

    @torch.no_grad()
    def fit(self, head: MtpHead, texts: Tensor) -> None:
        """Gives the head its first projection: the one that comes next to what the model's last layer reads."""
        size = self._vocabulary.shape[1]
        squares, products = torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, size)
        for batch in torch.split(texts, ROWS_PER_STEP):
            output = self._decoder(batch, use_cache=False, output_hidden_states=True)
            joined = head.joined(self._decoder.embed_tokens(batch), output[0]).flatten(0, 1).float()
            squares += joined.T @ joined
            products += joined.T @ output.hidden_states[-2].flatten(0, 1).float()
        squares += 1e-3 * squares.diagonal().mean() * torch.eye(2 * size)
        head.fc.weight.copy_(torch.linalg.solve(squares, products).T)

    def passes(self, head: MtpHead, batch: Tensor, wanted: slice) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, pass by pass, log-probabilities [B, positions, vocab] of the model and of the head at the wanted
        positions."""
        with torch.no_grad():
            embeddings, hidden = self._decoder.embed_tokens(batch), self._decoder(batch, use_cache=False)[0]
            rotary = self._decoder.rotary_emb(hidden, torch.arange(batch.shape[1])[None])
            theirs = self._log_probabilities(hidden[:, wanted])
        for each in head(embeddings, hidden, rotary, NUM_PASSES):
            yield theirs, self._log_probabilities(each[:, wanted])

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        logits: Tensor = hidden @ self._vocabulary.T
        return logits.float().log_softmax(-1)

    def loss(self, head: MtpHead, batch: Tensor, start: int) -> Tensor:
        """Returns the mean cross-entropy of the head to the model over all passes, at one position of each STRIDE."""
        wanted = slice(NUM_PASSES + start, None, STRIDE)
        losses = [-(theirs.exp() * own).sum(-1).mean() for theirs, own in self.passes(head, batch, wanted)]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def agreement(self, head: MtpHead, texts: Tensor) -> dict[str, list[float]]:
        """Returns, pass by pass, how often both find the same token the likeliest, and how much of their distributions
        they share, over the second half of each text."""
        greedy, shared = torch.zeros(NUM_PASSES), torch.zeros(NUM_PASSES)
        for part in torch.split(texts, ROWS_PER_STEP):
            share = len(part) / len(texts)
            for n, (theirs, own) in enumerate(self.passes(head, part, slice(LENGTH // 2, None))):
                greedy[n] += (theirs.argmax(-1) == own.argmax(-1)).float().mean() * share
                shared[n] += torch.minimum(theirs, own).exp().sum(-1).mean() * share
        return {"greedy": [round(x, 4) for x in greedy.tolist()], "shared": [round(x, 4) for x in shared.tolist()]}


class Run:
    """One training run: its files under ``work``, the head under ``out``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        args.work.mkdir(parents=True, exist_ok=True)
        self._checkpoint: Path = args.work / "checkpoint.pt"
        self._texts = texts_of(args)
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
        self._teacher = Distillation(model)
        self._head = MtpHead(model)
        if not self._checkpoint.exists():
            self._teacher.fit(self._head, self._texts["own"][:FITTED_ROWS])
        self._weights = MasterWeights(self._head, args.learning_rate, Workers(1))
        self._elapsed_s, self._step, self._loss = 0.0, 0, float("nan")
        if self._checkpoint.exists():
            state = torch.load(self._checkpoint, weights_only=True)
            self._weights.load_state(state["weights"])
            self._elapsed_s, self._step = state["elapsed_s"], state["step"]
        else:
            print(self._teacher.agreement(self._head, self._texts["held_out"]), flush=True)

    def train(self) -> None:
        budget_s, saved_s = self._args.minutes * 60.0, self._elapsed_s
        stream = batches(self._texts, random.Random(f"{self._args.seed} {self._step}"))
        with tqdm(total=round(budget_s), initial=round(self._elapsed_s), unit="s", dynamic_ncols=True) as bar:
            while self._elapsed_s < budget_s:
                started_s = time.monotonic()
                self._learn(next(stream), learning_rate_factor(self._elapsed_s / budget_s))
                self._elapsed_s += time.monotonic() - started_s
                bar.set_postfix_str(f"step {self._step} loss {self._loss:.3f}", refresh=False)
                bar.update(round(self._elapsed_s) - bar.n)
                if self._elapsed_s - saved_s > CHECKPOINT_SECONDS:
                    saved_s = self._elapsed_s
                    self.save(bar)
            self.save(bar)

    def _learn(self, batch: Tensor, factor: float) -> None:
        loss = self._teacher.loss(self._head, batch, self._step % STRIDE)
        gradients = torch.autograd.grad(loss, list(self._head.parameters()))
        self._weights.step([each.float() for each in gradients], factor)
        self._loss = loss.item() if math.isnan(self._loss) else 0.98 * self._loss + 0.02 * loss.item()
        self._step += 1

    def save(self, bar: tqdm[Any]) -> None:
        """Saves a checkpoint to resume from, and the head; each file is replaced atomically."""
        figures = self._teacher.agreement(self._head, self._texts["held_out"])
        tokens = self._step * ROWS_PER_STEP * LENGTH
        facts = {"elapsed_s": round(self._elapsed_s), "step": self._step, "tokens": tokens, "loss": self._loss}
        bar.write(json.dumps(facts | figures))
        state = {"weights": self._weights.state(), "elapsed_s": self._elapsed_s, "step": self._step}
        torch.save(state, self._checkpoint.with_suffix(".new"))
        os.replace(self._checkpoint.with_suffix(".new"), self._checkpoint)
        self._args.out.mkdir(parents=True, exist_ok=True)
        tensors = {f"mtp.{name}": parameter.detach() for name, parameter in self._head.named_parameters()}
        save_file(tensors, self._args.out / "new.safetensors", metadata={"format": "pt"})
        os.replace(self._args.out / "new.safetensors", self._args.out / "mtp.safetensors")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="training time (default: 30)")
    parser.add_argument("--out", type=Path, required=True, help="folder for mtp.safetensors")
    parser.add_argument("--docs", type=Path, help="folder of Python's documentation sources, as for the model")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "twostep-mtp-head",
        help="folder for texts and the checkpoint (default %(default)s); delete it to start afresh",
    )
    parser.add_argument("--continuations", type=int, default=1500, help="texts that the model writes (default: 1500)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak, of both optimizers (default: 2e-3)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    Run(args).train()


if __name__ == "__main__":
    main()
