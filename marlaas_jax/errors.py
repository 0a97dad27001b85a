"""The exception tree, and how a value is shown in a sentence.

MarlaasError
+-- UserError              the caller can mend it; the CLI prints one sentence and exits with code 2
|   +-- InvalidConfig      a field of a job or runtime file: names the field, the value, what is allowed
|   +-- NotFound           a file, model, job, snapshot or module that does not exist
|   +-- InvalidRequest     a request that cannot be served: too long a prompt, an unknown adapter
|   +-- CorruptFile        a model, adapter or checkpoint file that cannot be read; names the path
|   +-- StorageError       a disk that is full or not writable; names the path
|   +-- QuotaExceeded      a tenant asks for more than it may use; says after how many seconds to try again, if that helps
|   +-- NotAllowed         an API key that is missing, unknown, revoked or not an admin's
|   +-- Unreachable        no service answers at the URL
+-- JobFailure             ends one job and no other; carries the reason that its owner reads
|   +-- WrongWeights       the sampler does not hold the weights that the learner published
|   +-- NonFinite          too many non-finite gradients in a row
|   +-- EnvironmentFailed  an environment that failed more often than the job allows
+-- InternalError          our own fault or the machine's
    +-- WorkerLost         a process died or stopped answering
    +-- ProtocolMismatch   two processes speak different versions
"""


class MarlaasError(Exception):
    """Root of everything that this package raises on purpose."""


class UserError(MarlaasError):
    """The caller can mend it."""


class InvalidConfig(UserError):
    """A field of a job or runtime file has a value that is not allowed."""


class NotFound(UserError):
    """Something named by the caller does not exist."""


class InvalidRequest(UserError):
    """A request that cannot be served as asked."""


class CorruptFile(UserError):
    """A file that exists but cannot be read as what it claims to be."""


class StorageError(UserError):
    """A write that failed: the disk is full or the path is not writable."""


class QuotaExceeded(UserError):
    """A tenant asks for more than it may use; `retry_after_s` is None where waiting alone does not help."""

    def __init__(self, message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotAllowed(UserError):
    """The API key is missing, unknown or revoked, or what was asked for takes an admin's."""


class Unreachable(UserError):
    """No service answers at the URL."""


class JobFailure(MarlaasError):
    """Ends one job; its text is the reason that the job's owner reads."""


class WrongWeights(JobFailure):
    """The sampler does not hold the weights that the learner published."""


class NonFinite(JobFailure):
    """Too many non-finite gradients in a row."""


class EnvironmentFailed(JobFailure):
    """The job's environment failed more often than the job allows."""


class InternalError(MarlaasError):
    """Our own fault or the machine's."""


class WorkerLost(InternalError):
    """A process died or stopped answering."""


class ProtocolMismatch(InternalError):
    """Two processes speak different versions of the wire protocol."""


def user_error(kind: str) -> type[UserError] | None:
    """Returns the class that the name stands for if it is a kind of UserError."""
    found = globals().get(kind)
    return found if isinstance(found, type) and issubclass(found, UserError) else None


def short(value: object, room: int = 80) -> str:
    """Returns the value as an error message shows it: its repr, on one line, the middle left out where it is long."""
    try:
        return cut(repr(value), room)
    except ValueError:  # Python writes no whole number of over 4300 digits
        return "a number of thousands of digits"


def cut(text: str, room: int = 120) -> str:
    """Returns the text, the middle left out where it is long."""
    return text if len(text) <= room else f"{text[: room // 2]}...{text[-room // 2 :]}"
