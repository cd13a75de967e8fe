"""What the listings say of trials that nobody runs, of totals that were lowered, and of rewards of several parts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tuner.invoke import Invoke
from tuner.store import Store


@pytest.fixture
def store(made: str, own_folder: Path) -> Iterator[Store]:
    opened = Store.open(str(own_folder / "made.db"))
    yield opened
    opened.close()


def test_a_trial_is_running_only_while_a_controller_lives(ppo_tuner: Invoke, made: str, store: Store) -> None:
    def said() -> list[str]:
        texts = [ppo_tuner(*argv)[1] for argv in (["show", made], ["show", made, "7"], ["compare", made, "0", "7"])]
        data = json.loads(ppo_tuner("show", made, "7", "--json")[1])
        found = [
            re.findall(r"\b(running|interrupted)\b", text.replace('made": task reviews, running', "")) for text in texts
        ]
        assert all(len(set(words)) == 1 for words in found)
        return [data["status"], *(words[0] for words in found)]

    assert said() == ["interrupted"] * 4
    store.acquire(made)  # by this process, which lives
    assert said() == ["running"] * 4


def test_of_many_trials_the_best_the_latest_and_the_unended_are_listed(
    ppo_tuner: Invoke, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(*flags: str) -> list[int]:
        text = ppo_tuner("show", made, *flags)[1].partition("Searched values")[0]
        return [int(number) for number in re.findall(r"^ +(?:\* )?(\d+) +[a-z]+ ", text, re.MULTILINE)]

    assert listed() == [0, 1, 2, 3, 4, 5, 6, 7]
    monkeypatch.setattr("tuner.cli.report.MOST_LISTED", 5)
    monkeypatch.setattr("tuner.cli.report.LISTED_EACH", 1)
    assert listed() == [2, 7]
    assert listed("--all") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (
        "2 of 8 trials: the 1 best, the 1 latest, and those that have not ended. All of them: ppo-tuner show made --all"
    ) in ppo_tuner("show", made)[1].splitlines()
    monkeypatch.setenv("PPO_TUNER_STORAGE", "elsewhere.db")
    again = "ppo-tuner show made --all --storage sqlite:///made.db\n"
    assert f"All of them: {again}" in ppo_tuner("show", made, "--storage", "made.db")[1]
