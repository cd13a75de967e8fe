"""The whole dashboard in a real browser: each view, hostile texts, the server's safety, and a study from end to end."""

import csv
import json
import os
import shlex
import socket
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.dashboard import browser as real
from tests.dashboard import fake_store
from tests.dashboard.browser import Server, Visit
from tests.processes import free_port, spawned
from tests.tuner.quick_trainer import FOLDER_VARIABLE
from tests.waiting import SECONDS, until
from tuner.store import Store
from tuner.study.status import Status

HOSTILE = (
    "=1+1<script>alert(1)</script><img src=x onerror=alert(2)>![x](http://127.0.0.1:9/x.png)"
    "[link](javascript:alert(3)) :red[red] $x$ \u202etxt.exe\u202c \x1b[31mred"
)
LITERAL = "<script>alert(1)</script><img src=x onerror=alert(2)>![x](http://127.0.0.1:9/x.png)"
LONG = f"{HOSTILE} " + "x" * 1_000_000
STUDY = """
name = "quick"
task = "tests.tuner.quick_trainer:TASK"
trainer = "tests.tuner.quick_trainer:gated"
trials = 2
threads = 1
[search]
learning_rate = { low = 1e-5, high = 1e-4 }
"""


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    with real.visit(browser) as opened:
        yield opened


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on the fake study, every text of which that a model or a person wrote is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    fake_store.build(folder / "store.db", courses=fake_store.COURSES[:9]).close()
    with closing(sqlite3.connect(folder / "store.db")) as connection, connection:
        connection.execute("UPDATE ppo_trials SET label = ?", [HOSTILE])
        connection.execute("UPDATE ppo_trials SET params = json_set(params, '$.lr_scheduler_type', '@SUM(1)')")
        connection.execute("UPDATE ppo_trials SET reason = json_set(reason, '$.message', ?)", [HOSTILE])
        connection.execute("UPDATE ppo_samples SET prompt = ? || prompt_index, response = ?", [HOSTILE, HOSTILE])
        connection.execute("UPDATE ppo_samples SET response = ? WHERE prompt_index = 1 AND step = 0", [LONG])
        connection.execute("UPDATE ppo_samples SET parts = ?", [json.dumps({HOSTILE: 1.0})])
    with closing(Store.open(f"sqlite:///{folder / 'store.db'}")) as store:
        study = store.study(fake_store.STUDY)
        store.place_order(study, "fork", 0, {"values": {"kl_coef": HOSTILE}, "label": HOSTILE})
    with real.serve(f"sqlite:///{folder / 'store.db'}", folder) as server:
        yield server


def test_every_view_shows_hostile_texts_and_obeys_none(hostile: Server, visit: Visit) -> None:
    query = f"?study={fake_store.STUDY}&trial=2&trial=8"
    visit.open(f"{hostile.address}/samples{query}")
    links = visit.page.locator('[data-testid="stSidebarNavLink"]').all()
    views = {link.inner_text().split()[-1]: str(link.get_attribute("href")).split("?")[0] for link in links}
    shown = {}
    for title, address in views.items():
        visit.open(f"{address}{query}")
        assert visit.page.locator('[data-testid="stException"]').count() == 0, title
        assert visit.page.locator('img[src*="x.png"], img[src="x"], a[href^="javascript"]').count() == 0, title
        shown[title] = visit.page.locator("body").inner_text()
    assert len(shown) == 5
    assert visit.errors == []
    assert visit.outside(hostile.address) == []
    assert LITERAL in shown["Samples"] and "⟨U+202E⟩" in shown["Samples"]
    assert all("\u202e" not in text and "\x1b" not in text and len(text) < 200_000 for text in shown.values())


@pytest.mark.browser
def test_a_table_is_saved_as_csv_and_no_cell_is_a_formula(hostile: Server, visit: Visit, tmp_path: Path) -> None:
    visit.page.add_init_script("delete window.showSaveFilePicker")  # which would wait for a person
    visit.open(f"{hostile.address}/?study={fake_store.STUDY}")
    table = visit.page.locator('.st-key-all-trials [data-testid="stDataFrame"]')
    table.scroll_into_view_if_needed()
    table.hover()
    with visit.page.expect_download() as download:
        visit.page.locator(".st-key-all-trials").get_by_role("button", name="Download as CSV").last.evaluate(
            "button => button.click()"
        )
    download.value.save_as(tmp_path / "trials.csv")
    rows = list(csv.DictReader((tmp_path / "trials.csv").open(encoding="utf-8-sig")))
    notes = {int(row["number"]): row["note"] for row in rows}
    assert list(notes) == [7, 6, 5, 4, 3, 2, 0, 1, 8], "by value; without one last"
    assert notes[8].startswith("'=1+1")
    assert {row["params_lr_scheduler_type"] for row in rows} == {"'@SUM(1)"}


@pytest.mark.browser
def test_the_token_leaves_the_link_and_is_in_nothing_that_is_copied(hostile: Server, visit: Visit) -> None:
    visit.open(hostile.link)
    visit.page.wait_for_url(lambda url: "token" not in url)
    visit.page.get_by_role("link", name="Control").click()
    visit.sees("Orders")
    expect(visit.page.get_by_role("button", name="Retry all failed", exact=True).first).to_be_enabled()
    assert hostile.token not in visit.page.content() + visit.page.url
    assert hostile.output.read_text().count(hostile.token) == 1  # the line with the link


@pytest.mark.browser
def test_a_reload_keeps_the_token_which_no_script_can_read(hostile: Server, visit: Visit) -> None:
    address = f"{hostile.address}/control?study={fake_store.STUDY}&part=Steer"
    visit.open(f"{address}&token={hostile.token}")
    retry = visit.page.get_by_role("button", name="Retry all failed", exact=True).first
    expect(retry).to_be_enabled()
    visit.page.reload()
    expect(retry).to_be_enabled()
    second = visit.page.context.new_page()
    second.goto(address)
    expect(second.get_by_role("button", name="Retry all failed", exact=True).first).to_be_enabled()
    [cookie] = [one for one in visit.page.context.cookies() if one["value"] == hostile.token]
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["expires"]) == (True, "Strict", -1)
    assert hostile.token not in visit.page.evaluate(
        "document.cookie + JSON.stringify({...localStorage}) + JSON.stringify({...sessionStorage})"
    )


@pytest.mark.browser
def test_a_token_that_was_typed_is_kept_too(hostile: Server, visit: Visit) -> None:
    visit.open(f"{hostile.address}/control?study={fake_store.STUDY}&part=Steer&token=wrong")
    visit.page.wait_for_url(lambda url: "token" not in url)
    retry = visit.page.get_by_role("button", name="Retry all failed", exact=True).first
    expect(retry).to_be_disabled()
    for typed, is_right in (("wrong", False), (hostile.token, True)):
        visit.button("Enter token")
        visit.page.get_by_role("textbox", name="Token").fill(typed)
        visit.button("Use this token")
        expect(retry).to_be_enabled(enabled=is_right)
        visit.page.keyboard.press("Escape")
    until(lambda: any(one["value"] == hostile.token for one in visit.page.context.cookies()))
    assert hostile.token not in visit.page.content() + visit.page.url
    visit.page.reload()
    expect(retry).to_be_enabled()


@pytest.mark.browser
def test_of_two_browsers_only_the_one_with_the_token_steers_the_study(hostile: Server, browser: Browser) -> None:
    address = f"{hostile.address}/control?study={fake_store.STUDY}&part=Steer"
    with real.visit(browser) as first, real.visit(browser) as second:
        second.open(address)
        first.open(f"{address}&token={hostile.token}")
        first.page.get_by_role("button", name="Retry all failed", exact=True).first.click()
        first.sees('Retry study "reviews": ')
        first.button("Do it")
        first.sees("Order 2")
        expect(second.page.get_by_role("button", name="Retry all failed", exact=True).first).to_be_disabled()
        second.sees("Enter token")
        assert first.errors == second.errors == []
    with closing(Store.open(f"sqlite:///{hostile.output.parent / 'store.db'}")) as store:
        assert [order.kind for order in store.orders(store.study(fake_store.STUDY))] == ["fork", "retry"]


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:{port}", "http://127.0.0.1:{port}", "101"),
        ("127.0.0.1:{port}", "http://evil.example", "403"),
        ("evil.example", "http://evil.example", "403"),  # a name that was pointed at this machine
    ],
)
def test_other_sites_open_no_connection(hostile: Server, host: str, origin: str, status: str) -> None:
    port = int(hostile.address.rpartition(":")[2])
    lines = [
        "GET /_stcore/stream HTTP/1.1",
        f"Host: {host.format(port=port)}",
        f"Origin: {origin.format(port=port)}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Protocol: streamlit",
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        assert connection.recv(1_000).split()[1].decode() == status


@pytest.mark.browser
def test_a_server_started_again_asks_for_its_own_token(tmp_path: Path, browser: Browser, visit: Visit) -> None:
    fake_store.build(tmp_path / "store.db").close()  # with a failed trial
    storage, port = f"sqlite:///{tmp_path / 'store.db'}", free_port()
    with real.serve(storage, tmp_path, port=port) as server:
        visit.open(f"{server.address}/control?study={fake_store.STUDY}&part=Steer&token={server.token}")
        expect(visit.page.get_by_role("button", name="Retry all failed", exact=True).first).to_be_enabled()
        assert server.end() in (0, 130, -2)
    with real.serve(storage, tmp_path, port=port, flags=["--read-only"]) as server:
        visit.page.locator('[data-testid="stApp"][data-test-connection-state="CONNECTED"]').wait_for()
        visit.page.get_by_role("radio", name="New trial").click()
        visit.sees("This dashboard is read-only")
        visit.page.get_by_role("radio", name="Steer").click()
        visit.sees("Settings")
        assert "token" not in server.output.read_text()
        expect(visit.page.get_by_role("button", name="Retry all failed", exact=True).first).to_be_disabled()


@pytest.mark.browser
def test_a_study_is_run_by_the_copied_command_watched_steered_and_forked(tmp_path: Path, visit: Visit) -> None:
    (tmp_path / "quick.toml").write_text(STUDY)
    storage, gate = f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "gate"
    variables = {FOLDER_VARIABLE: str(tmp_path)}
    with real.serve(storage, tmp_path, variables=variables) as server:
        visit.open(f"{server.address}/control?token={server.token}")
        visit.sees("No store yet")
        with _typed(f"ppo-tuner run quick.toml --storage {storage}", tmp_path, variables):
            until(lambda: bool(list(tmp_path.glob("waiting-*"))))  # in the middle of trial 0
            visit.button("Refresh")
            visit.choose("Trial", "0")
            visit.sees("Trial 0 is running")
            visit.page.get_by_role("button", name="Stop after this step", exact=True).click()
            visit.sees('Stop trial 0 of study "quick": it ends after this step, for good, and keeps what it reached')
            visit.button("Do it")
            visit.sees("Order 1: ")
            store = Store.open(storage)
            study = store.study("quick")
            until(lambda: store.orders(study)[0].decided_at is not None)
            gate.touch()
            until(lambda: [row.status for row in store.trials(study)] == [Status.STOPPED, Status.COMPLETED])
            until(lambda: not store.study("quick").has_controller)

        visit.page.get_by_role("radio", name="New trial").click()
        visit.page.get_by_role("radio", name="Fork at a checkpoint").click()
        visit.choose("Fork from", "1")
        visit.sees("This checkpoint is at the trial's last episode, 160")
        expect(visit.page.get_by_role("textbox", name="Total episodes")).to_have_value("320")
        visit.button("Fork")
        visit.sees('Fork trial 1 of study "quick"')
        visit.button("Do it")
        visit.sees("Order 2 waits")

        visit.page.get_by_role("radio", name="Steer").click()
        command = visit.page.get_by_test_id("stCode").first.inner_text().strip()
        with _typed(command, tmp_path, variables):
            until(lambda: [row.status for row in store.trials(study)][2:] == [Status.COMPLETED])
            assert store.trials(study)[2].parent == 1
            until(lambda: not store.study("quick").has_controller)
            expect(visit.page).to_have_title("✓ quick - PPO Tuner")  # by itself
        store.close()
        visit.open(f"{server.address}/control?study=quick&part=Steer&steer=2")
        visit.sees("Trial 2 is completed, at 320 of 320 episodes.")
        assert visit.errors == []
        assert visit.outside(server.address) == []


@contextmanager
def _typed(command: str, folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Run a `ppo-tuner` command, as in a terminal in a folder."""
    words = [sys.executable, "-m", "tuner.cli.main", *shlex.split(command)[1:]]
    environment = os.environ | {"PYTHONPATH": str(real.ROOT), **variables}
    with (folder / "terminal.txt").open("a") as log, spawned(words, cwd=folder, env=environment, stdout=log):
        yield
