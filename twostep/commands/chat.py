"""`twostep chat`: a conversation in the terminal."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import TwostepError
from twostep.commands.arguments import CommandParser
from twostep.commands.client import NOT_UTF8, Answer, ChatClient, Message
from twostep.commands.endpoint import EndpointError, open_endpoint
from twostep.commands.sampling import PARAMETERS, add_sampling_flags, sampling_of
from twostep.commands.serve_flags import add_serve_flags

_DESCRIPTION = """\
Talk with a model. MODEL is what twostep serve takes, or the URL of a server, which gets the key in TWOSTEP_API_KEY; the
embedded toy model without it. Other flags are those of twostep serve. In the conversation, /help lists the commands,
Ctrl-C ends an answer and Ctrl-D the conversation."""
_EXAMPLES = """\
  twostep chat Qwen/Qwen2.5-0.5B-Instruct
  twostep chat ./model.gguf --system "Answer in one sentence." --temperature 0.2
  twostep chat http://127.0.0.1:8000
  twostep chat ./my-model --quantization int4"""
_HELP = """\
  /clear            forget the conversation
  /undo             forget the last question and its answer
  /retry            ask the last question again
  /system [TEXT]    set the system message, or leave it out
  /set [NAME VALUE] set a sampling parameter, or show all; VALUE none: the model's own
  /save FILE        write the conversation to a JSON file
  /exit             end, as Ctrl-D does
  A line that ends with \\ goes on with the next one."""
_PROMPT, _MORE = "> ", ". "
_DIM, _PLAIN = "\033[2m", "\033[0m"


def parser() -> CommandParser:
    made = CommandParser("chat", _DESCRIPTION, _EXAMPLES)
    made.add_argument("model", metavar="MODEL", nargs="?", help="default: the embedded toy model")
    made.add_argument("--model-name", metavar="NAME", help="which model of the server, or adapter; default: the first")
    made.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    add_sampling_flags(made)
    add_serve_flags(made)
    return made


def main(arguments: Sequence[str]) -> int:
    """Talks until the input ends. Raises EndpointError."""
    parsed = parser().parse(arguments)
    with open_endpoint(parsed.model, parsed.serve_flags) as endpoint, ChatClient(endpoint) as client:
        model = parsed.model_name or client.first_model()
        conversation = Conversation(client, {"model": model, **sampling_of(parsed)}, parsed.system)
        if sys.stdin.isatty():
            print(f"{model}: /help lists the commands, Ctrl-D ends.")
        while (line := _read()) is not None:
            try:
                if conversation.take(line) is None:
                    return 0
            except TwostepError as error:
                print(f"{error}", file=sys.stderr)
    return 0


def _read() -> str | None:
    """Returns what the user writes, of several lines if each but the last ends with a backslash; None at the end.
    Raises EndpointError for what is not in UTF-8."""
    prompt, more = (_PROMPT, _MORE) if sys.stdin.isatty() else ("", "")
    lines: list[str] = []
    while True:
        try:
            line = input(more if lines else prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:  # drops what was written so far
            print()
            lines.clear()
            continue
        except UnicodeDecodeError as error:
            raise EndpointError(NOT_UTF8) from error
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


class Conversation:
    """The messages so far, and what is done with each line of the user."""

    def __init__(self, client: ChatClient, params: dict[str, Any], system: str | None = None) -> None:
        self._client = client
        self.params = params
        self.system = system
        self.messages: list[Message] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: print(_HELP),
            "clear": lambda _: self.messages.clear(),
            "undo": self._undo,
            "retry": self._retry,
            "system": self._set_system,
            "set": self._set,
            "save": self._save,
        }

    def take(self, line: str) -> "Conversation | None":
        """Answers a line, or does as its command says; None where it ends the conversation. Raises EndpointError, and
        then the conversation is as before."""
        if not line.startswith("/"):
            if line.strip():
                self._ask(line)
            return self
        name, _, rest = line[1:].partition(" ")
        if name in ("exit", "quit", "bye"):
            return None
        if name not in self._commands:
            raise EndpointError(f"/{name} is no command: /help lists them.")
        self._commands[name](rest.strip())
        return self

    def _ask(self, text: str) -> None:
        question: Message = {"role": "user", "content": text}
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        answer = Answer()
        try:
            with self._client.chat([*system, *self.messages, question], self.params) as answer:
                _show(answer)
        except KeyboardInterrupt:
            print(" [ended]", end="")
        print()
        if sys.stdout.isatty() and (summary := answer.summary()):
            print(f"{_DIM}{summary}{_PLAIN}")
        self.messages += [question, {"role": "assistant", "content": answer.text}]

    def _undo(self, _: str) -> None:
        del self.messages[-2:]

    def _retry(self, _: str) -> None:
        if not self.messages:
            raise EndpointError("There is no question yet.")
        before = list(self.messages)
        self._undo("")
        try:
            self._ask(before[-2]["content"])
        except TwostepError:
            self.messages = before
            raise

    def _set_system(self, text: str) -> None:
        self.system = text or None

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            print("\n".join(f"  {key} {self.params.get(key, 'none')}" for key in PARAMETERS))
            return
        if name not in PARAMETERS:
            raise EndpointError(f"{name} is no parameter: there are {', '.join(PARAMETERS)}.")
        try:
            self.params[name] = PARAMETERS[name](value)
        except ValueError:
            if value != "none":
                raise EndpointError(f"{name} must be a number, or none, not {value!r}.") from None
            self.params.pop(name, None)

    def _save(self, path: str) -> None:
        if not path:
            raise EndpointError("Name the file, too: /save FILE.")
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = json.dumps({"messages": [*system, *self.messages]}, ensure_ascii=False, indent=2)
        try:
            Path(path).expanduser().write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            raise EndpointError(f"{path} cannot be written: {error.strerror}.") from error


def _show(answer: Answer) -> None:
    """Prints an answer as it comes, thinking dimmed."""
    was_thinking, is_terminal = False, sys.stdout.isatty()
    for is_thinking, text in answer.pieces:
        if is_thinking != was_thinking:
            print((_DIM if is_thinking else _PLAIN) if is_terminal else "\n", end="")
            was_thinking = is_thinking
        print(text, end="", flush=True)
    if was_thinking and is_terminal:
        print(_PLAIN, end="")
