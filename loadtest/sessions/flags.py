"""The flags of `--workload agent-sessions`, and which others go with them."""

import argparse

from loadtest.errors import UsageError
from loadtest.numbers import count, number, positive
from loadtest.workload import WorkloadKind

_OWN = ("sessions", "turns", "system_len", "tools", "think_time")
_OTHERS = ("requests", "rate")


def add_session_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--sessions", type=positive, metavar="N", help="end after N sessions (default: --concurrency, each once)")
    add("--turns", type=positive, metavar="N", help="turns of a session (default 8); each brings --prompt-len words")
    add("--system-len", type=count, metavar="N", help="words of the system prompt that all share (default 512)")
    add("--tools", type=count, metavar="N", help="tools that all share (default 4)")
    add(
        "--think-time",
        type=number,
        metavar="S",
        help="seconds between an answer and the next turn: the mean of an exponential distribution (default 1)",
    )


def check_session_flags(flags: argparse.Namespace) -> None:
    """Raises UsageError for flags that do not go with agent-sessions, or not without them."""
    is_agents = flags.workload == WorkloadKind.AGENT_SESSIONS
    wrong = [name for name in (_OTHERS if is_agents else _OWN) if getattr(flags, name) is not None]
    if wrong:
        flag = f"--{wrong[0].replace('_', '-')}"
        raise UsageError(
            f"{flag} does not go with agent-sessions: --concurrency and --sessions do"
            if is_agents
            else f"{flag} belongs to --workload agent-sessions"
        )
