"""Asking several things at once: order, errors, and that nothing is left under way."""

import signal
import socket
import threading

import pytest

from ppo_core.rewards.parallel import Line, ask_all
from tests.waiting import until


def reward_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reward")]


def test_answers_are_in_the_order_of_the_questions() -> None:
    last_began = threading.Event()

    def ask(question: int, line: Line) -> int:
        if question == 2:
            last_began.set()
        assert last_began.wait(20), "the first is answered last"
        return question * 10

    assert ask_all(ask, [0, 1, 2], 3) == [0, 10, 20]
    assert ask_all(ask, [], 3) == []
    assert not reward_threads()


@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_the_error_is_the_first_in_order_and_later_questions_are_not_asked(at_once: int) -> None:
    asked = []

    def ask(question: int, line: Line) -> int:
        asked.append(question)
        if question in (1, 2):
            raise ValueError(str(question))
        if question > 2:
            line.wait(1e6)
        return question

    with pytest.raises(ValueError, match=r"^1$"):
        ask_all(ask, range(100), at_once)
    assert not reward_threads() and max(asked) <= at_once


def test_an_interrupt_ends_what_is_under_way() -> None:
    main = threading.get_ident()

    def ask(question: int, line: Line) -> None:
        while question == 1 and not line.is_cut:
            signal.pthread_kill(main, signal.SIGINT)  # one that comes just before a wait begins does not end it
            line.wait(5)
        line.wait(1e6)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            ask_all(ask, [0, 1], 2)
    finally:
        signal.signal(signal.SIGINT, before)
    # One that was just being started is not joined; it ends all the same, long before its wait is over.
    until(lambda: not reward_threads())


@pytest.mark.parametrize("is_cut_first", [False, True], ids=["after it connected", "while it connected"])
def test_a_line_that_is_cut_breaks_its_connection_off(is_cut_first: bool) -> None:
    here, there = socket.socketpair()
    line = Line()
    with here, there:
        if is_cut_first:
            line.cut()
        line.hold(here)
        line.cut()
        assert line.is_cut
        here.settimeout(20)
        there.settimeout(20)
        assert here.recv(1) == b"" == there.recv(1)
    line.cut()  # of a socket that is closed
