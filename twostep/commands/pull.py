"""`twostep pull`: downloads what serving a model needs, and nothing else."""

from collections.abc import Sequence

from engine.checkpoint.hub_gguf import gguf_of, split_tag
from engine.core.errors import ModelError, reason_of
from twostep.commands.arguments import CommandParser

_DESCRIPTION = """\
Download a model from the Hugging Face hub into its cache, so that twostep serve finds it there. Only files that serving
reads are fetched: configuration, tokenizer, chat templates, safetensors. Interrupted, it goes on where it stopped."""
_EXAMPLES = """\
  twostep pull Qwen/Qwen2.5-0.5B-Instruct
  twostep pull org/model --revision v1.0
  twostep pull org/model-GGUF:Q4_K_M
  twostep pull org/model-GGUF --file model-Q4_K_M.gguf"""
PATTERNS = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.txt", "*.tiktoken")
"""Files that serving a checkpoint reads."""


def parser() -> CommandParser:
    made = CommandParser("pull", _DESCRIPTION, _EXAMPLES)
    made.add_argument("model", metavar="MODEL", help="id on the hub: owner/name, or owner/name:Q4_K_M for a GGUF file")
    made.add_argument("--revision", metavar="NAME", help="branch, tag or commit")
    made.add_argument("--file", metavar="NAME", help="this file alone, such as one of several GGUF files")
    return made


def main(arguments: Sequence[str]) -> int:
    """Downloads the files and prints where they are. Raises ModelError."""
    parsed = parser().parse(arguments)
    model, tag = split_tag(parsed.model)
    if tag is not None:
        print(gguf_of(model, tag, parsed.revision))
        return 0
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [parsed.file] if parsed.file else list(PATTERNS)
    try:
        path = huggingface_hub.snapshot_download(parsed.model, revision=parsed.revision, allow_patterns=patterns)
    except LocalEntryNotFoundError as error:
        raise ModelError(f"The hub cannot be reached to ask for {parsed.model}: go online, and try again.") from error
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ModelError(f"{parsed.model} cannot be downloaded: {reason_of(error)}") from error
    print(path if parsed.file is None else f"{path}/{parsed.file}")
    return 0
