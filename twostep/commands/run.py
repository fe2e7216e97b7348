"""`twostep run`: one answer on standard output."""

import sys
from collections.abc import Sequence
from pathlib import Path

from twostep.commands.arguments import CommandParser
from twostep.commands.client import NOT_UTF8, ChatClient
from twostep.commands.endpoint import EndpointError, open_endpoint
from twostep.commands.sampling import add_sampling_flags, sampling_of
from twostep.commands.serve_flags import add_serve_flags

_DESCRIPTION = """\
Print a model's answer to one prompt. MODEL is what twostep serve takes, or the URL of a server, which gets the key in
TWOSTEP_API_KEY. Other flags are those of twostep serve. Without a prompt, it is read from standard input."""
_EXAMPLES = """\
  twostep run Qwen/Qwen2.5-0.5B-Instruct "Name three birds."
  git diff | twostep run ./model.gguf --system "Write a commit message." --temperature 0
  twostep run http://127.0.0.1:8000 "Name three birds." --timings
  twostep run embedded "A list is" --raw --max-tokens 20 --quantization int4"""


def parser() -> CommandParser:
    made = CommandParser("run", _DESCRIPTION, _EXAMPLES)
    made.add_argument("model", metavar="MODEL")
    made.add_argument("prompt", metavar="PROMPT", nargs="?", help="default: standard input")
    made.add_argument("--model-name", metavar="NAME", help="which model of the server, or adapter; default: the first")
    made.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    made.add_argument("--raw", action="store_true", help="go on with the text as it is, without a chat template")
    made.add_argument("--timings", action="store_true", help="tell on stderr what it took")
    add_sampling_flags(made)
    add_serve_flags(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Prints the answer and returns the exit code. Raises EndpointError."""
    own = parser()
    parsed = own.parse(arguments)
    if parsed.raw and parsed.system:
        own.error("--system is for chats: leave it out, or --raw")
    if parsed.prompt is None and " " in parsed.model and not Path(parsed.model).exists():
        own.error(f'name the model before the prompt: twostep run MODEL "{parsed.model}"; MODEL can be: embedded')
    prompt = _read_prompt() if parsed.prompt is None else parsed.prompt
    with open_endpoint(parsed.model, parsed.serve_flags) as endpoint, ChatClient(endpoint) as client:
        params = {"model": parsed.model_name or client.first_model(), **sampling_of(parsed)}
        system = [{"role": "system", "content": parsed.system}] if parsed.system else []
        messages = [*system, {"role": "user", "content": prompt}]
        try:
            with client.complete(prompt, params) if parsed.raw else client.chat(messages, params) as answer:
                for is_thinking, text in answer.pieces:
                    print(text, end="", flush=True, file=sys.stderr if is_thinking else sys.stdout)
        except EndpointError as error:
            if "no chat template" in str(error):
                raise EndpointError("This model has no chat template: --raw goes on with a text without one.") from None
            raise
        print()
        if parsed.timings:
            print(answer.summary(), file=sys.stderr)
    return 0


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("Write the prompt; Ctrl-D ends it.", file=sys.stderr)
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise EndpointError(NOT_UTF8) from error
