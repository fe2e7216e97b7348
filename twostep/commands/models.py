"""`twostep models`: what was downloaded from the Hugging Face hub, and what it takes on the disk."""

from collections.abc import Sequence

from twostep.commands.arguments import CommandParser

_DESCRIPTION = """\
List the models in the Hugging Face cache (HF_HOME), the largest first. huggingface_hub's own command, hf, deletes them:
hf cache rm model/OWNER/NAME."""
_EXAMPLES = """\
  twostep models"""


def parser() -> CommandParser:
    return CommandParser("models", _DESCRIPTION, _EXAMPLES)


def main(arguments: Sequence[str]) -> int:
    """Prints a table of the models."""
    parser().parse(arguments)
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound as error:
        print(f"No model was downloaded: there is no {error.cache_dir}.")
        return 0
    models = sorted((repo for repo in cache.repos if repo.repo_type == "model"), key=lambda repo: -repo.size_on_disk)
    width = max((len(model.repo_id) for model in models), default=0)
    for model in models:
        print(f"{model.repo_id:{width}}  {size_of(model.size_on_disk):>9}  used {model.last_accessed_str}")
    print(f"{len(models)} models, {size_of(sum(model.size_on_disk for model in models))}")
    return 0


def size_of(num_bytes: int) -> str:
    """Returns a size in the largest unit that it has one of."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"
