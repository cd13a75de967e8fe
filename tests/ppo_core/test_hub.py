"""Pushing a trained model to the hub: what arrives, what is refused before the training, and that a model stays here."""

import base64
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from ppo_core import PPOConfig
from ppo_core.__main__ import main
from ppo_core.cli import publish
from ppo_core.cli.ending import Ending
from ppo_core.cli.run_folder import ConfirmedReading, Run, RunOrigin
from ppo_core.data.task import Prompts, TaskAssets
from tests.tuner import quick_run

Train = Callable[..., tuple[int, str, str]]
TOKEN = "hf_test"


@dataclass
class FakeHub:
    """A hub that is served, and all that it was told."""

    address: str = ""
    refusals: dict[str, int] = field(default_factory=dict)
    """Statuses to answer with, by a part of the path."""
    made: list[Mapping[str, Any]] = field(default_factory=list)
    """Repositories as they were asked for."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What was committed, by `user/name/path`."""
    messages: list[str] = field(default_factory=list)
    """Of the commits."""
    asked: list[str] = field(default_factory=list)
    """Paths."""

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of a request's answer."""
        self.asked.append(path)
        for part, status in self.refusals.items():
            if part in path:
                return status, {"error": f"no {part} for you"}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.made.append(asked)
            return 200, {"url": f"{self.address}/{asked['organization'] or 'me'}/{asked['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            return 200, {"files": modes}
        if "/commit/" in path:
            return 200, self._commit(path.removeprefix("/api/models/").split("/commit/")[0], body)
        return 404, {"error": f"no {method} {path} here"}

    def _commit(self, repo: str, body: bytes) -> Any:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                content = base64.b64decode(line["value"]["content"])
                self.files[f"{repo}/{line['value']['path']}"] = content
        return {"commitUrl": f"{self.address}/{repo}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def served() -> Iterator[FakeHub]:
    """Serve a hub on a free port of this machine."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            token = self.headers.get("Authorization", "")
            status, answer = hub.answer(self.command, self.path.partition("?")[0], token, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            if status >= 400:
                self.send_header("X-Error-Message", answer["error"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub of this machine, to which this process has a token."""
    with served() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Train:
    """Trains with the quick trainer into `out`; returns the exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("ppo_core.cli.training.make_trainer", quick_run.quick_trainer)

    def invoke(*argv: str) -> tuple[int, str, str]:
        begin = () if "--resume" in argv else ("--task", quick_run.NAME, "--output", "out")
        status = main([*begin, *argv])
        return status, *capsys.readouterr()

    return invoke


def one_error(stderr: str) -> str:
    [line] = stderr.splitlines()
    return line


# What arrives


def test_the_model_and_its_card_arrive_and_the_folder_stays(train: Train, hub: FakeHub, tmp_path: Path) -> None:
    status, stdout, stderr = train("--push-to-hub", "me/mine")
    assert (status, stderr) == (0, "")
    assert f"pushed out/model to {hub.address}/me/mine" in stdout
    assert hub.made == [{"name": "mine", "organization": "me"}]
    assert sorted(hub.files) == ["me/mine/README.md", "me/mine/model.txt"]
    assert hub.files["me/mine/README.md"] == (tmp_path / "out" / "model" / "README.md").read_bytes()
    assert hub.messages == ["out, trained with PPO Tuner"]


def test_without_a_name_the_repository_is_the_outputs_of_the_tokens_user(train: Train, hub: FakeHub) -> None:
    status, stdout, _ = train("--push_to_hub", "--hub_private_repo", "--json")
    assert status == 0 and json.loads(stdout)["hub"] == f"{hub.address}/me/out"
    made = hub.made[0]
    assert made["name"] == "out" and (made.get("visibility") == "private" or made.get("private"))  # before hub 2
    assert "me/out/model.txt" in hub.files


def test_the_best_checkpoint_is_pushed_where_the_end_is_over_the_budget(train: Train, hub: FakeHub) -> None:
    status, stdout, _ = train("--push_to_hub", "--hub_model_id", "me/best", "--learning_rate", "4e-3",
                              "--eval_every_episodes", "64")  # fmt: skip
    assert status == 0 and "pushed out/best_model to" in stdout
    assert b"This model is from the best checkpoint within the KL budget." in hub.files["me/best/README.md"]


def test_an_interrupted_run_is_pushed_when_it_is_resumed(
    train: Train, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(quick_run.INTERRUPT_ONCE, str(tmp_path / "interrupted"))
    assert train("--push_to_hub", "me/mine")[0] == 130
    assert hub.files == {}
    assert train("--resume", "out")[0] == 0 and "me/mine/model.txt" in hub.files


# What is refused, before anything is trained


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where something is trained."""

    def make_trainer(*_: Any, **__: Any) -> Any:
        raise AssertionError("it trains")

    monkeypatch.setattr("ppo_core.cli.training.make_trainer", make_trainer)


@pytest.mark.parametrize(
    ("flags", "refusals", "status", "told"),
    [
        (["--push_to_hub", "me/a--b"], {}, 2, "--push_to_hub me/a--b is not allowed: "),
        (["--push_to_hub", "a/b/c"], {}, 2, "--push_to_hub a/b/c is not allowed: "),
        (["--push_to_hub", "me/a", "--hub_model_id", "me/b"], {}, 2, "name two repositories"),
        (["--hub_private_repo"], {}, 2, "--hub_private_repo does nothing without --push_to_hub"),
        (["--push_to_hub"], {"create": 401, "api/models": 404}, 1, "the hub refuses (401): no create for you"),
        (["--push_to_hub", "them/a"], {"create": 403, "api/models": 404}, 1,
         "--push_to_hub: cannot create the repository them/a: the hub refuses (403): no create for you"),
        (["--push_to_hub", "me/a"], {"create": 400}, 1, "the hub refuses (400): no create for you"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_before_the_training_and_leaves_nothing(
    train: Train, untrained: None, hub: FakeHub, tmp_path: Path, flags: list[str], refusals: dict[str, int], status: int,
    told: str,
) -> None:  # fmt: skip
    hub.refusals = refusals
    got, stdout, stderr = train(*flags)
    assert (got, stdout.replace("preparing: making nothing\n", "")) == (status, "")
    assert told in one_error(stderr)
    assert not (tmp_path / "out").exists() and hub.files == {}


def test_no_token_no_training(train: Train, untrained: None, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert "log in with `hf auth login`, or set HF_TOKEN" in one_error(train("--push_to_hub")[2])
    assert hub.made == []


@pytest.mark.parametrize(("part", "code"), [("commit", 403), ("preupload", 401)])
def test_a_push_that_fails_leaves_the_model_and_says_how_to_push_it_later(
    train: Train, hub: FakeHub, tmp_path: Path, part: str, code: int
) -> None:
    hub.refusals = {part: code}
    status, stdout, stderr = train("--push_to_hub", "me/mine", "--hub_private_repo", "--json")
    error = [line for line in stderr.splitlines() if "error: " in line]
    assert status == 1 and json.loads(stdout)["hub"] is None
    assert error == [stderr.splitlines()[-1]]
    assert f"pushing the model to me/mine failed: the hub refuses ({code})" in error[0]
    assert "the model stays in out/model; push it later with: hf upload me/mine out/model . --private" in error[0]
    assert (tmp_path / "out" / "model" / "model.txt").exists()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["finished"]


# The card


CONFIRMED = ConfirmedReading(1_920, 3, 256, 1.9349, 1.8912, 1.97, 5.512)


def card(folder: Path, origin: RunOrigin | None, **config: int) -> ModelCard:
    run = Run("t", PPOConfig(**config), "cpu", folder, 1, (), "mine", "id", None, 300.0, "train", origin=origin)
    run.model.mkdir(parents=True)
    assets = TaskAssets("me/base", (), Prompts.of_texts("a", "b", "c"))
    publish.write_card(run.model, run, replace(quick_run.TASK, name="my task"), assets, [], Ending(kl_budget=10.0))
    return ModelCard.load(run.model / "README.md")


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        (
            RunOrigin("reviews", 32, (CONFIRMED,)),
            "- 1920 episodes: reward 1.935 [1.891, 1.970] (95% t-interval), KL 5.51 ",
        ),
        (RunOrigin("s", 3, (replace(CONFIRMED, reward_low=None, kl=None),)), "- 1920 episodes: reward 1.93; mean of 3"),
        (RunOrigin("s", 3, (CONFIRMED,), ("lam", "kl_coef")), "with other values of `lam`, `kl_coef`: the trial's"),
        (RunOrigin("s", 3), "One search run chose it; it is not confirmed on fresh seeds."),
        (None, "## PPO settings other than the defaults"),
    ],
)
def test_the_card_says_where_the_configuration_is_from(tmp_path: Path, origin: RunOrigin | None, told: str) -> None:
    found = card(tmp_path, origin, total_episodes=1_920)
    assert told in found.content
    assert ("Where the configuration comes from" in found.content) == (origin is not None)
    assert found.data.tags == ["ppo", "rlhf", "ppo-tuner"]
