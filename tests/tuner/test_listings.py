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
