"""Rewards by Python functions: what they are given, what they may return, and whom their errors blame."""

import asyncio
import itertools
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo_core.data.task import Prompt, RewardPart, Scored
from ppo_core.errors import RewardError, RewardOutage, TaskError
from ppo_core.rewards.combined import load_reward

CPU = torch.device("cpu")
PROMPTS = [
    Prompt("12+7=", {"answer": "19", "level": 1}),
    Prompt("2+2=", {"answer": "4"}),
    Prompt("1+1=", {"answer": "2", "level": 3}),
]
RESPONSES = ["19", "5", ""]
TOKENS = [["1", "9"], ["5"], []]
ENDED = [True, False, True]
Write = Callable[..., RewardPart]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a module of rewards and returns the part of its function `score`."""
    numbers = itertools.count()

    def make(source: str, function: str = "score") -> RewardPart:
        file = tmp_path / f"rewards{next(numbers)}.py"
        file.write_text(source)
        return RewardPart("exact", "function", f"{file}:{function}")

    return make


def score(part: RewardPart, prompts: Sequence[Prompt] = PROMPTS, *, known: Sequence[Prompt] | None = None) -> Scored:
    rows = len(prompts)
    return load_reward([part], CPU, known)(prompts, RESPONSES[:rows], TOKENS[:rows], ENDED[:rows])


# --- what a function is given


def test_it_is_given_the_columns_it_names_and_nothing_else(write: Write) -> None:
    part = write(
        "def score(responses, answer, level, missing=7):\n"
        "    assert level == [1, None, 3] and missing == 7\n"
        "    return [response == right for response, right in zip(responses, answer)]"
    )
    assert score(part).totals == [1.0, 0.0, 0.0]


def test_with_kwargs_it_is_given_everything(write: Write) -> None:
    part = write(
        "def score(prompts, **rest):\n"
        "    assert prompts == ['12+7=', '2+2=', '1+1=']\n"
        "    assert rest == {'responses': ['19', '5', ''], 'completions': ['19', '5', ''], 'tokens': [['1', '9'], ['5'], []], 'ended': [True, False, True],\n"
        "                    'answer': ['19', '4', '2'], 'level': [1, None, 3]}\n"
        "    return [1, 2, 3]"
    )
    assert score(part).totals == [1, 2, 3]


def test_chats_come_as_messages(write: Write) -> None:
    part = write("def score(messages):\n    return [len(chat) if chat else -1 for chat in messages]")
    chat = Prompt("<user>hi", {}, ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}))
    assert score(part, [chat, Prompt("plain")]).totals == [2, -1]


def test_trls_form_is_given_what_trl_gives_it(write: Write) -> None:
    part = write(
        "def score(prompts, completions, **kwargs):\n"
        "    assert prompts == [[{'role': 'user', 'content': 'hi'}], 'plain'], prompts\n"
        "    assert completions == [[{'role': 'assistant', 'content': '19'}], '5']\n"
        "    assert kwargs['responses'] == ['19', '5'] and kwargs['answer'] == ['1', '2']\n"
        "    return [1, 2]"
    )
    chat = Prompt("<user>hi", {"answer": "1"}, ({"role": "user", "content": "hi"},))
    assert score(part, [chat, Prompt("plain", {"answer": "2"})]).totals == [1, 2]


def test_ours_is_given_texts_of_the_same_prompts(write: Write) -> None:
    part = write("def score(prompts, responses):\n    return [len(text) for text in prompts]")
    chat = Prompt("<user>hi", {}, ({"role": "user", "content": "hi"},))
    assert score(part, [chat, Prompt("plain")]).totals == [8, 5]


@pytest.mark.parametrize("helper", ["import late_{n}", "import package_{n}.part as late_{n}"])
def test_a_file_imports_its_neighbours_when_it_is_called(write: Write, tmp_path: Path, helper: str) -> None:
    number = tmp_path.name.replace("-", "_")  # a module is imported once
    (tmp_path / f"late_{number}.py").write_text("EXTRA = 0.25")
    (tmp_path / f"package_{number}").mkdir()
    (tmp_path / f"package_{number}" / "part.py").write_text("EXTRA = 0.25")
    statement = helper.format(n=number)
    path = list(sys.path)
    part = write(f"def score(responses):\n    {statement}\n    return [late_{number}.EXTRA] * len(responses)")
    assert score(part).totals == [0.25, 0.25, 0.25]
    assert sys.path == path


# --- async


def test_an_async_function_and_a_list_of_coroutines_are_awaited_together(write: Write) -> None:
    """Each sample's coroutine waits for all others', as calls of a server do; the second call finds the same loop."""
    source = (
        "import asyncio\n"
        "LOOPS = []\n"
        "async def one(response, there, all_there, count):\n"
        "    there.append(response)\n"
        "    if len(there) == count:\n"
        "        all_there.set()\n"
        "    await asyncio.wait_for(all_there.wait(), 20)\n"
        "    return len(response)\n"
        "def coroutines(responses):\n"
        "    there, all_there = [], asyncio.Event()\n"
        "    return [one(response, there, all_there, len(responses)) for response in responses]\n"
        "async def whole(responses):\n"
        "    LOOPS.append(asyncio.get_running_loop())\n"
        "    assert len(set(map(id, LOOPS))) == 1\n"
        "    return await asyncio.gather(*coroutines(responses))\n"
    )
    for name in ("coroutines", "whole"):
        reward = load_reward([write(source, name)], CPU)
        for _ in range(2):
            assert reward(PROMPTS, RESPONSES, TOKENS, ENDED).totals == [2.0, 1.0, 0.0]


def test_async_functions_of_several_parts_are_awaited_together(write: Write) -> None:
    """Each waits for the other: one after the other they would wait for ever."""
    here, there = (
        write(
            "import asyncio\n"
            f"from {__name__} import MEETING\n"
            f"async def call(responses):\n"
            f"    MEETING[{mine!r}].set()\n"
            f"    await MEETING[{other!r}].wait()\n"
            "    return [len(response) for response in responses]\n"
            "class Called:\n"
            "    async def __call__(self, responses):\n"
            "        return await call(responses)\n"
            "called = Called()\n",
            name,
        )
        for mine, other, name in (("here", "there", "call"), ("there", "here", "called"))
    )
    for event in MEETING.values():
        event.clear()
    parts = [replace(here, timeout=5.0), replace(there, name="other", weight=2.0)]
    assert load_reward(parts, CPU)(PROMPTS, RESPONSES, TOKENS, ENDED).totals == [6.0, 3.0, 0.0]


MEETING = {"here": asyncio.Event(), "there": asyncio.Event()}


def test_what_an_async_function_raises_names_the_sample(write: Write) -> None:
    part = write("async def score(responses):\n    return [int(response) for response in responses]")
    with pytest.raises(RewardError) as caught:
        score(part)
    assert "raised ValueError" in str(caught.value) and "on sample 2 " in str(caught.value)
    assert not isinstance(caught.value, RewardOutage)


# --- how long it may take

WAITS = {
    "a pattern": "import re\ndef wait():\n    re.match(r'(a+)+$', 'a' * 40 + 'b')\n",  # lets no other thread run
    "a loop": "def wait():\n    while True:\n        try:\n            pass\n        except Exception:\n            pass\n",
    "a lock": "import threading\ndef wait():\n    threading.Event().wait()\n",
    "a process": "import subprocess\ndef wait():\n    subprocess.run(['sleep', '1000'])\n",
}


@pytest.mark.parametrize(("what", "kind"), [*((what, "def") for what in WAITS), ("a lock", "async def")])
def test_a_sample_that_hangs_is_named_and_tried_again_as_in_an_outage(write: Write, what: str, kind: str) -> None:
    part = write(
        f"{WAITS[what]}{kind} score(responses):\n"
        "    for response in responses:\n"
        "        if response == '5':\n"
        "            wait()\n"
        "    return [1] * len(responses)"
    )
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(RewardOutage) as caught:
        score(replace(part, timeout=1.0))
    assert str(caught.value) == f'reward part "exact": {part.where} gave no answer within 1 s; on {SECOND}{ONE_BY_ONE}'
    assert signal.getsignal(signal.SIGVTALRM) is before


@pytest.mark.parametrize("what", ["a pattern", "a loop", "a lock"])
def test_a_system_without_such_timers_limits_by_the_alarm(
    write: Write, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppo_core.rewards.function._LIBC", object())
    part = write(f"{WAITS[what]}def score(responses):\n    return [wait() if r == '5' else 1 for r in responses]")
    before, others = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    with pytest.raises(RewardOutage) as caught:
        score(replace(part, timeout=1.0))
    assert str(caught.value).endswith(f"no answer within 1 s; on {SECOND}{ONE_BY_ONE}")
    assert signal.getsignal(signal.SIGALRM) is before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (others > 0), "an alarm that was set before goes on"


def test_a_call_that_hangs_once_is_repeated(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    part = write(
        "import threading\nCALLS = []\ndef score(responses):\n"
        "    CALLS.append(len(responses))\n"
        "    if len(CALLS) == 1:\n"
        "        threading.Event().wait()\n"
        "    return CALLS[:3]"
    )
    with caplog.at_level(logging.WARNING):
        # The whole, each of the three samples, the whole again.
        assert score(replace(part, timeout=1.0)).totals == [3, 1, 1]
    [told] = caplog.messages
    assert "3 samples together" in told


def test_a_batch_that_hangs_as_a_whole_is_scored_twice_at_most(write: Write, tmp_path: Path) -> None:
    part = write(
        "import pathlib, threading\ndef score(responses):\n"
        f"    with pathlib.Path({str(tmp_path / 'calls')!r}).open('a') as calls:\n"
        "        print(len(responses), file=calls)\n"
        "    if len(responses) > 1:\n"
        "        threading.Event().wait()\n"
        "    return [1]"
    )
    with pytest.raises(RewardOutage) as caught:
        score(replace(part, timeout=1.0, retries=9))
    assert "3 samples together but on none of them alone" in str(caught.value)
    assert (tmp_path / "calls").read_text().split() == ["3", "1", "1", "1", "3"]


def test_a_reward_that_limits_its_own_time_keeps_its_alarm(write: Write) -> None:
    source = (
        "import signal, threading\n"
        "def late(*_):\n    raise TimeoutError\n"
        "def score(responses):\n"
        "    signal.signal(signal.SIGALRM, late)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "    try:\n        threading.Event().wait()\n    except TimeoutError:\n        pass\n"
        "    finally:\n        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "    {end}"
    )
    assert score(write(source.format(end="return [7] * len(responses)"))).totals == [7, 7, 7]
    with pytest.raises(RewardOutage):
        score(replace(write(source.format(end="threading.Event().wait()")), timeout=1.0))


def test_a_function_of_a_module_is_found_by_its_import_path() -> None:
    part = RewardPart("exact", "function", f"{__name__}:answered")
    assert score(part).totals == [1.0, 1.0, 0.0]


def answered(responses: list[str]) -> list[bool]:
    return [bool(response) for response in responses]


def test_files_of_the_same_name_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    parts = []
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text(
            "from dataclasses import dataclass\n@dataclass\nclass Side:\n    name: str\n"
            f"def score(responses):\n    return [len(Side({name!r}).name)] * len(responses)"
        )
        parts.append(RewardPart(name, "function", f"{tmp_path / name / 'reward.py'}:score"))
    assert load_reward(parts, CPU)(PROMPTS, RESPONSES, TOKENS, ENDED).parts == {"left": [4, 4, 4], "right": [5, 5, 5]}


# --- what it may return


@pytest.mark.parametrize(
    "answer",
    [
        "(1, True, 3.5)",
        "np.array([1.0, 1.0, 3.5], dtype=np.float32)",
        "[np.float32(1), np.bool_(True), np.array(3.5)]",
        "torch.tensor([1.0, 1.0, 3.5], requires_grad=True)",
        "torch.tensor([1.0, 1.0, 3.5], dtype=torch.bfloat16)",
        "[torch.tensor(1.0), 1, torch.tensor(3.5)]",
        "[Fraction(1), Decimal(1), 3.5]",
        "pd.Series([1, 1, 3.5])",
    ],
)
def test_numbers_of_any_library_are_scores(write: Write, answer: str) -> None:
    part = write(
        "import numpy as np, pandas as pd, torch\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        f"def score():\n    return {answer}"
    )
    assert score(part).totals == [1.0, 1.0, 3.5]


@pytest.mark.parametrize("answer", ["[[1, 2], [3], []]", "[np.array([1, 2]), torch.tensor([3.0]), ()]"])
def test_a_list_a_response_rewards_its_tokens(write: Write, answer: str) -> None:
    scored = score(write(f"import numpy as np, torch\ndef score():\n    return {answer}"))
    assert scored.dense == [[1.0, 2.0], [3.0], []] and scored.totals == [3.0, 3.0, 0.0]
    assert all(type(value) is float for row in scored.dense for value in row)


# --- what is refused when scoring

FIRST = "sample 0 (prompt '12+7=', response '19')"
SECOND = "sample 1 (prompt '2+2=', response '5')"
ONE_BY_ONE = ", where trying one by one took as long again"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[1, float('nan'), 2]", f"gave nan for {SECOND}, not a finite number in float32"),
        ("[1, 10**400, 2]", f"gave inf for {SECOND}, not a finite number in float32"),
        ("[1, None, 2]", f"gave None for {SECOND}, not a number"),
        ("['1', '2', '3']", f"gave '1' for {FIRST}, not a number"),
        ("[1, [2], 3]", f"gave [2] for {SECOND}, not a number"),
        ("'abc'", "gave 'abc', not a list of one number per response"),
        ("None", "gave None, not a list of one number per response"),
        ("7.0", "gave 7.0, not a list of one number per response"),
        ("[1]", f"gave 1 score for 3 responses; the first without one is {SECOND}"),
        ("[1] * 4", "gave 4 scores for 3 responses; the last is sample 2 (prompt '1+1=', response '')"),
        ("[[1, 2], 3, []]", f"gave 3 for {SECOND}, not a list of one number per token as for the first one"),
        ("[[1, 2], [3, 4], []]", f"gave 2 numbers for the 1 token of {SECOND}; a list per response rewards its tokens"),
        ("[[1, float('-inf')], [3], []]", f"gave -inf for token 1 of {FIRST}, not a finite number in float32"),
    ],
)
def test_an_answer_that_is_no_score_names_the_sample(write: Write, answer: str, message: str) -> None:
    part = write(f"def score():\n    return {answer}")
    with pytest.raises(RewardError) as caught:
        score(part)
    assert str(caught.value) == f'reward part "exact": {part.where} {message}'


def test_what_it_raises_is_chained_and_names_the_sample_that_is_to_blame(write: Write) -> None:
    part = write("def score(responses, answer):\n    return [int(response) for response in responses]")
    with pytest.raises(RewardError) as caught:
        score(part)
    assert f"{part.where} raised ValueError: " in str(caught.value)
    assert str(caught.value).endswith(
        f"at {part.where.removesuffix(':score')}:2; on sample 2 (prompt '1+1=', response '')"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__cause__.__traceback__ is not None


def test_a_sample_at_which_the_search_for_a_culprit_takes_too_long_is_not_said_to_have_raised(write: Write) -> None:
    part = write(
        "import threading\ndef score(responses):\n"
        "    assert len(responses) == 1\n"
        "    if responses == ['5']:\n"
        "        threading.Event().wait()\n"
        "    return [1]"
    )
    with pytest.raises(RewardError) as caught:
        score(replace(part, timeout=1.0))
    assert str(caught.value).endswith(f"on {SECOND}{ONE_BY_ONE}") and not isinstance(caught.value, RewardOutage)


def test_a_function_that_exits_has_failed(write: Write) -> None:
    with pytest.raises(RewardError, match=r"raised SystemExit: bye at .*sample 0"):
        score(write("import sys\ndef score(responses):\n    sys.exit('bye')"))


def test_where_only_the_batch_raises_the_error_says_so(write: Write) -> None:
    part = write("def score(responses):\n    assert len(responses) == 1, 'one at\\na time'")
    with pytest.raises(RewardError) as caught:
        score(part)
    assert "raised AssertionError: one at a time at " in str(caught.value)
    assert str(caught.value).endswith(f"on 3 samples together but on none of them alone; the first is {FIRST}")


def test_long_texts_are_cut_in_errors(write: Write) -> None:
    part = write("def score():\n    return [None]")
    with pytest.raises(RewardError) as caught:
        load_reward([part], CPU)([Prompt("p\n" * 500)], ["r" * 500], [["r"]], [True])
    assert len(str(caught.value)) < len(part.where) + 250 and "\n" not in str(caught.value)


LACKING = (
    'asks for "anwser", which is not a column; available: prompts, responses, completions, tokens, ended, answer, level'
)


def test_a_name_that_is_no_column_is_refused_when_called(write: Write) -> None:
    part = write("def score(responses, anwser):\n    return [0] * len(responses)")
    reward = load_reward([part], CPU)
    with pytest.raises(RewardError) as caught:
        reward(PROMPTS, RESPONSES, TOKENS, ENDED)
    assert str(caught.value) == f'reward part "exact": {part.where} {LACKING}; did you mean "answer"?'


# --- what is refused when loading


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nothing", ": nothing is not a function such as my_package.rewards:score or rewards.py:score"),
        ("rewards.py:", ": rewards.py: is not a function such as my_package.rewards:score or rewards.py:score"),
        ("nowhere.at_all:score", ': function "nowhere.at_all:score": module "nowhere" not found'),
        (".relative:score", ": importing .relative raised TypeError: "),
        ("{folder}/none.py:score", ": file {folder}/none.py not found"),
        ("{folder}/good.py:scroe", ': {folder}/good.py has no function "scroe"; it has: score; did you mean'),
        ("{folder}/empty.py:score", ': {folder}/empty.py has no function "score"; it defines none'),
        ("{folder}/good.py:NUMBER", ': {folder}/good.py has no function "NUMBER"; it has: score'),
        ("{folder}/syntax.py:score", ": importing {folder}/syntax.py raised SyntaxError: "),
        ("{folder}/raises.py:score", ": importing {folder}/raises.py raised ModuleNotFoundError: No module named"),
        ("{folder}/exits.py:score", ": importing {folder}/exits.py raised SystemExit: 3"),
        ("{folder}/position.py:score", ": {folder}/position.py:score takes arguments by position only; they are"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_had_is_refused(tmp_path: Path, where: str, message: str) -> None:
    sources = {
        "good": "NUMBER = 3\ndef score(responses):\n    return [0]",
        "empty": "",
        "syntax": "def score(:",
        "raises": "import nope",
        "exits": "import sys\nsys.exit(3)",
        "position": "def score(prompts, responses, /):\n    return [0]",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(TaskError) as caught:
        load_reward([RewardPart("exact", "function", where.format(folder=tmp_path))], CPU)
    assert str(caught.value).startswith(f'reward part "exact"{message.format(folder=tmp_path)}')
    assert "\n" not in str(caught.value)


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    file = tmp_path / "half_loaded_rewards.py"
    file.write_text("ready = True\nimport nope")
    with pytest.raises(TaskError):
        load_reward([RewardPart("exact", "function", f"{file}:score")], CPU)
    assert not [name for name in sys.modules if name.startswith(file.stem)]
