"""`twostep completion`: scripts that complete commands and flags in a shell."""

from collections.abc import Sequence
from importlib import import_module

from server.settings.reading import flag_of
from server.settings.settings import Settings
from twostep.commands.arguments import CommandParser
from twostep.commands.listing import COMMANDS

_DESCRIPTION = "Print a script that completes commands, flags and files in a shell."
_EXAMPLES = """\
  twostep completion bash > ~/.local/share/bash-completion/completions/twostep
  twostep completion zsh > "${fpath[1]}/_twostep"
  twostep completion fish > ~/.config/fish/completions/twostep.fish"""
_WITH_PARSERS = ("chat", "run", "doctor", "plan", "models", "pull", "trace", "completion")

_BASH = """\
_twostep() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    if [[ $COMP_CWORD -eq 1 || $current == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _twostep twostep"""


def parser() -> CommandParser:
    made = CommandParser("completion", _DESCRIPTION, _EXAMPLES)
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    return made


def main(arguments: Sequence[str]) -> int:
    """Prints the script of a shell."""
    shell = parser().parse(arguments).shell
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](flags_of_commands()))
    return 0


def flags_of_commands() -> dict[str, list[str]]:
    """Returns the flags of every command."""
    serve = [flag_of(name) for name in Settings.model_fields if name != "model"]
    flags: dict[str, list[str]] = {name: ["--help"] for name in COMMANDS}
    for name in _WITH_PARSERS:
        flags[name] = import_module(f"twostep.commands.{name}").parser().flags()
    return {**flags, "serve": ["--help", *serve]}


def _bash(flags: dict[str, list[str]]) -> str:
    cases = "\n".join(f'            {name}) words="{" ".join(own)}" ;;' for name, own in flags.items())
    return _BASH.format(commands=" ".join(flags), cases=cases)


def _zsh(flags: dict[str, list[str]]) -> str:
    """zsh runs bash's completions by a function of its own."""
    return f"#compdef twostep\nautoload -U +X bashcompinit && bashcompinit\n{_bash(flags)}"


def _fish(flags: dict[str, list[str]]) -> str:
    lines = [f"complete -c twostep -n __fish_use_subcommand -a '{' '.join(flags)}'"]
    for name, own in flags.items():
        lines += [f"complete -c twostep -n '__fish_seen_subcommand_from {name}' -l {flag[2:]}" for flag in own]
    return "\n".join(lines)
