"""How the tests get their browser: what is tried, in which order, and what a machine without one is told."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests import chromium

PLAYWRIGHT = [sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]


class Machine:
    """A machine on which commands are noted and not run; `gives` is the word in the command that brings a browser."""

    def __init__(self, gives: str | None) -> None:
        self.gives = gives
        self.commands: list[list[str]] = []
        self.has_browser = gives == ""

    def run(self, command: Sequence[str]) -> bool:
        self.commands.append(list(command))
        self.has_browser |= self.gives is not None and self.gives in command
        return self.has_browser or "update" in command


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Debian system with sudo."""
    monkeypatch.setattr(chromium.shutil, "which", lambda name: f"/usr/bin/{name}")


def words(command: list[str]) -> list[str]:
    return [word for word in command if word in ("sudo", "apt-get", "update", "install", "chromium", "playwright")]


APT = [["apt-get", "update"], ["apt-get", "install", "chromium"]]


@pytest.mark.parametrize(
    ("gives", "user", "ci", "system", "found", "commands"),
    [
        ("", 1000, "", False, True, []),
        ("playwright", 1000, "", False, True, [["playwright", "install", "chromium"]]),
        (None, 1000, "true", False, False, [["playwright", "install", "chromium"]]),
        (None, 0, "", False, False, [["playwright", "install", "chromium"]]),
        ("--yes", 0, "true", False, True, [["playwright", "install", "chromium"], *APT]),
        (None, 0, "true", False, False, [["playwright", "install", "chromium"], *APT]),
        ("--yes", 0, "", True, True, [["playwright", "install", "chromium"], *APT]),
        ("--yes", 1000, "", True, True, [["playwright", "install", "chromium"], *(["sudo", *line] for line in APT)]),
    ],
    ids=["there", "own build", "ci not root", "root not ci", "root in ci", "nothing helps", "make browser", "by sudo"],
)
def test_what_is_tried_in_which_order(
    gives: str | None,
    user: int,
    ci: str,
    system: bool,
    found: bool,
    commands: list[list[str]],
    apt: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    machine = Machine(gives)
    environment = {"CI": ci} if ci else {}
    result = chromium.install(lambda: machine.has_browser, machine.run, environment, system=system)
    assert result is found
    assert [words(command) for command in machine.commands] == commands
    assert not any("--with-deps" in command for command in machine.commands)


def test_a_browser_that_does_not_start_is_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub, real, playwrights = tmp_path / "chromium", tmp_path / "google-chrome", tmp_path / "own/a/b/chrome"
    for path, status in ((stub, 1), (real, 0)):
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("PLAYWRIGHT_BROWSERS_PATH", raising=False)
    places = list(chromium.candidates(str(playwrights)))
    assert places == [str(playwrights), str(stub), str(real)]
    assert [chromium.starts(place) for place in places] == [False, False, True]


def test_playwrights_headless_shell_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = tmp_path / "chromium_headless_shell-1255/chrome-headless-shell-linux64/chrome-headless-shell"
    shell.parent.mkdir(parents=True)
    shell.touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    assert str(shell) in chromium.candidates(str(tmp_path / "chromium-1255/chrome-linux64/chrome"))


def test_without_a_browser_the_one_command_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chromium, "starts", lambda path: False)
    assert chromium.main(["find"]) == 1
    assert capsys.readouterr().out.endswith("install it with: make browser\n")
    with sync_playwright() as playwright, pytest.raises(chromium.NoBrowser, match="install it with: make browser"):
        chromium.launch(playwright)
