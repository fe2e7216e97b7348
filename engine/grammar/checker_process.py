"""`python -m engine.grammar.checker_process`: the child process of `GrammarChecker`, which tests each grammar.

It writes lines of JSON: null when ready, then for each grammar it reads (a JSON string) null or what is wrong with it.
Grammars come from clients, and some make the compiler run for minutes, take gigabytes or overflow the stack. In this
process that harms no other request.
"""

import json
import re
import resource
import sys
import threading
import time
from pathlib import Path

from llguidance import LLTokenizer

from engine.grammar.compiler import compile_grammar, make_tokenizer

MAX_MEMORY_BYTES = 128 << 20  # more than without a grammar: the engine keeps some of them
STACK_BYTES = 4 << 20  # less than the engine has, however much the main thread may have
NUM_TRIED_BYTES = 64  # generated on trial: some grammars compile, and reach the parser's limits soon after
MAX_TRIAL_S = 0.2  # of CPU time for all of them; in the engine, steps wait for this work

_EOS = 256
_EXCERPT = re.compile(r"^\s*\d+ \| ")  # the compiler's errors end with the line of the grammar that they are about
_POSITION = re.compile(r"^(?:at )?\d+\(\d+\): |failed to compile JSON schema: ")


def main() -> None:
    tokenizer = byte_tokenizer()
    limit = _data_bytes() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print("null", flush=True)
    for line in sys.stdin:
        print(json.dumps(find_fault(tokenizer, json.loads(line))), flush=True)


def _data_bytes() -> int:
    """Returns the bytes of the process's writable memory, without address space that allocators only reserve, whose
    amount varies."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def byte_tokenizer() -> LLTokenizer:
    """Returns a tokenizer with the smallest vocabulary that can write any text: 256 bytes and EOS."""
    return make_tokenizer([*(bytes([byte]) for byte in range(256)), b""], [_EOS])


def find_fault(tokenizer: LLTokenizer, grammar: str) -> str | None:
    """Compiles the grammar and generates a little text. Returns what is wrong with it, or None."""
    matcher = compile_grammar(tokenizer, grammar)
    started_s = time.process_time()
    for step in range(NUM_TRIED_BYTES):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return _describe(matcher.get_error())
        bytes_allowed = [byte for byte in range(256) if allowed >> byte & 1]
        if not bytes_allowed:
            return None if allowed >> _EOS & 1 else "no text satisfies it"
        matcher.consume_token(bytes_allowed[step * 31 % len(bytes_allowed)])
        if time.process_time() - started_s > MAX_TRIAL_S:
            return "it is too complex to be followed"
    return _describe(matcher.get_error()) if matcher.is_error() else None


def _describe(error: str) -> str:
    """Returns the compiler's error in one line, without the excerpt of the grammar."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    if "coerce_one_of" in error:  # an option that is not offered, since it would let a text match two members
        return "oneOf is supported only where no text can match two of its members"
    lines = []
    for line in error.splitlines():
        if _EXCERPT.match(line) or line.startswith("<non-verbose"):
            break
        lines.append(line.strip())
    text = _POSITION.sub("", _POSITION.sub("", " ".join(filter(None, lines))))
    return text[:300].rstrip(".")


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
