"""The error tree of the load generator.

LoadTestError            anything that ends the program with one sentence and exit code 2
├── UsageError           the command line makes no sense
├── Unreachable          no server answers at the URL, or it is not OpenAI-compatible
└── ServerGone           the server refused connection after connection in the middle of a run
ProtocolError            one response was not valid HTTP/1.1; ends that request only
"""


class LoadTestError(Exception):
    """Ends the program with its message and exit code 2."""


class UsageError(LoadTestError):
    """The command line makes no sense."""


class Unreachable(LoadTestError):
    """No server answers at the URL, or the one that does is not OpenAI-compatible."""


class ServerGone(LoadTestError):
    """The server refused connection after connection in the middle of a run."""


class ProtocolError(Exception):
    """A response was not valid HTTP/1.1, or ended too early."""
