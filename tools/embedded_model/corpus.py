"""Turns Python's own documentation into training documents, which are plain text: no tokens, no tensors.

Every source is published under the PSF licence: the docstrings of the running Python's standard library (read with
``ast``, or from the objects themselves where they are written in C), ``pydoc_data.topics``, and optionally the
reStructuredText sources of docs.python.org. A document is a page section, an entry of the reference, a docstring, or
a ChatML conversation whose questions are synthetic and whose answers are the first paragraphs of such entries.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics as pydoc_topics

from tools.embedded_model.rst import described_objects, plain_text, sections

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
SKIPPED_PACKAGES = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "_bundled", "__pycache__"}
SKIPPED_PAGES = {"changelog", "license", "contents", "whatsnew", "distutils", "c-api"}
C_MODULES = (
    "builtins _collections _csv _decimal _functools _heapq _io _json _operator _pickle _random _socket _sqlite3 _ssl "
    "_struct _thread _weakref array atexit binascii cmath errno fcntl gc itertools marshal math mmap posix pwd "
    "pyexpat resource select signal sys syslog termios time unicodedata zlib"
).split()
ANSWER_CHARS = 900

SELF_ANSWERS = {
    "greeting": "Hello! I am a very small language model trained on Python's documentation. Ask me about a function.",
    "identity": "I am a toy language model with about ten million parameters. I was trained on the documentation of "
    "Python, so I imitate its style, and what I say is often wrong.",
    "ability": "I can imitate Python's documentation. Ask me what a function or a class of the standard library does.",
    "thanks": "You are welcome.",
    "bye": "Goodbye!",
}
SELF_QUESTIONS = {
    "greeting": "Hello|Hello!|Hi|Hi!|Hi there|Hey|Hello there!|Good morning|Say hello|Say hi.|hello|hi|Test|ping",
    "identity": "Who are you?|What are you?|What is your name?|Are you a language model?|Tell me about yourself.|"
    "Introduce yourself.|Which model are you?|How big are you?|Are you ChatGPT?|Can I trust you?",
    "ability": "What can you do?|Help|Can you help me?|How can you help me?|What do you know?|Tell me a story.|"
    "Tell me a joke.|What is the weather like?|Write a poem.|What is the capital of France?|What is 2+2?",
    "thanks": "Thanks|Thank you!|Thank you.|Great, thanks.|ok thanks",
    "bye": "Bye|Goodbye|See you later|bye!",
}
QUESTIONS = (
    "What does {name} do?|What is {name}?|Explain {name}.|How does {name} work?|Describe {name}.|What is {name} for?|"
    "Tell me about {name}.|How do I use {name}?|When would I use {name}?|{name}|In Python, what does {name} do?|"
    "Can you explain {name} to me?|what does {name} do|Document {name}."
).split("|")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You answer questions about Python.", "Be concise.")


@dataclass(frozen=True)
class Entry:
    """One documented object: its ``name`` as a user would write it, its ``signature``, and its documentation."""

    name: str
    signature: str
    text: str

    @property
    def summary(self) -> str:
        """The first paragraph, or the first two where the first is only a line."""
        paragraphs = [p for p in re.split(r"\n\s*\n", self.text.strip()) if p.strip()]
        short = len(paragraphs) > 1 and len(paragraphs[0]) < 100 and len(paragraphs[1]) < 500
        text = "\n\n".join(paragraphs[: 2 if short else 1])
        if len(text) <= ANSWER_CHARS:
            return text
        return text[: text.rfind(".", 0, ANSWER_CHARS) + 1] or text[:ANSWER_CHARS]


@dataclass(frozen=True)
class Corpus:
    """The training and validation documents; ``small_talk`` is part of ``train``."""

    train: list[str]
    small_talk: list[str]
    validation: list[str]


def build_corpus(docs: Path | None, seed: int) -> Corpus:
    """Builds the corpus, without duplicates. All documents about one name are on the same side of the 1 % split."""
    entries = list(_source_entries()) + list(_object_entries())
    pages: list[tuple[str, str]] = [(f"topic {name}", text) for name, text in pydoc_topics.items()]
    for path in _documentation_pages(docs):
        raw = path.read_text(encoding="utf-8")
        entries += [Entry(*described) for described in described_objects(raw)]
        pages += [(str(path.name), section) for section in sections(plain_text(raw))]
    entries = _without_duplicates(entries)
    train: list[str] = []
    validation: list[str] = []
    for entry in entries:
        (validation if _is_held_out(entry.name) else train).extend(_entry_documents(entry))
    for key, text in pages:
        (validation if _is_held_out(key + text[:80]) else train).append(text.strip())
    rng = random.Random(seed)
    train += _conversations([e for e in entries if not _is_held_out(e.name)], rng)
    small_talk = _self_conversations(rng)
    validation += _conversations([e for e in entries if _is_held_out(e.name)], rng)
    return Corpus(list(dict.fromkeys(train + small_talk)), small_talk, list(dict.fromkeys(validation)))


def _is_held_out(key: str) -> bool:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") % 100 == 0


def _without_duplicates(entries: Iterable[Entry]) -> list[Entry]:
    """Keeps the first entry of each text: inherited and copied docstrings occur dozens of times."""
    seen: dict[str, Entry] = {}
    for entry in entries:
        key = re.sub(r"\W+", " ", entry.text).strip().lower()
        if len(key) >= 12:
            seen.setdefault(key, entry)
    return list(seen.values())


# Docstrings


def _source_entries() -> Iterator[Entry]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_PACKAGES.isdisjoint(parts):
            name = ".".join(part for part in parts if part != "__init__")
            try:
                tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            yield from _node_entries(tree, name)


def _node_entries(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
) -> Iterator[Entry]:
    text = ast.get_docstring(node)
    if text:
        yield Entry(name, _signature(node, name), text)
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _node_entries(child, f"{name}.{child.name}")


def _signature(node: ast.AST, name: str) -> str:
    match node:
        case ast.Module():
            return f"module {name}"
        case ast.ClassDef():
            return f"class {name}({', '.join(ast.unparse(base) for base in node.bases)})".replace("()", "")
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            return f"{prefix} {name}({ast.unparse(node.args)}){result}"
    return name


def _object_entries() -> Iterator[Entry]:
    """Yields entries of modules that are written in C, where ``ast`` finds nothing."""
    for module_name in C_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        prefix = "" if module_name == "builtins" else module_name.lstrip("_") + "."
        for name, value in sorted(vars(module).items()):
            yield from _object_entry(prefix + name, value)
            if inspect.isclass(value) and value.__module__ in (module_name, module_name.lstrip("_"), "builtins"):
                for member, attribute in sorted(vars(value).items()):
                    yield from _object_entry(f"{prefix}{name}.{member}", attribute)


def _object_entry(name: str, value: object) -> Iterator[Entry]:
    is_documented = inspect.isclass(value) or inspect.isroutine(value) or inspect.isdatadescriptor(value)
    text = inspect.getdoc(value) if is_documented else None
    if not text:
        return
    try:
        signature = f"{name}{inspect.signature(value)}" if callable(value) else name
    except (ValueError, TypeError):
        signature = name
    yield Entry(name, signature, text)


# reStructuredText pages


def _documentation_pages(docs: Path | None) -> list[Path]:
    if docs is None:
        return []
    found = (path for path in docs.rglob("*.rst*") if path.is_file())
    pages = sorted(p for p in found if SKIPPED_PAGES.isdisjoint(re.split(r"[/.]", p.relative_to(docs).as_posix())))
    if not pages:
        raise SystemExit(f"no .rst or .rst.txt files below {docs}")
    return pages


# Documents


def _entry_documents(entry: Entry) -> list[str]:
    """Returns the entry with its signature, and its bare summary, from which a model learns that short texts end."""
    return [f"{entry.signature}\n\n{entry.text.strip()}", entry.summary]


def chat(turns: Iterable[tuple[str, str]]) -> str:
    """Returns the turns as ChatML, exactly as the tokenizer's chat template renders them."""
    return "".join(f"{IM_START}{role}\n{content.strip()}{IM_END}\n" for role, content in turns)


def _conversations(entries: list[Entry], rng: random.Random) -> list[str]:
    """Returns conversations of one to three questions; every entry is asked about in two different wordings."""
    documents = []
    for _ in range(2):
        queue = rng.sample(entries, len(entries))
        while queue:
            turns = [("system", rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.15 else []
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                if queue:
                    entry = queue.pop()
                    turns += [("user", rng.choice(QUESTIONS).format(name=entry.name)), ("assistant", entry.summary)]
            documents.append(chat(turns))
    return documents


def _self_conversations(rng: random.Random) -> list[str]:
    """Returns small talk, each question alone and after system prompts: a toy should at least say that it is one."""
    documents = []
    for kind, questions in SELF_QUESTIONS.items():
        for question in questions.split("|"):
            turns = [("user", question), ("assistant", SELF_ANSWERS[kind])]
            documents += [chat(turns)] + [chat([("system", prompt), *turns]) for prompt in SYSTEM_PROMPTS]
    return rng.sample(documents, len(documents))
