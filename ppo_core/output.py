"""Output of a run: short lines for people, JSON for programs.

Text from a model, a file or an error is shown with its control characters escaped, and never as markup.
"""

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table

from ppo_core.config.declare import HyperValue
from ppo_core.metrics import METRICS
from ppo_core.report import StepReport

PIPE_WIDTH = 1_000_000
"""Columns of output that is not a terminal: more than any line has, so that nothing is cut or wrapped."""
NOTHING = "-"

KL_UNIT = METRICS["eval/kl"].unit.replace(" per ", "/")
"""nats/response"""

_SECRETS = (
    re.compile(r"(?<=://)([^:/?#@]*:).*(?=@)", re.DOTALL),
    re.compile(r"(https?://)[^:/?#@]*(?=@)", re.IGNORECASE),  # a token in the place of the user
    re.compile(r"([?&]\w*(?:pass|token|secret|api_?key)\w*=)[^&]*", re.IGNORECASE),
)

_STEP_READINGS = {"objective/scores": "score", "objective/kl_exact": "KL", "objective/kl_coef": "β"}


def discard(stream: IO[str]) -> None:
    """Redirect a stream to nowhere: Python flushes stdout again at exit, which must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Console(Console):
    outlives_reader = False

    def on_broken_pipe(self) -> None:
        """Fall silent if the work continues without a reader; else raise, as `print` does."""
        if not self.outlives_reader:
            raise  # the BrokenPipeError that this is called for
        self.quiet = True
        discard(self.file)
        with suppress(OSError):  # stderr may be the pipe that was closed
            print("nothing reads the output any more: the work continues without printing", file=sys.stderr)


def console(stream: IO[str] | None = None, *, outlives_reader: bool = False) -> Console:
    """Return a console on `stream` (stdout unless given) that prints text unchanged.

    When its reader ends, as `head` does, printing raises BrokenPipeError; with `outlives_reader` it says so on stderr
    once and prints nothing more.
    """
    file = stream or sys.stdout
    width = None if file.isatty() else PIPE_WIDTH
    out = _Console(file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)
    out.outlives_reader = outlives_reader
    return out


def plain(text: str) -> str:
    """Return the text with control characters and other unprintable ones escaped, so that it fits one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def without_secrets(text: str) -> str:
    """Return the text with the passwords and tokens of its URL replaced by `***`; a text that is no URL as it is."""
    if "://" not in text:
        return text
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return text


def short(value: HyperValue, digits: int = 3) -> str:
    """Return a value in few digits: `0.000316`, `1920`, `unset`, `false`."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10**digits and math.isfinite(value) else f"{value:.{digits}g}"
    return plain(str(value))


def amount(count: float) -> str:
    """Return bytes in the unit that fits, binary as for memory: `3.21 GiB`, `120 MiB`."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a readable time: `45 s`, `12 min`, `2 h 05 min`, `3 d 04 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"


def measured(number: float | None) -> str:
    """Return a number with three significant digits, zeros included: `4.00`, `201`; `-` if there is none.

    From 1000 on, the whole part keeps all its digits.
    """
    if number is None:
        return NOTHING
    is_whole = 99.95 <= abs(number) < math.inf  # three digits leave no place for a decimal
    return f"{number:.0f}" if is_whole else f"{number:#.3g}"


def counted(count: int, thing: str) -> str:
    """Return `1 trial` or `3 trials`; `thing` is the singular."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def plus_minus(mean: float | None, se: float | None = None) -> str:
    """Return `1.823 ± 0.051`: with as many decimals as the standard error justifies; `-` if there is no number."""
    if mean is None or se is None or not math.isfinite(se) or se <= 0:
        return measured(mean)
    decimals = min(4, max(0, 1 - math.floor(math.log10(se))))
    return f"{mean:.{decimals}f} ± {se:.{decimals}f}"


def params_line(params: Mapping[str, HyperValue]) -> str:
    """Return values on one line: `lam=0.95 kl_coef=0.1`."""
    return " ".join(f"{plain(name)}={short(value)}" for name, value in params.items())


def report_line(report: StepReport, last: int) -> str:
    """Return the line of a step in a run of `last` iterations: `step  3/12  episode 192  score 0.512  KL 1.94`."""
    metrics = report.metrics
    parts = [f"step {report.step:>{len(str(last))}}/{last}", f"episode {report.episode}"]
    parts += [f"{label} {measured(metrics[name])}" for name, label in _STEP_READINGS.items() if name in metrics]
    if report.is_evaluation:
        parts.append(f"eval reward {plus_minus(metrics['eval/reward'], metrics.get('eval/reward_se'))}")
        parts.append(f"eval KL {plus_minus(metrics.get('eval/kl'), metrics.get('eval/kl_se'))} {KL_UNIT}")
    return "  ".join(parts)


def parts_text(parts: Mapping[str, float | None]) -> str:
    """Return ` (helpful 0.5, brief -1.00)` for a reward of several parts, else an empty text."""
    if len(parts) < 2:
        return ""
    return f" ({', '.join(f'{plain(name)} {measured(value)}' for name, value in parts.items())})"


SAMPLES_SHOWN = 3
_PROMPT_END, _RESPONSE_BEGIN = 160, 320
"""Characters of a long prompt and of a long response that are shown."""


def samples_table(report: StepReport) -> Table:
    """Return a table of the first prompts' responses; long texts show the prompt's end and the response's beginning."""
    title = f"Samples at step {report.step}, episode {report.episode}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("prompt", "response", "reward"):
        table.add_column(name, overflow="fold")
    for sample in report.samples[:SAMPLES_SHOWN]:
        prompt, response = sample.prompt, sample.response.strip()
        if len(prompt) > _PROMPT_END:
            prompt = f"…{prompt[-_PROMPT_END:]}"
        if len(response) > _RESPONSE_BEGIN:
            response = f"{response[:_RESPONSE_BEGIN]}…"
        table.add_row(plain(prompt), plain(response), f"{measured(sample.reward)}{parts_text(sample.parts)}")
    return table


def dumps(data: object, indent: int | None = 2) -> str:
    """Return `data` as JSON text; numbers that are not finite become null."""
    return json.dumps(_finite_only(data), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite_only(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite_only(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite_only(item) for item in data]
    return data
