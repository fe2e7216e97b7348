"""The tokenizer that a GGUF file describes, as the content of tokenizer.json and tokenizer_config.json; torch-free."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.checkpoint.gguf.header import GgufFile
from engine.core.errors import ModelError, UnsupportedModelError

__all__ = ["eos_token_ids_of", "tokenizer_config_of", "tokenizer_of"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_MAX_TOKEN_LENGTH = 1024
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_THREE_DIGITS = rf"{_WORDS}\p{{N}}{{1,3}}{_REST}"
_ONE_DIGIT = rf"{_WORDS}\p{{N}}{_REST}"
_TEKKEN = _CASED.replace("%s", "") + r"\p{N}" + _CASED_REST
_O200K = _CASED.replace("%s", _ENDINGS) + r"\p{N}{1,3}" + _CASED_REST

_PATTERNS: Mapping[str, str | None] = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral-llama"), _THREE_DIGITS
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _ONE_DIGIT),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _O200K),
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "phi-2", "mpt", "jina-en"), None),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), None),
}
"""tokenizer.ggml.pre -> the pattern that cuts text into words; None for that of GPT-2."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Kinds that cut off each digit before."""
_IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral-llama", "tekken")
"""Kinds that take a word which is a token as it is."""
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral-llama", "tekken")
"""Kinds that begin texts with BOS where the file does not say."""
_END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("<|eom_id|>", "<|END_OF_TURN_TOKEN|>", "</s>"),
)
"""Texts of control tokens that end a text, whether or not the metadata names them, as llama.cpp has them."""


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """Returns the content of tokenizer.json. Raises ModelError, or UnsupportedModelError for kinds not known."""
    kind = file.metadata.get("tokenizer.ggml.model")
    vocabulary = _Vocabulary(file)
    if kind == "gpt2":
        return _byte_level(vocabulary)
    if kind == "llama":
        return _sentencepiece(vocabulary)
    raise UnsupportedModelError(f"{file.path}: tokenizers of the kind {kind!r:.64} cannot be served from a GGUF file.")


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json: the named special tokens and the chat templates."""
    tokens = _Vocabulary(file).tokens
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = _token_id(file, f"tokenizer.ggml.{key}_token_id", len(tokens))
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    templates = [{"name": name, "template": text} for name, text in _templates(file).items()]
    return {**config, "chat_template": templates} if templates else config


def eos_token_ids_of(file: GgufFile) -> list[int]:
    """Returns the tokens that end a text."""
    vocabulary = _Vocabulary(file)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [_token_id(file, f"tokenizer.ggml.{key}", len(vocabulary.tokens)) for key in keys]
    ends = [index for index in vocabulary.of_type(_CONTROL) if vocabulary.tokens[index] in _END_OF_TURN]
    return [*dict.fromkeys(each for each in (*named, *ends) if each is not None)]


def _templates(file: GgufFile) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    return {
        name.removeprefix(".") or "default": value
        for name, value in found.items()
        if isinstance(value, str) and (not name or name.startswith("."))
    }


def _token_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    value = file.metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
        raise ModelError(f"{file.path}: {key} is {str(value)[:64]}, which is no token of the vocabulary.")
    return value


class _Vocabulary:
    """The tokens of a file: texts, kinds and flags. Raises ModelError for what cannot be one."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens: Sequence[str] = self._texts("tokenizer.ggml.tokens")
        if not self.tokens:
            raise ModelError(f"{file.path} has no tokenizer: it has no tokenizer.ggml.tokens.")
        if max(map(len, self.tokens)) > _MAX_TOKEN_LENGTH:
            raise ModelError(f"{file.path}: a token of its vocabulary has more than {_MAX_TOKEN_LENGTH} characters.")
        if len({*self.tokens}) != len(self.tokens):
            raise ModelError(f"{file.path}: two tokens of its vocabulary are the same.")
        types = file.metadata.get("tokenizer.ggml.token_type")
        self._types = np.full(len(self.tokens), _NORMAL) if types is None else self._array(types, "token_type")

    def _array(self, value: Any, name: str) -> Any:
        if not isinstance(value, np.ndarray) or len(value) != len(self.tokens):
            raise ModelError(f"{self.file.path}: tokenizer.ggml.{name} has not one number for each token.")
        return value

    def _texts(self, key: str) -> list[str]:
        value = self.file.metadata.get(key, [])
        if not isinstance(value, list):
            raise ModelError(f"{self.file.path}: {key} is no list of texts.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.file.path}: tokenizer.ggml.{key} is neither true nor false.")
        return value

    def of_type(self, *kinds: int) -> list[int]:
        return [int(index) for index in np.flatnonzero(np.isin(self._types, kinds))]

    @property
    def merges(self) -> list[list[str]]:
        pairs = [text.split(" ") for text in self._texts("tokenizer.ggml.merges")]
        known = {*self.tokens}
        for pair in pairs:
            if len(pair) != 2 or not known.issuperset((*pair, "".join(pair))):
                raise ModelError(f"{self.file.path}: the merge {' '.join(pair)[:64]!r} is not one of two tokens.")
        return pairs

    @property
    def scores(self) -> Any:
        scores = self.file.metadata.get("tokenizer.ggml.scores")
        if scores is None:
            raise ModelError(f"{self.file.path}: its vocabulary has no scores, without which texts cannot be cut.")
        return self._array(scores, "scores")

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is cut into others."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        special = {*self.of_type(_UNKNOWN, _CONTROL)}
        found = sorted((*special, *self.of_type(_USER_DEFINED)))
        return [{"id": each, "content": self.tokens[each], **flags, "special": each in special} for each in found]

    def post_processor(self, adds_bos: bool, inner: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns what adds BOS and EOS tokens to a text, after `inner`."""
        before = self._marks("bos", self.flag("add_bos_token", adds_bos))
        after = self._marks("eos", self.flag("add_eos_token", False))
        if not before and not after:
            return inner
        text = {"Sequence": {"id": "A", "type_id": 0}}
        single = [*before, text, *after]
        tokens = {each["SpecialToken"]["id"] for each in (*before, *after)}
        template = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *before, {"Sequence": {"id": "B", "type_id": 0}}, *after],
            "special_tokens": {
                token: {"id": token, "ids": [self.tokens.index(token)], "tokens": [token]} for token in sorted(tokens)
            },
        }
        return template if inner is None else {"type": "Sequence", "processors": [inner, template]}

    def _marks(self, name: str, is_added: bool) -> list[dict[str, Any]]:
        token_id = _token_id(self.file, f"tokenizer.ggml.{name}_token_id", len(self.tokens))
        if not is_added or token_id is None:
            return []
        return [{"SpecialToken": {"id": self.tokens[token_id], "type_id": 0}}]


def _tokenizer(vocabulary: _Vocabulary, **parts: Any) -> dict[str, Any]:
    return {"version": "1.0", "added_tokens": vocabulary.added_tokens, **parts}


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Returns the tokenizer of byte-level BPE, as GPT-2 has it."""
    pre = vocabulary.file.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PATTERNS:
        raise UnsupportedModelError(
            f"{vocabulary.file.path}: how its tokenizer cuts text into words is not known (tokenizer.ggml.pre is "
            f"{pre!r:.64}); known are {', '.join(sorted(_PATTERNS))}."
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _tokenizer(
        vocabulary,
        normalizer={"type": "NFC"} if pre in _NORMALIZED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": _word_cutters(pre, byte_level)},
        post_processor=vocabulary.post_processor(pre in _ADDS_BOS, byte_level),
        decoder=byte_level,
        model=_bpe(vocabulary, vocabulary.merges, ignore_merges=pre in _IGNORES_MERGES),
    )


def _word_cutters(pre: str, byte_level: dict[str, Any]) -> list[dict[str, Any]]:
    pattern = _PATTERNS[pre]
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        return [split, byte_level]
    digits = [{"type": "Digits", "individual_digits": True}] if pre in _SINGLE_DIGITS else []
    return [*digits, {**byte_level, "use_regex": True}]


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        "fuse_unk": False,
        "byte_fallback": False,
        **settings,
        "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
        "merges": merges,
    }


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Returns the tokenizer of a SentencePiece model: BPE whose merges are ordered by the scores of what they make."""
    has_prefix = vocabulary.flag("add_space_prefix", True)
    unknown = vocabulary.of_type(_UNKNOWN)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    return _tokenizer(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": [*prefix, replace]},
        pre_tokenizer=None,
        post_processor=vocabulary.post_processor(True, None),
        decoder={"type": "Sequence", "decoders": [*decoders, {"type": "Fuse"}, *strip]},
        model=_bpe(
            vocabulary,
            _merges_by_score(vocabulary),
            unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_type(_BYTE)),
        ),
    )


def _merges_by_score(vocabulary: _Vocabulary) -> list[list[str]]:
    """Returns the pairs of tokens that make another one, those first whose result has the highest score."""
    skipped = {*vocabulary.of_type(_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE)}
    ids = {token: index for index, token in enumerate(vocabulary.tokens) if index not in skipped}
    scores = vocabulary.scores
    merges: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                merges.append((-float(scores[index]), ids[first], ids[second], first, second))
    merges.sort(key=lambda merge: merge[:3])
    return [[first, second] for *_, first, second in merges]
