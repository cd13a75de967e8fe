"""Bad input of every kind to every command: one line that says what is wrong, and nothing is changed."""

import functools
import re
import shlex
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from tests.tuner import made_study
from tests.tuner.invoke import one_error
from tuner import cli
from tuner.spec import StudySpec
from tuner.status import Origin, Status
from tuner.store import NewTrial, Outcome, Store
from tuner.store.trials import write_pause
from tuner.trial_folder import claim, held_folder

SECRET = "s3cr3t"
STUDY_FILE = """
name = "made"
task = "reviews"
trials = 8
seed = 3
[fixed]
total_episodes = 256
eval_every_episodes = 128
entropy_coef = 0.01
[search]
learning_rate = { low = 1e-5, high = 3e-3, scale = "log" }
kl_coef = { low = 0.01, high = 0.3, scale = "log" }
kl_target = { low = 3.0, high = 12.0, scale = "log" }
batch_size = { low = 32, high = 128, scale = "log2" }
[kl]
budget = 10.0
limit = 15.0
"""
LISTED = {"name": "listed", "task": "reviews", "trial": [{"kl_coef": 0.1}, {"kl_coef": 0.2}]}
KEPT = (2, 4)
"""Steps of the checkpoints that trial 1 keeps: episodes 128 and 256."""


def changed(*pairs: tuple[str, str]) -> str:
    """Return the study file with texts replaced."""
    text = STUDY_FILE
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


FILES: dict[str, str | bytes] = {
    "made.toml": STUDY_FILE,
    "held.toml": changed(('"made"', '"held"')),
    "taken.toml": changed(('"made"', '"taken"')),
    "theirs.toml": changed(('"made"', '"theirs"')),
    "fresh.toml": changed(('"made"', '"fresh"')),
    "given/study.toml": changed(("seed = 3", "seed = 4")),
    "held/readme.txt": "a folder of the name of a stored study",
    "blocked.toml": changed(('"made"', '"blocked"')),
    # Files that are no study
    "syntax.toml": changed(("trials = 8", "trials = = 8")),
    "binary.toml": b"\xff\xfe\x00\x01",
    "empty.toml": "",
    "key.toml": changed(("trials = 8", "trails = 8")),
    "task.toml": changed(('"reviews"', '"revews"')),
    "name.toml": changed(('"made"', '"../made"')),
    "trials.toml": changed(("trials = 8", "trials = 0")),
    "seed_text.toml": changed(("seed = 3", 'seed = "three"')),
    "unknown.toml": changed(("learning_rate =", "lerning_rate =")),
    "range.toml": changed(("low = 3.0, high = 12.0", "low = 12.0, high = 3.0")),
    "bounds.toml": changed(("low = 1e-5", "low = -1e-5")),
    "scale.toml": changed(("low = 32, high = 128", "low = 33, high = 128")),
    "value.toml": changed(("entropy_coef = 0.01", "entropy_coef = -1")),
    "both.toml": changed(("entropy_coef = 0.01", "kl_coef = 0.1")),
    "limit.toml": changed(("budget = 10.0", "budget = 20.0")),
    "guard.toml": STUDY_FILE + "[guard]\npatiense = 3\n",
    "sampler.toml": STUDY_FILE + '[sampler]\nname = "tpee"\n',
    "nothing.toml": 'name = "new"\ntask = "reviews"\ntrials = 2\n[search]\n',
    "two.toml": STUDY_FILE + "[[trial]]\nkl_coef = 0.1\n",
    # The study made, changed in ways that would mix two experiments
    "to_task.toml": changed(('"reviews"', '"arithmetic"')),
    "to_seed.toml": changed(("seed = 3", "seed = 4")),
    "to_fixed.toml": changed(("entropy_coef = 0.01", "entropy_coef = 0.02")),
    "to_guard.toml": STUDY_FILE + "[guard]\npatience = 7\n",
    "to_kl.toml": changed(("limit = 15.0", "limit = 16.0")),
    "to_trainer.toml": changed(("seed = 3", 'seed = 3\ntrainer = "mine:trainer"')),
    "plain_file": "no study",
    "folder/readme.txt": "no study here",
    "broken/study.toml": "name = ,",
    "no_export/study.json": "{}",
    "bad.yaml": "lam: [",
    "unknown.yaml": "lamb: 0.9",
}

Case = tuple[str, int, str]

COMMAND_LINES: list[Case] = [
    ("shwo made", 2, r'unknown command "shwo"; there are: .*; did you mean "show"\?$'),
    ("--jsn", 2, r'unknown flag "--jsn"'),
    ("show", 2, r"required: STUDY.*; see ppo-tuner show --help$"),
    ("list made", 2, r'unexpected argument "made"'),
    ("run made.toml --trails 3", 2, r'unknown flag "--trails"; did you mean "--trials"\?'),
    ("run made.toml --foo", 2, r'unknown flag "--foo"; see ppo-tuner run --help$'),
    ("run made.toml --trials 0", 2, r"--trials: '0' is not allowed: a whole number of at least 1"),
    ("run made.toml --trials 1.5", 2, r"--trials: '1.5' is not allowed"),
    ("demo --workers -1", 2, r"--workers: '-1' is not allowed: a whole number of at least 1"),
    ("demo --workers two", 2, r"--workers: 'two' is not allowed"),
    ("run made.toml --timeout -1", 2, r"--timeout: '-1' is not allowed: a time over 0, such as 90"),
    ("demo --timeout 3d", 2, r"--timeout: '3d' is not allowed"),
    ("run made.toml --gpus 0,0", 2, r"--gpus: '0,0' is not allowed: different GPUs by index or UUID"),
    ("run made.toml --gpus x", 2, r"--gpus: 'x' is not allowed"),
    ("run made.toml --gpus ''", 2, r"--gpus: '' is not allowed"),
    ("run made.toml --workers 3 --gpus 0,1", 2, r"workers = 3 is not allowed: at most 2, one a GPU"),
    (
        "run made.toml --max-disk '5 parsecs'",
        2,
        r"--max-disk: .*'5 parsecs' is not allowed: a size over 0 such as 20GB",
    ),
    ("run made.toml --max-disk 0", 2, r"--max-disk: .*'0' is not allowed"),
    (f"run made.toml --max-disk {'9' * 400}GB", 2, r"--max-disk: .* is not allowed"),
    ("dashboard --port 65536", 2, r"--port: '65536' is not allowed: a port from 1 to 65535"),
    ("dashboard --port http", 2, r"--port: 'http' is not allowed"),
    ("logs made 0 -n 0", 2, r"--lines: '0' is not allowed"),
]
STORES: list[Case] = [
    ("list --storage none.db", 1, r"there is no store at none\.db yet; `ppo-tuner run` makes it"),
    ("show made --storage folder", 1, r"the store folder is a folder; name a file in it"),
    ("list --storage plain_file", 1, r"plain_file is no SQLite database; name another file with --storage"),
    ("dashboard --storage plain_file", 1, r"plain_file is no SQLite database"),
    ("run made.toml --storage plain_file", 1, r"plain_file is no SQLite database"),
    ("run made.toml --storage plain_file/x.db", 1, r"plain_file"),
    ("migrate --storage none.db", 1, r"there is no store at none\.db yet"),
    ("list --storage mysql://host/x", 1, r"mysql is not supported; use sqlite or postgresql"),
    ("dashboard --storage mysql://host/x", 1, r"mysql is not supported"),
    (f"list --storage postgresql://me:{SECRET}@127.0.0.1:1/db", 1, r"cannot use the store postgresql://me:\*\*\*@127"),
    (f"run made.toml --storage postgresql://me:{SECRET}@127.0.0.1:1/db", 1, r"cannot use the store postgresql://me:\*"),
    (
        f"list --storage postgresql://me:{SECRET}@host:port/db",
        1,
        r'"postgresql://me:\*\*\*@host:port/db" is not a data',
    ),
    (f"list --storage postgresql://me:{SECRET}/@2@host:port/db", 1, r"is not a database URL such as"),
    (f"stop made --storage mysql://me:{SECRET}@host/db", 1, r"me:\*\*\*@host/db"),
]
STUDIES: list[Case] = [
    ("run none.toml", 2, r"there is no study file none\.toml$"),
    ("run nowhere/study.toml", 2, r"there is no study file nowhere/study\.toml$"),
    ("run mad", 2, r'"mad" is neither a study file nor.*/mad, .*store\.db holds: made, .*; did you mean "made"\?$'),
    ("run x --storage none.db", 2, r'"x" is neither .*/x, and there is no store at none\.db yet$'),
    ("run nothing --storage none.db", 2, r'"nothing" is neither .*; did you mean "nothing\.toml"\?$'),
    ("run ''", 2, r"the folder \. has no study\.toml$"),
    ("run plain_file", 2, r"plain_file: not valid TOML: .*line 1"),
    ("run folder", 2, r'"folder" is neither .*: the folder folder has no study\.toml, and .* holds: made'),
    ("run ./folder", 2, r"the folder folder has no study\.toml$"),
    ("run broken", 2, r"broken/study\.toml: not valid TOML: .*line 1"),
    ("run syntax.toml", 2, r"syntax\.toml: not valid TOML: .*line 4"),
    ("run binary.toml", 2, r"binary\.toml: not a text file in UTF-8$"),
    ("run empty.toml", 2, r"empty\.toml: name is missing$"),
    ("run key.toml", 2, r'key\.toml: trails: unknown key; allowed: .*; did you mean "trials"\?'),
    ("run task.toml", 2, r'task\.toml: task: .*"revews".*did you mean "reviews"\?'),
    ("run name.toml", 2, r"name\.toml: name = '\.\./made' is not allowed: letters, digits"),
    ("run trials.toml", 2, r"trials\.toml: trials = 0 is not allowed: a whole number"),
    ("run seed_text.toml", 2, r"seed_text\.toml: seed = 'three' is not allowed: a whole number"),
    ("run unknown.toml", 2, r'search\.lerning_rate: unknown hyperparameter; did you mean "learning_rate"\?'),
    ("run range.toml", 2, r"range\.toml: search\.kl_target.*(low|high)"),
    ("run bounds.toml", 2, r"bounds\.toml: search\.learning_rate.*-1e-05"),
    ("run scale.toml", 2, r"scale\.toml: search\.batch_size.*33"),
    ("run value.toml", 2, r"value\.toml: fixed\.entropy_coef = -1 is not allowed"),
    ("run both.toml", 2, r"both\.toml: kl_coef stands in both \[fixed\] and \[search\]"),
    ("run limit.toml", 2, r"limit\.toml: kl: limit = 15 is below budget = 20"),
    ("run guard.toml", 2, r"guard\.toml: guard\.patiense: unknown"),
    ("run sampler.toml", 2, r"sampler\.toml: sampler\.name = 'tpee' is not allowed: one of .*did you mean \"tpe\"\?"),
    ("run nothing.toml", 2, r"nothing\.toml: search names nothing to search"),
    ("run two.toml", 2, r"two\.toml: search does nothing beside \[\[trial\]\] tables"),
    ("run listed --trials 3", 2, r"trials = 3 is not allowed beside \[\[trial\]\] tables"),
    ("run to_task.toml", 2, r'study "made" has trials already: task: arithmetic, was reviews; give the study another'),
    ("run to_seed.toml", 2, r"has trials already: seed: 4, was 3; give the study another name$"),
    (
        "run to_fixed.toml",
        2,
        r"has trials already: fixed\.entropy_coef: 0\.02, was 0\.01; give the study another name$",
    ),
    ("run to_guard.toml", 2, r"has trials already: guard\.patience: 7, was \d; give the study another name$"),
    ("run to_kl.toml", 2, r"has trials already: kl\.limit: 16\.0, was 15\.0; give the study another name$"),
    ("run to_trainer.toml", 2, r"has trials already: trainer: mine:trainer, was ppo_core"),
    (
        "run held.toml",
        1,
        r'study "held" is run by process \d+ on \S+ \(last sign of life \d+ s ago\); stop that one first$',
    ),
    ("run held", 1, r'study "held" is run by process \d+ on \S+'),
    ("run blocked.toml", 1, r"cannot use the folder runs/blocked for checkpoints"),
    ("run taken.toml", 1, r"cannot use the folder runs/taken for checkpoints"),
    ("run theirs.toml", 1, r"runs/theirs holds checkpoints of a study of that name in another store"),
    ("run fresh.toml --checkpoints plain_file", 1, r"cannot use plain_file for checkpoints"),
    ("run made.toml --checkpoints s9://x", 2, r'checkpoints cannot be kept at s9://x: .*; did you mean "s3"\?'),
    ("run made.toml --checkpoints ''", 2, r"the place of checkpoints is empty; allowed: a URL"),
    ("run fresh.toml --checkpoints s9://x", 2, r"checkpoints cannot be kept at s9://x"),
    ("run fresh.toml --checkpoints s9://x --storage new.db", 2, r"checkpoints cannot be kept at s9://x"),
    (f"run made.toml --checkpoints s9://me:{SECRET}@x", 2, r"checkpoints cannot be kept at s9://me:\*\*\*@x"),
    ("run made.toml --checkpoints plain_file", 1, r"cannot use plain_file for checkpoints: "),
]
READING: list[Case] = [
    ("show mad", 1, r'no study "mad" in .*; did you mean "made"\?$'),
    ("show made 10", 1, r'study "made" has no trial 10; it has trials 0 to 9$'),
    ("show m\x1bade", 1, r'no study "m\\x1bade" in'),
    ("show mad\udce9", 2, r"'mad\\udce9' is not allowed: arguments are texts in UTF-8$"),
    ("show made two", 2, r"TRIAL: 'two' is no trial number: a whole number of at least 0"),
    ("show made -1", 2, r"TRIAL: '-1' is no trial number"),
    (f"show made {10**20}", 2, r"is no trial number"),
    ("show empty 0", 1, r'study "empty" has no trial'),
    ("compare made 1", 2, r"compare needs at least two different trials"),
    ("compare made 1 1", 2, r"compare needs at least two different trials"),
    ("compare made 1 99", 1, r"no trial 99"),
    ("best made --kl-budget 0", 2, r"--kl-budget: '0' is not allowed: a number over 0, in nats per response"),
    ("best made --kl-budget nan", 2, r"--kl-budget: 'nan' is not allowed"),
    ("best made --kl-budget 1e999", 2, r"--kl-budget: '1e999' is not allowed"),
    ("best made --kl-budget 1", 1, r"within the KL budget of 1 nats/response; the closest is trial 0"),
    ("logs mad 0", 1, r'no study "mad"'),
    ("logs made 99", 1, r"no trial 99"),
    ("logs made 0", 1, r'trial 0 of study "made" has no log at'),
    ("logs made 9", 1, r'trial 9 of study "made" has not started yet$'),
    ("logs listed 0", 1, r'study "listed"'),
    ("orders mad", 1, r'no study "mad"'),
]
UPKEEP: list[Case] = [
    ("export xml made", 2, r"FORMAT: invalid choice: 'xml' \(choose from .*csv"),
    ("export csv mad", 1, r'no study "mad"'),
    ("export csv made -o plain_file", 2, r"plain_file is there already and is no folder"),
    ("export csv made -o folder --force", 2, r'folder is there already and holds "readme\.txt"'),
    ("export csv made -o plain_file/below", 2, r"cannot write the export plain_file/below"),
    ("import none", 2, r"there is no folder none$"),
    ("import plain_file", 2, r"there is no folder plain_file$|plain_file is no"),
    ("import folder --storage new.db", 2, r"folder is no exported study: it has no study\.json$"),
    ("import no_export", 2, r"no_export is no exported study: its study\.json is of something else"),
    ("import exported", 1, r'there is a study "made" already; import this one under another name with --as$'),
    ("import exported --as ../up --storage new.db", 2, r"--as = '\.\./up' is not allowed: letters, digits"),
    ("delete mad --yes", 1, r'no study "mad"'),
    ("delete made", 2, r'deleting study "made" is asked about on a terminal; without one, confirm with --yes$'),
    ("delete held --yes", 1, r'study "held" is run by process \d+'),
    ("rename mad new", 1, r'no study "mad"'),
    ("rename made 'a b'", 2, r"the new name = 'a b' is not allowed"),
    ("rename made made", 2, r'"made" is the study\'s name already$'),
    ("rename made listed", 1, r'there is a study "listed" already$'),
    ("rename made blocked_too", 1, r"blocked_too is there already, where the study's checkpoints would go"),
    ("rename held new", 1, r'study "held" is run by process'),
    ("archive mad", 1, r'no study "mad"'),
    ("archive held", 1, r'study "held" is run by process'),
]
ORDERS: list[Case] = [
    ("stop mad", 1, r'no study "mad"'),
    ("stop made", 1, r'nothing runs study "made", so there is no run of it to end$'),
    ("stop made 99", 1, r"no trial 99"),
    ("stop made 0", 2, r"trial 0 is completed; it cannot be told to stop$"),
    ("prune made", 2, r"required: TRIAL"),
    ("prune made 6", 2, r"trial 6 is failed; it cannot be told to prune$"),
    ("pause made 4", 2, r"trial 4 is pruned; it cannot be told to pause$"),
    ("pause made 8", 2, r"trial 8 is paused already$"),
    ("pause paused", 2, r"the study is paused already$"),
    ("resume made", 2, r"the study is not paused$"),
    ("resume made 7", 2, r"trial 7 is interrupted; only a paused trial can be resumed$"),
    ("resume made 9", 2, r"trial 9 is waiting; only a paused trial can be resumed$"),
    ("retry made 0", 2, r"trial 0 is completed, not failed$"),
    ("retry listed", 2, r"no trial has failed$"),
    ("retry made 99", 1, r"no trial 99"),
    ("enqueue made --set learning_rate=1.0", 2, r"learning_rate = 1\.0 is not allowed: 1e-05 to 0\.003 in this study$"),
    ("enqueue made --set batch_size=48", 2, r"batch_size = 48 is not allowed: a power of two in this study$"),
    ("enqueue made --set kl_coef=high", 2, r"kl_coef = 'high' is not allowed: a number"),
    ("enqueue made --set entropy_coef=0.1", 2, r"entropy_coef is fixed in this study \(0\.01\)"),
    ("enqueue made --set seed=7", 2, r"seed is the same in all trials of a study$"),
    ("enqueue made --set lerning_rate=1e-4", 2, r'lerning_rate is not searched.*; did you mean "learning_rate"\?$'),
    ("enqueue made --set kl_coef=0.1 kl_target=6", 2, r"kl_coef and kl_target exclude each other"),
    ("enqueue made --set learning_rate=5e-4 kl_coef=0.1", 2, r"trial 2 has these values already$"),
    ("enqueue made", 2, r"trial 0 has these values already$"),
    ("enqueue made --set x", 2, r'"x" is not allowed: NAME=VALUE, such as kl_coef=0\.1$'),
    ("enqueue made --set kl_coef=", 2, r'"kl_coef=" is not allowed: NAME=VALUE'),
    ("enqueue made --set kl_coef=0.1 --set kl_coef=0.2", 2, r"kl_coef is set twice$"),
    ("enqueue made --set", 2, r"--set: expected at least one argument"),
    ("enqueue made --set kl_coef=0.2 --label caf\udce9", 2, r"is not allowed: arguments are texts in UTF-8$"),
    ("fork made 1", 2, r"a fork changes at least one value"),
    ("fork made 1 --set kl_coef=0.05", 2, r"a fork changes at least one value"),
    ("fork made 1 --set batch_size=32", 2, r"batch_size = 32 is not allowed: a fork cannot change it, since episodes"),
    ("fork made 1 --set kl_coeff=0.1", 2, r'unknown hyperparameter "kl_coeff"; did you mean "kl_coef"\?$'),
    ("fork made 1 --set kl_coef=-1", 2, r"kl_coef = '?-1'? is not allowed: a number at least 0"),
    ("fork made 1 --set kl_coef=0.2 --at 100", 2, r"trial 1 keeps no checkpoint at episode 100; kept: 128, 256$"),
    ("fork made 1 --set kl_coef=0.2 --at 0", 2, r"--at: '0' is not allowed"),
    (
        "fork made 1 --set total_episodes=256 kl_coef=0.2",
        2,
        r"total_episodes = 256 leaves a fork at episode 256 nothing",
    ),
    ("fork made 9 --set kl_coef=0.2", 2, r"trial 9 has not started yet; a fork begins at a checkpoint$"),
    ("fork made 99 --set kl_coef=0.2", 1, r"no trial 99"),
    ("set made", 2, r"set changes nothing; there are: trials, workers, kl_budget$"),
    ("set made --trials 0", 2, r"--trials: '0' is not allowed: a whole number of at least 1"),
    ("set made --workers 0", 2, r"--workers: '0' is not allowed"),
    ("set made --workers 1001", 2, r"workers = 1001 is not allowed: at most 1000$"),
    ("set made --kl-budget -3", 2, r"--kl-budget: '-3' is not allowed: a number over 0"),
    ("set made --kl-budget 20", 2, r"kl_budget = 20 is over the KL limit = 15, where trials are stopped$"),
    ("set listed --trials 9", 2, r"trials = 9 is not allowed beside \[\[trial\]\] tables"),
]
OTHERS: list[Case] = [
    ("new-task", 2, r"required: NAME"),
    ("new-task plain_file", 1, r"plain_file"),
    ("new-task folder", 1, r"folder"),
    ("new-task plain_file/below", 1, r"plain_file"),
    ("train --task revews", 1, r'revews.*did you mean "reviews"\?'),
    ("train --learning_rat 1", 2, r'unknown flag "--learning_rat"; did you mean "--learning_rate"\?'),
    ("train --task reviews --kl_coef -1", 2, r"kl_coef = '?-1'? is not allowed: a number at least 0"),
    ("train --task reviews --config none.yaml", 2, r"none\.yaml"),
    ("train --task reviews --config folder", 2, r"folder"),
    ("train --task reviews --config bad.yaml", 2, r"bad\.yaml: "),
    ("train --task reviews --config unknown.yaml", 2, r'unknown\.yaml: .*"?lamb"?.*did you mean "lam"\?'),
    ("train --from made 99", 1, r"no trial 99"),
    ("train --from made two", 2, r"--from made two: 'two' is no trial number"),
    ("train --from made 1 --task arithmetic", 2, r"--from made 1 trains on the trial's task, reviews"),
]


def make(folder: Path) -> Store:
    """Make the studies of the cases, their folders and files."""
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    store = made_study.make(folder / "store.db")
    lease = store.acquire("made")
    spec = StudySpec.from_dict(made_study.SPEC, "made")
    for number, status in ((8, Status.PAUSED), (9, Status.WAITING)):
        params = {**made_study.PARAMS[1], "learning_rate": number * 1e-5}
        config = spec.config(params).to_dict()
        trial = store.add_trial(lease, NewTrial(number, Origin.ENQUEUED, config, params, 1, status=status))
        if status is Status.PAUSED:
            store.begin_attempt(lease, trial, None)
            store._change(functools.partial(write_pause, trial_id=trial.id, so_far=Outcome(status)))
    runs = folder / "runs"
    with held_folder(runs / "made"):
        claim(runs / "made", store.study("made"))
    for step in KEPT:
        checkpoint.write(checkpoint.step_folder(runs / "made" / "1", step), {}, state={}, extra={"episode": 64 * step})
    (runs / "blocked").write_text("")
    (runs / "taken").write_text("")
    for name in ("blocked_too", "theirs/0/step-000003", "fresh"):
        (runs / name).mkdir(parents=True)
    for name in ("theirs", "fresh"):
        (runs / name / ".lock").touch()
    store.update_study(lease, folder=str(runs / "made"))
    store.release(lease)
    for name in ("held", "blocked", "paused", "empty"):
        store.create_study(name, {**made_study.SPEC, "name": name})
    store.create_study("listed", StudySpec.from_dict(LISTED, "listed").to_dict())
    store.acquire("held")
    lease = store.acquire("paused")
    store.update_study(lease, paused_at=1.0)
    store.release(lease)
    return store


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with all that the cases speak of, made once: nothing changes it."""
    folder = tmp_path_factory.mktemp("place")
    store = make(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PPO_TUNER_STORAGE", f"sqlite:///{folder / 'store.db'}")
        assert cli.main(["export", "csv", "made", "-o", "exported"]) == 0
        yield folder
    store.close()


def contents(folder: Path) -> dict[str, Any]:
    """Return every file below a folder, and every row of the store; but for the token, a count of its holders."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if not path.name.startswith("store.db"):
            found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    connection = sqlite3.connect(folder / "store.db")
    connection.row_factory = sqlite3.Row
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        rows = [dict(row) for row in connection.execute(f"SELECT * FROM {table}")]
        found[f"table {table}"] = [{key: row[key] for key in row if key != "lease_token"} for row in rows]
    connection.close()
    return found


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [*COMMAND_LINES, *STORES, *STUDIES, *READING, *UPKEEP, *ORDERS, *OTHERS],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_bad_input_is_one_line_and_changes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], line: str, status: int, message: str
) -> None:
    before = contents(place)
    got = cli.main(shlex.split(line))
    stdout, stderr = capsys.readouterr()
    assert re.search(message, one_error(stderr)), stderr
    assert (got, stdout) == (status, "")
    assert SECRET not in stderr
    assert contents(place) == before


def test_every_command_has_cases() -> None:
    lines = [
        line for cases in (COMMAND_LINES, STORES, STUDIES, READING, UPKEEP, ORDERS, OTHERS) for line, _, _ in cases
    ]
    assert {shlex.split(line)[0] for line in lines} >= set(cli.COMMANDS)


def test_the_study_file_of_the_cases_is_one_without_mistakes(place: Path) -> None:
    """So each case is refused for the one thing that was changed."""
    stored = StudySpec.from_dict(made_study.SPEC, "made")
    changes = StudySpec.load(place / "made.toml").changes_to(stored)
    assert (changes.told, changes.refused) == ([], [])
