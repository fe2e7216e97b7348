"""Loads a checkpoint's tokenizer files: the tokenizers library's object, named special tokens and chat templates.

`tokenizer.json` is read directly: transformers' AutoTokenizer would bring torch into the process (about 200 MB). Only
a checkpoint without that file, or with a tokenizer class of its own, is loaded through AutoTokenizer. As there, the
post-processor of tokenizer.json decides about BOS and EOS tokens, and add_bos_token in the configuration has no effect.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from engine.checkpoint.hub import snapshot
from engine.checkpoint.local import check_model_type, folder_of, is_local, read_config
from engine.core.errors import ModelError, reason_of
from engine.host.rust_panics import panics_as

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_VOCABULARY_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_SENTENCEPIECE_PACKAGES = ("sentencepiece", "google.protobuf")
_HUB_FILES = (
    *("tokenizer*", "special_tokens_map.json", "chat_template*", "additional_chat_templates/*", "config.json"),
    *("merges.txt", "added_tokens.json", "tokenization_*.py", *_VOCABULARY_FILES),  # for AutoTokenizer
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Content of a checkpoint's tokenizer files."""

    backend: tokenizers.Tokenizer
    named_tokens: Mapping[str, str]
    """Name -> text of the special tokens that are set: bos_token, eos_token, ..."""
    chat_templates: Mapping[str, str]
    """Name -> source of the chat templates; the usual one is called default."""


def load_tokenizer_files(model: str, *, revision: str | None, trust_remote_code: bool) -> TokenizerFiles:
    """Loads the tokenizer files of `model`, a checkpoint directory or a hub id. Raises ModelError."""
    folder = _folder_of(model, revision)
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    has_own_class = "AutoTokenizer" in (config.get("auto_map") or {})
    if not has_own_class and not has_tokenizer(folder):
        raise ModelError(
            f"There is no tokenizer in {model}: copy tokenizer.json (and tokenizer_config.json) beside the weights."
        )
    if not (folder / "tokenizer.json").is_file() or (has_own_class and trust_remote_code):
        return _from_transformers(folder, trust_remote_code)
    try:
        with panics_as(ValueError):
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            named = {name: content for name in _NAMED_TOKENS if (content := _content(config.get(name)))}
            _add_missing_tokens(backend, config, named)
        return TokenizerFiles(_plain(backend), named, _chat_templates(folder, config))
    except Exception as error:  # the library raises plain Exception; and any field may be of any type
        raise ModelError(f"The tokenizer of {model} is damaged: {reason_of(error)}.") from error


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory has a file with a vocabulary."""
    return any(path.is_file() for name in _VOCABULARY_FILES for path in folder.glob(name))


def _folder_of(model: str, revision: str | None) -> Path:
    if not is_local(model):
        return snapshot(model, revision, _HUB_FILES)
    folder = folder_of(model)
    if not folder.is_dir():
        raise ModelError(f"The model directory {model} does not exist.")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is damaged: {error}.") from error


def _from_transformers(folder: Path, trust_remote_code: bool) -> TokenizerFiles:
    _check_sentencepiece(folder)
    if (folder / "config.json").is_file():
        check_model_type(read_config(folder), str(folder), trust_remote_code)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds: missing files, damaged files, remote code not trusted
        raise ModelError(f"The tokenizer in {folder} cannot be loaded: {reason_of(error)}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"The tokenizer in {folder} is pure Python code; only those with a fast form can be served.")
    if backend.get_vocab_size() == len(backend.get_added_tokens_decoder()):
        raise ModelError(f"The tokenizer in {folder} has no vocabulary: its files were not understood.")
    named = {name: str(token) for name in _NAMED_TOKENS if (token := getattr(tokenizer, name, None))}
    template = getattr(tokenizer, "chat_template", None) or {}
    return TokenizerFiles(_plain(backend), named, template if isinstance(template, dict) else {"default": template})


def _check_sentencepiece(folder: Path) -> None:
    """Raises ModelError if the vocabulary is a SentencePiece model, which takes packages that are not installed."""
    names = {path.name for pattern in _VOCABULARY_FILES for path in folder.glob(pattern)}
    is_sentencepiece = all(name.endswith(".model") and name != "tiktoken.model" for name in names)
    if names and is_sentencepiece and not all(map(_is_installed, _SENTENCEPIECE_PACKAGES)):
        raise ModelError(
            f"The tokenizer in {folder} is a SentencePiece model ({min(names)}): install what reads it with "
            "pip install 'twostep[sentencepiece]', or copy tokenizer.json beside it."
        )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _plain(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns the tokenizer without truncation and padding, which some files enable: prompts are never cut silently.

    Since no code sets either later, concurrent use is safe.
    """
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds tokens that are in the configuration but not in tokenizer.json."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in _configured_tokens(config, named):
        if token.content not in known:
            known.add(token.content)
            backend.add_tokens([token])


def _configured_tokens(config: Mapping[str, Any], named: Mapping[str, str]) -> Iterator[tokenizers.AddedToken]:
    by_id = config.get("added_tokens_decoder") or {}
    for _, fields in sorted(by_id.items(), key=lambda item: int(item[0])):
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        yield tokenizers.AddedToken(fields["content"], **{name: fields[name] for name in flags if name in fields})
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for token in [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]:
        if content := _content(token):
            yield tokenizers.AddedToken(content, special=True, normalized=False)


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> template. Files take precedence over the configuration's entry, one template or a list of
    them."""
    entry = config.get("chat_template") or []
    listed = [{"name": "default", "template": entry}] if isinstance(entry, str) else entry
    templates = {item["name"]: item["template"] for item in listed}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    return templates


def _content(token: object) -> str | None:
    """Returns the text of a token, which is written as a string or as an object with its content; None if it has
    none."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) and value else None
