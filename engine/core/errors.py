"""Every error twostep raises on purpose, one tree:

    TwostepError
    ├── ConfigError                 a setting cannot work as given; the process exits with code 2
    ├── ModelError                  the checkpoint cannot be served; the process exits with code 2
    │   ├── UnsupportedModelError   the architecture cannot run over a paged cache, and why
    │   ├── ModelMemoryError        there is not enough memory for it now
    │   └── AdapterError            an adapter cannot be loaded over it, and why
    ├── RequestError                this request can never be served; retrying does not help
    │   ├── GrammarError            the schema or grammar cannot be followed, and why
    │   ├── InvalidParameterError   one parameter has a value that cannot be honoured; `.param` names it
    │   └── ContextLengthError      prompt and max_tokens do not fit the context
    ├── OverloadedError             the admission queue is full; `.retry_after_s` says when to retry
    ├── RequestTimeoutError         it waited for longer than allowed; `.is_own_limit` if by a limit of its own
    │   └── DeadlineError           its deadline passed
    ├── RequestAbortedError         the request was ended from outside before its first token
    ├── RemotePrefillError          another server did not compute the prompt
    ├── DeviceFailedError           the device is lost to the engine process, which ends
    └── EngineUnavailableError      the engine process is loading, dead or shutting down
        ├── EngineRestartingError   the engine is being restarted, and the queue is full; `.retry_after_s`
        ├── EngineGivenUpError      no engine will be started again
        └── EngineFailedError       the engine failed on this request's step; `.detail` is for the log

The server maps each class to an HTTP status in one table (`server/core/errors.py`).
"""


class TwostepError(Exception):
    """Base of all errors raised on purpose. The message is one sentence a user can act on."""


class ConfigError(TwostepError):
    """A setting cannot work as given."""


class ModelError(TwostepError):
    """The checkpoint is missing, damaged or not servable."""


class UnsupportedModelError(ModelError):
    """The model's architecture cannot run over a paged KV cache."""


class ModelMemoryError(ModelError):
    """There is not enough memory for the model or its KV cache now. Later there may be enough."""


class AdapterError(ModelError):
    """An adapter is missing, damaged, or none that can be loaded over the model."""


class RequestError(TwostepError):
    """The request can never be served as it is. `param` names the request field at fault, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameterError(RequestError):
    """A parameter's value cannot be honoured."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param)


class GrammarError(RequestError):
    """A schema or grammar cannot be followed. The message is to be read after the name of the request's parameter."""


class ContextLengthError(RequestError):
    """The request needs more tokens than the context holds."""


class OverloadedError(TwostepError):
    """The admission queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(TwostepError):
    """The queue's limit or the request's deadline passed before its first token."""

    def __init__(self, message: str, is_own_limit: bool = False) -> None:
        """`is_own_limit` says whether the limit was the request's own, not the server's."""
        super().__init__(message)
        self.is_own_limit = is_own_limit


class DeadlineError(RequestTimeoutError):
    """The request's deadline passed before its first token."""

    def __init__(self, message: str) -> None:
        super().__init__(message, is_own_limit=True)


class RequestAbortedError(TwostepError):
    """The request was ended from outside before its first token."""


class RemotePrefillError(TwostepError):
    """Another server that was asked for it did not compute the prompt. This one then does."""


class DeviceFailedError(TwostepError):
    """The device failed and is lost to this process: whatever it runs there next fails, too."""


class EngineUnavailableError(TwostepError):
    """The engine process cannot take work now."""


class EngineRestartingError(EngineUnavailableError):
    """The engine is being restarted, and the queue of waiting requests is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineGivenUpError(EngineUnavailableError):
    """The engine keeps dying or cannot be loaded any more: waiting does not help."""


class EngineFailedError(EngineUnavailableError):
    """The engine failed while it ran this request."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def reason_of(error: BaseException) -> str:
    """Returns a library's error message as one line of at most 500 characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:500]} ..."
