"""Errors that a user's mistake can cause. Each message is one line: problem, location, allowed values."""

import difflib
import errno
import socket
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""System errors for a full disk and for a full quota."""
OUTAGES = (*NO_ROOM, errno.EIO, errno.ESTALE, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED,
           errno.ECONNRESET, errno.ETIMEDOUT, socket.EAI_AGAIN)  # fmt: skip
"""System errors when a disk, a file server or another host does not respond for now."""

OUT_OF_MEMORY = (
    "out of memory; lower per_device_train_batch_size or local_rollout_forward_batch_size, which change nothing else, "
    "or response_length"
)
"""Message for memory exhausted by work that cannot be done in smaller pieces."""

_SAYS_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate",
    "CUDA error: out of memory",  # a graph, a kernel's module or a context, which torch's allocator does not hold
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error is due to exhausted memory, of the device or the machine."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    is_torchs = type(error).__name__ == "OutOfMemoryError"  # without importing torch
    says_so = is_torchs or any(words in str(error) for words in _SAYS_NO_MEMORY)
    return says_so or is_out_of_memory(error.__context__)  # a graph's capture fails in its own way after that


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if there is none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, to the first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


_LIBRARIES = ("<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def is_outage(error: BaseException) -> bool:
    """Return True if the cause may soon recover: a host that does not respond, a full disk."""
    if isinstance(error, RewardOutage | NoRoomError) or getattr(error, "errno", None) in OUTAGES:
        return True
    before = error.__cause__ or _translated(error)
    return before is not None and is_outage(before)


def _translated(error: BaseException) -> BaseException | None:
    """Return the error that a library replaced by this one without naming it as the cause, as many do, or None.

    What is raised while other code handles an error is a fault of that code: of a user's fallback, for instance.
    """
    before = None if error.__suppress_context__ else error.__context__
    handler = None if before is None else before.__traceback__  # a traceback begins where the error was caught
    is_librarys = handler is not None and handler.tb_frame.f_code.co_filename.startswith(_LIBRARIES)
    return before if is_librarys else None


def raised_at(error: BaseException) -> str:
    """Return where an error was raised, `path/to/file.py:12`, outside of libraries if it can be; "" if it was not."""
    all_frames = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in all_frames if not frame.filename.startswith(_LIBRARIES)] or all_frames
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


class PPOTunerError(Exception):
    """Base of all errors whose message is meant for the user, not for a traceback."""


class ConfigError(PPOTunerError, ValueError):
    """A value of a hyperparameter, a study file or a flag is not allowed."""


@contextmanager
def located(prefix: str) -> Iterator[None]:
    """Put `prefix` before the message of a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}") from None


class TaskError(PPOTunerError, ValueError):
    """A task does not exist, or its models, reward or prompts are unusable."""


class RewardError(PPOTunerError, RuntimeError):
    """A reward failed: it raised, or did not return one finite number per response."""


class RewardOutage(RewardError):
    """A reward's endpoint is unreachable, or reports that it cannot answer now."""


class OutOfMemory(PPOTunerError, MemoryError):
    """Not even one row at a time fits."""


class NotFiniteError(PPOTunerError, ArithmeticError):
    """A run's loss, gradient or KL, or a weight of its policy, is not a number or infinite."""


class CheckpointError(PPOTunerError, OSError):
    """A checkpoint is missing, unfinished, damaged, or belongs to another run."""


class NoRoomError(CheckpointError):
    """A checkpoint cannot be written for now: the disk, or the user's quota, is full."""


class StoreError(PPOTunerError, OSError):
    """The store cannot be reached, is not ours, or holds another schema version."""


class StudyError(PPOTunerError, LookupError):
    """A study or trial does not exist, or is in the wrong state for the request."""


OTHER_NAMES = {
    "lr": "learning_rate", "actor_learning_rate": "learning_rate", "critic_lr": "value_learning_rate",
    "critic_learning_rate": "value_learning_rate", "init_kl_coef": "kl_coef", "init_coef": "kl_coef",
    "beta": "kl_coef", "eps_clip": "cliprange", "clip_ratio_low": "cliprange", "epsilon": "cliprange",
    "value_clip": "cliprange_value", "lambd": "lam", "gae_lambda": "lam", "ppo_epochs": "num_ppo_epochs",
    "max_epochs": "num_ppo_epochs", "n_samples_per_prompt": "num_generations", "max_norm": "max_grad_norm",
    "grad_clip": "max_grad_norm", "max_new_tokens": "response_length", "generate_max_len": "response_length",
    "max_response_length": "response_length", "num_train_epochs": "total_episodes",
    "lora_rank": "lora_r", "entropy_coeff": "entropy_coef",
}  # fmt: skip
"""Our hyperparameters by the names in other trainers and papers, if these are spelled quite differently."""
SIMILARITY = 0.65
"""Least share of common letters (difflib's ratio) of a name that is suggested."""
LEAST_PREFIX = 3
"""Shortest prefix that is taken for an abbreviated name."""

ELSEWHERE: Mapping[str, str] = {"kl_budget": "", "kl_limit": ""}
"""Names that are meant where similar ones are allowed and they are not: then nothing is suggested."""


def nearest(name: str, valid: Iterable[str], elsewhere: Mapping[str, str] = ELSEWHERE) -> str:
    """Return `; did you mean "x"?` for the valid name closest to `name`, or an empty string.

    That is our name for what other trainers call `name`, else a name with similar letters, else a longer one.
    Dashes before a flag do not count as letters. Names that belong `elsewhere` are suggested as stated there.
    """
    given = name.lstrip("-").lower().replace("-", "_")
    names = {**elsewhere, **{other.lstrip("-").lower().replace("-", "_"): other for other in valid}}
    ours = OTHER_NAMES.get(given)
    close = [ours] if ours in names else difflib.get_close_matches(given, names, n=1, cutoff=SIMILARITY)
    if not close and len(given) >= LEAST_PREFIX:
        close = sorted((letters for letters in names if letters.startswith(given)), key=len)
    return f'; did you mean "{names[close[0]]}"?' if close and names[close[0]] else ""


SHOWN = 60
"""Maximum characters of a prompt, a response or an answer in an error."""


def cut(value: object) -> str:
    """Return the start of a value, quoted as Python writes it."""
    text = repr(value[:SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def one_line(error: BaseException) -> str:
    """Return an error's class and the start of its message, without line breaks."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:300]}" if message else type(error).__name__
