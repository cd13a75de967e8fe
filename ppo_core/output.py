"""Output of a run: short lines for people, JSON for programs.

Text from a model, a file or an error is shown with its control characters escaped, and never as markup.
"""

import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
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

_FLOAT32 = 1e-7
"""Precision of a metric, as a share of it."""

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
    out = _Console(
        file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False, force_jupyter=False
    )
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
    """Return a number with three significant digits and its whole part: `4.00`, `201`, `1234`; `-` if there is none."""
    if number is None:
        return NOTHING
    is_whole = 99.95 <= abs(number) < math.inf  # three digits leave no place for a decimal
    return f"{number:.0f}" if is_whole else f"{number:#.3g}"


def decimals(numbers: Iterable[float | None], errors: Iterable[float | None] = ()) -> int:
    """Return with how many decimals numbers are printed, so that in any unit they are told apart.

    These show two digits of a usual standard error; where none is known, two of the numbers' usual distance from
    their median, and three of a usual one of them. None and what is not finite are left out.
    """
    known, steps = _finite(numbers), [error for error in _finite(errors) if error > 0]
    sizes = [abs(number) for number in known if number]
    if not steps and sizes:
        middle = statistics.median(known)
        gaps = [abs(number - middle) for number in known if number != middle]
        steps = [statistics.median_low(sizes) / 10, *([statistics.median(gaps)] if gaps else [])]
    elif steps:
        steps = [statistics.median_low(steps)]  # not the least: the first of a run's KLs are nearly exact
    step = max(min(steps, default=0.1), max(sizes, default=0.0) * _FLOAT32)
    return max(0, 1 - math.floor(math.log10(step)))


def _finite(numbers: Iterable[float | None]) -> list[float]:
    return [number for number in numbers if number is not None and math.isfinite(number)]


def fixed(number: float | None, places: int, *, signed: bool = False) -> str:
    """Return a number with that many decimals, as a difference with its sign; `-` if there is none."""
    if number is None or math.isnan(number):
        return NOTHING
    return f"{number:{'+' * signed}z.{places}f}"


def pluralize(count: float, thing: str) -> str:
    """Return `1 trial`, `3 trials` or `0.45 trials`; `thing` is the singular."""
    text = short(count)
    return f"{text} {thing}" if text == "1" else f"{text} {thing}s"


def nats(kl: float) -> str:
    """Return a KL that somebody set, such as a budget: `6 nats/response`, `1 nat/response`."""
    return METRICS["eval/kl"].with_unit(short(kl)).replace(" per ", "/")


def plus_minus(mean: float | None, se: float | None = None, places: int | None = None, *, signed: bool = False) -> str:
    """Return `1.823 ± 0.051`: with as many decimals as the standard error justifies (see `decimals`), unless their
    number is given, as for a column; `-` if there is no number.
    """
    places = decimals([mean], [se]) if places is None else places
    text = fixed(mean, places, signed=signed)
    return text if text == NOTHING or se is None or not 0 < se < math.inf else f"{text} ± {se:.{places}f}"


def params_line(params: Mapping[str, HyperValue]) -> str:
    """Return values on one line: `lam=0.95 kl_coef=0.1`."""
    return " ".join(f"{plain(name)}={short(value)}" for name, value in params.items())


def step_readings(metrics: Mapping[str, float], labels: Mapping[str, str]) -> list[str]:
    """Return a step's readings under these labels, and of a run that keeps its pace also what it keeps and its rate.

    A mean has the decimals that the spread around it justifies; a reading that is not there is an empty text.
    """
    texts = []
    for name, label in labels.items():
        value, spread = metrics.get(name), metrics.get(f"{name}_std")
        number = measured(value) if spread is None else fixed(value, decimals([value], [spread]))
        texts.append("" if value is None else f"{label} {number}")
    if (wanted := metrics.get("policy/kl_step_wanted")) is not None:
        step = measured(metrics.get("policy/kl_step"))
        texts += [f"KL step {step} of {measured(wanted)}", f"rate {short(metrics.get('lr'))}"]
    return texts


def report_line(report: StepReport, last: int) -> str:
    """Return the line of a step in a run of `last` iterations: `step  3/12  episode 192  score 0.512  KL 1.94`."""
    metrics = report.metrics
    parts = [f"step {report.step:>{len(str(last))}}/{last}", f"episode {report.episode}"]
    parts += filter(None, step_readings(metrics, _STEP_READINGS))
    if report.is_evaluation:
        parts.append(f"eval reward {plus_minus(metrics['eval/reward'], metrics.get('eval/reward_se'))}")
        parts.append(f"eval KL {plus_minus(metrics.get('eval/kl'), metrics.get('eval/kl_se'))} {KL_UNIT}")
    return "  ".join(parts)


MUCH_ROUNDING = 0.1
"""Share of the KL budget from which on what rounding shows is warned of."""


def rounding_line(report: StepReport, kl_budget: float) -> str | None:
    """Return a line on the KL that rounding alone shows, beside the budget; None of a step that has not measured it."""
    kl = report.metrics.get("eval/kl_rounding")
    if kl is None:
        return None
    text = f"rounding in bfloat16 shows a KL of {nats(kl)}, {kl / kl_budget:.1%} of the KL budget"
    return f"warning: {text}{_ROUNDING_ADVICE}" if has_much_rounding(report, kl_budget) else text


_ROUNDING_ADVICE = "; the training KL holds as much, so set bf16 = false, shorter responses or a larger kl_budget"


def has_much_rounding(report: StepReport, kl_budget: float) -> bool:
    """Return True if what rounding alone shows as KL was measured at the step and is a visible share of the budget."""
    return report.metrics.get("eval/kl_rounding", 0.0) >= MUCH_ROUNDING * kl_budget


def reward_texts(rewards: Sequence[float | None], parts: Sequence[Mapping[str, float | None]]) -> list[str]:
    """Return samples' rewards, with their parts if several, in shared decimals: `0.25 (helpful 0.50, brief -1.00)`."""
    places = decimals(rewards)
    places_of = {name: decimals(each.get(name) for each in parts) for each in parts for name in each}
    texts = []
    for reward, each in zip(rewards, parts, strict=True):
        named = [f"{plain(name)} {fixed(value, places_of[name])}" for name, value in each.items()]
        texts.append(fixed(reward, places) + (f" ({', '.join(named)})" if len(each) > 1 else ""))
    return texts


SAMPLES_SHOWN = 3
_PROMPT_END, _RESPONSE_BEGIN = 160, 320
"""Characters of a long prompt and of a long response that are shown."""


def plain_table(title: str, columns: Iterable[str], **column: Any) -> Table:
    """Return an empty table of these columns; `column` are rich's options of each."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, **column)
    return table


def samples_table(report: StepReport) -> Table:
    """Return a table of the first prompts' responses; long texts show the prompt's end and the response's beginning."""
    title = f"Samples at step {report.step}, episode {report.episode}"
    table = plain_table(title, ("prompt", "response", "reward"), overflow="fold")
    shown = report.samples[:SAMPLES_SHOWN]
    rewards = reward_texts([sample.reward for sample in shown], [sample.parts for sample in shown])
    for sample, reward in zip(shown, rewards, strict=True):
        table.add_row(_prompt_end(sample.prompt), _response_begin(sample.response), reward)
    return table


def pair_table(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    """Return a table of two samples of one prompt, as `samples.jsonl` holds them: the SFT policy's, a trained one's."""
    title = f"In answer to: {_prompt_end(before['prompt'])}"
    table = plain_table(title, ("policy", "response", "reward"), overflow="fold")
    samples = {"SFT": before, "trained": after}
    rewards = reward_texts([each["reward"] for each in samples.values()], [each["parts"] for each in samples.values()])
    for (name, sample), reward in zip(samples.items(), rewards, strict=True):
        table.add_row(name, _response_begin(sample["response"]), reward)
    return table


def _prompt_end(prompt: str) -> str:
    return plain(f"…{prompt[-_PROMPT_END:]}" if len(prompt) > _PROMPT_END else prompt)


def _response_begin(response: str) -> str:
    text = response.strip()
    return plain(f"{text[:_RESPONSE_BEGIN]}…" if len(text) > _RESPONSE_BEGIN else text)


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
