"""Bad input of every class to every command: one line that says what is wrong, and nothing is changed."""

import codecs
import functools
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ppo_core import checkpoint
from ppo_core.tasks import skeleton
from tests.tuner import made_study
from tests.tuner.invoke import one_error
from tuner.cli import main as cli
from tuner.control.changes import spec_changes
from tuner.files.folder import claim, held_folder
from tuner.store import NewTrial, Outcome, Store
from tuner.store.trials import write_pause
from tuner.study.spec import StudySpec
from tuner.study.status import Origin, Status

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
    "theirs.toml": changed(('"made"', '"theirs"')),
    "held/readme.txt": "a folder of the name of a stored study",
    "blocked.toml": changed(('"made"', '"blocked"')),
    # Files that are not studies: a class of mistakes each; the single keys are for test_spec.py
    "syntax.toml": changed(("trials = 8", "trials = = 8")),
    "binary.toml": b"\xff\xfe\x00\x01",
    "empty.toml": "",
    "task.toml": 'policy = "task:arithmetic"\nreward = "x.py:f"\nprompts = "x.jsonl"\n',
    "key.toml": changed(("trials = 8", "trails = 8")),
    "nothing.toml": 'name = "new"\ntask = "reviews"\ntrials = 2\n[search]\n',
    # The study made, changed in a way that would mix two experiments
    "to_fixed.toml": changed(("entropy_coef = 0.01", "entropy_coef = 0.02")),
    "plain_file": "no study",
    "folder/readme.txt": "no study here",
    "bad.yaml": "lam: [",
    "list.json": "[]",
    "unknown.yaml": "lamb: 0.9",
    "trl.yaml": "num_sample_generations: 3\nkl_coef: -1.0",
}

Case = tuple[str, int, str]
"""A command line, its exit status, and what its one line must name: the rule, the key and the hint, by ` | `."""

COMMAND_LINES: list[Case] = [
    ("shwo made", 2, 'unknown command | "shwo" | "show"'),
    ("show", 2, "required: STUDY | ppo-tuner show --help"),
    ("list made", 2, 'unexpected argument | "made"'),
    ("run made.toml --trails 3", 2, 'unknown flag | "--trails" | did you mean "--trials"'),
    ("--storage other.db list", 2, "flags come after the command | ppo-tuner list --storage other.db"),
    ("train --lr 1e-4", 2, '"--lr"; did you mean "--learning_rate"?'),
    ("run made.toml --trials 1.5", 2, "--trials | '1.5' is not allowed | whole number of at least 1"),
    ("demo --timeout 3d", 2, "--timeout | '3d' is not allowed | 10m or 2h"),
    ("run made.toml --gpus 0,0", 2, "--gpus | '0,0' is not allowed | index or UUID"),
    ("run made.toml --workers 3 --gpus 90,91", 2, "torch does not see GPUs 90, 91"),
    ("dashboard --port 65536", 2, "port 65536 is in use or not allowed | --port"),
]
STORES: list[Case] = [
    ("list --storage none.db", 1, "no store at | none.db | `ppo-tuner run`"),
    ("show made --storage folder", 1, "folder is a folder | a file in it"),
    ("list --storage plain_file", 1, "plain_file failed: file is not a database"),
    ("run made.toml --storage plain_file/x.db", 1, "plain_file"),
    (f"stop made --storage mysql://me:{SECRET}@host/x", 1, "me:***@host/x | mysql is not supported | postgresql"),
    (f"list --storage postgresql://me:{SECRET}@127.0.0.1:1/db", 1, "the store | me:***@127"),
    (f"list --storage postgresql://me:{SECRET}/@2@host:port/db", 1, "not a database URL"),
]
STUDIES: list[Case] = [
    ("run none.toml", 2, "study file none.toml not found in /"),
    ("run tsak.toml", 2, 'study file tsak.toml not found in / | did you mean "task.toml"?'),
    ("run task.toml", 2, "task.toml is a task, not a study | ppo-tuner train --task task.toml"),
    ("run mad", 1, '"mad" is not a study file here, and no study "mad" in | store.db; available: made | "made"?'),
    ("run x --storage none.db", 1, '"x" is not a study file here, and no store at none.db'),
    ("run folder", 1, '"folder" is not a study file here'),
    ("run ''", 2, "the folder . has no study.toml"),
    ("run syntax.toml", 2, "syntax.toml | not valid TOML | line 4"),
    ("run binary.toml", 2, "binary.toml | UTF-8"),
    ("run empty.toml", 2, "empty.toml | name is missing"),
    ("run key.toml", 2, 'key.toml | trails: unknown key | allowed: | "trials"?'),
    ("run nothing.toml", 2, "nothing.toml | [search] is empty"),
    ("run listed --trials 3", 2, "trials = 3 is not allowed | [[trial]]"),
    ("confirm made", 1, 'study "made" is not finished | 7 of 10 trials ended | ppo-tuner run made'),
    ("confirm made --seeds 0", 2, "--seeds | '0' is not allowed | at least 1"),
    ("confirm held", 1, '"held" is run by process'),
    ("estimate mad", 2, '"mad" is neither a task nor a stored study | "made"?'),
    ("estimate none.toml", 2, "task file none.toml not found"),
    ("estimate made --device cudaa", 2, "--device = 'cudaa' is not allowed | auto or cpu"),
    ("doctor made", 2, 'unexpected argument "made"'),
    ("importance made", 1, "importance needs 10, so"),
    ("diagnose made 77", 1, "has no trial 77"),
    ("run to_fixed.toml", 2, "has trials already | fixed.entropy_coef: 0.02, was 0.01 | another name"),
    ("run held.toml", 1, '"held" is run by process | sign of life | stop that one first'),
    ("run blocked.toml", 1, "cannot use the folder runs/blocked"),
    ("run theirs.toml", 1, "runs/theirs | a study of that name in another store"),
]
READING: list[Case] = [
    ("show mad", 1, 'no study "mad" | store.db | "made"?'),
    ("show made 10", 1, '"made" has no trial 10 | trials 0 to 9'),
    ("show m\x1bade", 1, 'no study "m\\x1bade"'),
    ("show mad\udce9", 2, "'mad\\udce9' is not allowed | UTF-8"),
    ("show made two", 2, "TRIAL | 'two' is not a trial number | at least 0"),
    ("show empty 0", 1, '"empty" has no trial'),
    ("compare made 1 1", 2, "at least two different trials"),
    ("best made --kl-budget nan", 2, "--kl-budget | 'nan' is not allowed | over 0"),
    ("best made --kl-budget 1", 1, "within the KL budget of 1 | no trained checkpoint"),
    ("report made -o none/r.html", 1, "none/.r.html.new: No such file"),
    ("report made -o plain_file", 2, "plain_file already exists | --force"),
    ("logs made 0", 1, 'trial 0 of study "made" has no log at'),
    ("logs made 9", 1, "trial 9 | has not started yet"),
]
UPKEEP: list[Case] = [
    ("export made --format xml", 2, "--format | 'xml' | csv"),
    ("export made", 2, "one of the arguments --format --to is required"),
    ("export made --to tlr", 2, "--to | 'tlr' | did you mean \"trl\"?"),
    ("export made --to trl --format csv", 2, "not allowed with argument --to"),
    ("export made 2 --format csv", 2, "TRIAL is not allowed with --format csv"),
    ("export made --to trl -o bad.yaml", 2, "bad.yaml already exists | --force"),
    ("export made --to verl -o x.txt", 2, "-o x.txt is not allowed with --to verl | .yaml or .yml"),
    ("export made --format csv -o plain_file", 2, "plain_file already exists"),
    ("export made --format csv -o folder --force", 2, "folder already exists | is not an exported study alone"),
    ("export made --format csv -o plain_file/below", 2, "cannot write the export plain_file/below"),
    ("copy made", 2, "required: --to | ppo-tuner copy --help"),
    ("copy made --to store.db", 1, '"made" already exists in | store.db | --name'),
    ("copy made --to new.db --name ../up", 2, "--name = '../up' is not allowed | letters, digits"),
    ("copy made --to nowhere/x.db", 2, "--to nowhere/x.db: folder nowhere not found"),
    ("copy made --to guests.db", 1, "guests.db is not a PPO Tuner store; name another place"),
    ("delete made", 2, '"made" | on a terminal | --yes'),
]
ORDERS: list[Case] = [
    ("stop made", 1, 'nothing runs study "made"'),
    ("stop made 99", 1, "no trial 99"),
    ("stop made 0", 2, "trial 0 is completed"),
    ("pause made 8", 2, "trial 8 is paused already"),
    ("pause paused", 2, "the study is paused already"),
    ("resume made", 2, "the study is not paused"),
    ("resume made 7", 2, "trial 7 is interrupted | only a paused trial"),
    ("retry made 0", 2, "trial 0 is completed, not failed"),
    ("retry listed", 2, "no trial has failed"),
    ("enqueue made --set learning_rate=-1", 2, "learning_rate = '-1' is not allowed | a number in"),
    ("enqueue made --set lr_scheduler_type=cosin", 2, "lr_scheduler_type = 'cosin' is not allowed | \"cosine\"?"),
    ("enqueue made --set seed=7", 2, "seed is the same in all trials"),
    ("enqueue made --set lerning_rate=1e-4", 2, 'unknown hyperparameter "lerning_rate" | "learning_rate"?'),
    ("enqueue made --set learning_rate=5e-4 kl_coef=0.1", 2, "trial 2 has these values already"),
    ("enqueue made --set kl_coef=", 2, '"kl_coef=" is not allowed | NAME=VALUE'),
    ("enqueue made --set kl_coef=0.1 --set kl_coef=0.2", 2, "kl_coef is set twice"),
    ("enqueue made", 2, "enqueue needs values, such as: --set learning_rate=1e-4"),
    ("enqueue made --set", 2, "--set: expected at least one argument"),
    ("fork made 1", 2, "a fork must change at least one value"),
    ("fork made 1 --set batch_size=32", 2, "batch_size = 32 is not allowed | a fork cannot change it"),
    ("fork made 1 --set kl_coef=0.2 --at 100", 2, "trial 1 keeps no checkpoint | 100 | kept: 128, 256"),
    ("fork made 1 --set total_episodes=256 kl_coef=0.2", 2, "total_episodes = 256 | episode 256 nothing"),
    ("fork made 9 --set kl_coef=0.2", 2, "trial 9 has not started yet"),
    ("set made", 2, "set changes nothing | trials, budget, workers, kl_budget"),
    ("set made --kl-budget 20", 2, "kl: limit = 15 is below budget = 20"),
    ("set listed --trials 9", 2, "trials = 9 is not allowed | [[trial]]"),
]
OTHERS: list[Case] = [
    ("new-task plain_file", 2, "plain_file"),
    ("new-task folder", 2, "folder"),
    ("new-task 'a b'", 2, "'a b' is not allowed as a task's folder | letter or digit"),
    ("new-task none/sums", 2, "folder none not found"),
    ("new-task sums --policy task:arithmatic", 2, "--policy = 'task:arithmatic' | \"task:arithmetic\"?"),
    ("new-task sums --policy ./none", 2, "--policy = './none': "),
    ("train --task made.toml", 2, "made.toml is a study, not a task | ppo-tuner run made.toml | task: reviews"),
    ("train --task revews", 2, 'revews | "reviews"?'),
    ("train --task reviews --kl_coef -1", 2, "kl_coef = | is not allowed | at least 0"),
    ("train --task reviews --config list.json", 2, "list.json: not a table of hyperparameters"),
    ("train --from made 1 --config bad.yaml", 2, "--config: not allowed with argument --from"),
    ("train --task reviews --output folder", 2, "--output folder is not empty"),
    ("train --task reviews --output plain_file/x", 2, "--output plain_file/x cannot be written"),
    ("train --task reviews --config bad.yaml", 2, "bad.yaml: "),
    ("import-config unknown.yaml", 2, "unknown.yaml | TRL's PPO"),
    ("import-config trl.yaml", 2, "trl.yaml | kl_coef = -1.0 | at least 0"),
    ("train --task reviews --config unknown.yaml", 2, 'unknown.yaml | lamb | "lam"?'),
    ("train --from made two", 2, "--from made two | 'two' is not a trial number"),
    ("train --from made 1 --task arithmetic", 2, "--from made 1 | reviews"),
]


OWN_TASK = 'policy = "an-org/a-model", reward = "ppo_core.tasks.arithmetic.reward:exact", prompts = "an-org/data"'
RANGE = 'learning_rate = { low = 1e-5, high = 3e-3, scale = "log" }'
END = "limit = 15.0\n"
STUDY_FAULTS: list[tuple[str, str, str]] = [
    # What stands in STUDY_FILE, what a mistake makes of it, and what the one line names: the key first
    ('name = "made"\n', "", "name is missing"),
    ('name = "made"', 'name = "a b"', "name = 'a b' | letters, digits"),
    ('task = "reviews"\n', "", "task is missing"),
    ('task = "reviews"', 'task = "review"', 'task: | "review" | did you mean "reviews"'),
    ('task = "reviews"', 'task = "no/such.toml"', "task: | no/such.toml not found"),
    ('task = "reviews"', "task = 3", "task = 3 | a string in quotes, or a [task] table"),
    ('task = "reviews"', 'task = { polcy = "x" }', 'task.polcy: unknown key | did you mean "policy"?'),
    ('task = "reviews"', f"task = {{ {OWN_TASK}, kl_budget = 0 }}", "task.kl_budget = 0 | a number over 0"),
    ("trials = 8", "budget = 0.5", "budget = 0.5 | at least 1"),
    ("trials = 8\n", "", "budget or trials is missing"),
    ("trials = 8", 'trials = 8\ntrainer = "mine"', "trainer = 'mine' | module:function"),
    ("trials = 8", 'trials = 8\ndevice = "gpu"', "device = 'gpu' | auto or cpu"),
    ("trials = 8", "trials = 8\nthreads = 0", "threads = 0 | a whole number in [1, 1024]"),
    ("trials = 8", "trials = 8\ndeclared = 5", "declared: unknown key"),
    ('task = "reviews"', 'task = "~nobody-here/x.toml"', "task: | nobody-here/x.toml not found"),
    (RANGE, f"learning_rate = {[n / 1e6 for n in range(1, 34)]}", "search.learning_rate: 33 values | 32 | range"),
    ("trials = 8", "trials = 8\ngpus_per_trial = true", "gpus_per_trial = True | a whole number"),
    ("trials = 8", f"budget = 1{'0' * 400}", "budget = 1000 | a number over 0"),
    ("entropy_coef = 0.01", f"entropy_coef = 1{'0' * 400}", "fixed.entropy_coef = 1000 | a number of at least 0"),
    ("trials = 8", f"trials = 1{'0' * 5000}", "not valid TOML"),
    ("trials = 8", f"trials = {'[' * 9000}", "not valid TOML"),
    ("seed = 3", "seed = -1", "seed = -1 | a whole number in [0, 4294967295]"),
    ("seed = 3", 'seed = 3\npruner = "medain"', "pruner = 'medain' | hyperband | did you mean \"median\""),
    ("seed = 3", "seed = 3\nwarm_start = [1]", "warm_start = [1] | a list of names"),
    ("seed = 3", 'seed = 3\nwarm_start = ["tlr"]', 'warm_start: unknown recipe "tlr" | did you mean "trl"'),
    ("seed = 3", 'seed = 3\nwarm_start = ["trl", "trl"]', 'warm_start: "trl" is listed twice'),
    ("entropy_coef = 0.01", "entropy_coef = true", "fixed.entropy_coef = True | a number"),
    ("entropy_coef = 0.01", "entropy_coef = nan", "fixed.entropy_coef = nan | a number"),
    ("entropy_coef = 0.01", "entropy_coeff = 0.01", 'fixed: | "entropy_coeff" | did you mean "entropy_coef"'),
    ("entropy_coef = 0.01", 'whiten_rewards = "yes"', "fixed.whiten_rewards = 'yes' | true or false"),
    ("entropy_coef = 0.01", 'lr_scheduler_type = "cosin"', "fixed.lr_scheduler_type = 'cosin' | \"cosine\""),
    ("entropy_coef = 0.01", "kl_coef = 0.01", "kl_coef is in both [fixed] and [search]"),
    ("entropy_coef = 0.01", "seed = 4", "fixed.seed: the seed is set at the top"),
    ("entropy_coef = 0.01", "num_generations = 3", "num_generations = 3 does not divide batch_size"),
    (RANGE, "learning_rate = 1e-4", 'search.learning_rate = 0.0001 | "advised", a range'),
    (RANGE, "learning_rate = { low = 1e-5 }", "search.learning_rate.high is missing"),
    (RANGE, "learning_rate = { low = 1, high = 0.1 }", "search.learning_rate: low = 1 must be below high = 0.1"),
    (RANGE, "learning_rate = { low = 0, high = 1 }", "search.learning_rate: a log scale needs a low over 0"),
    (RANGE, 'learning_rate = { low = 1, high = 2, scal = "log" }', 'search.learning_rate.scal: | "scale"'),
    (RANGE, "learning_rate = []", "search.learning_rate = [] | at least two values, each once"),
    (RANGE, "learning_rate = [1e-4, -1.0]", "search.learning_rate = -1.0 | a number in [0, 1]"),
    (RANGE, "whiten_rewards = { low = 0, high = 1 }", "search.whiten_rewards: has no range | list the values"),
    (RANGE, "eval_every_episodes = [64, 128]", "search.eval_every_episodes: cannot be searched"),
    (RANGE, "batch = [32, 64]", 'search: | "batch" | did you mean "batch_size"'),
    ("low = 32, high = 128", "low = 33, high = 128", "search.batch_size.low = 33 | 32 and 64"),
    ("budget = 10.0", "budget = 20.0", "kl: limit = 15 is below budget = 20"),
    ("budget = 10.0", 'budget = "10"', "kl.budget = '10' | a number over 0"),
    (END, "limits = 15.0\n", 'kl.limits: | budget, limit | did you mean "limit"'),
    (END, f"{END}[guard]\ngrace = 1.5\n", "guard.grace = 1.5 | a number in [0, 1)"),
    (END, f'{END}[guard]\nkl_hard = "off"\n', "guard.kl_hard = 'off' | or false to switch the rule off"),
    (END, f'{END}[sampler]\nname = "tpee"\n', "sampler.name = 'tpee' | did you mean \"tpe\""),
    (END, f"{END}[workers]\nstep_second = 3\n", 'workers.step_second: | did you mean "step_seconds"'),
    (END, f"{END}[[start]]\nlam = 0.9\n", "start 0.lam: it is not searched"),
    (END, f"{END}[[start]]\nlearning_rate = -1\n", "start 0.learning_rate = -1 | a number in [0, 1]"),
    (END, f"{END}[[start]]\nlabel = 3\nkl_coef = 0.1\n", "start 0.label = 3 | a string in quotes"),
    (END, f"{END}[[trial]]\nlam = 0.9\n", "search has no effect beside [[trial]]"),
    (END, f"{END}[kl]\n", "not valid TOML | line"),
    ("[search]", "[search.lam]", "search.lam.learning_rate: unknown key | low, high, scale"),
    ("[fixed]", "[[fixed]]", "fixed = | a table of key = value lines"),
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
    with closing(sqlite3.connect(folder / "guests.db")) as guests:
        guests.execute("CREATE TABLE guests (name)")
    runs = folder / "runs"
    with held_folder(runs / "made"):
        claim(runs / "made", store.study("made"))
    for step in KEPT:
        checkpoint.write(checkpoint.step_folder(runs / "made" / "1", step), {}, state={}, extra={"episode": 64 * step})
    (runs / "blocked").write_text("")
    (runs / "theirs/0/step-000003").mkdir(parents=True)
    (runs / "theirs/.lock").touch()
    store.update_study(lease, folder=str(runs / "made"))
    store.release(lease)
    for name in ("held", "blocked", "paused", "empty"):
        store.create_study(name, StudySpec.from_dict({**made_study.SPEC, "name": name}, name).to_dict())
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
    ("line", "status", "named"),
    [*COMMAND_LINES, *STORES, *STUDIES, *READING, *UPKEEP, *ORDERS, *OTHERS],
    ids=lambda value: value[:60] if isinstance(value, str) else None,
)
def test_bad_input_is_one_line_and_changes_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], line: str, status: int, named: str
) -> None:
    before = contents(place)
    got = cli.main(shlex.split(line))
    stdout, stderr = capsys.readouterr()
    error = one_error(stderr)
    assert all(text in error for text in named.split(" | ")), error
    assert (got, stdout) == (status, "")
    assert SECRET not in stderr
    assert contents(place) == before


@pytest.mark.parametrize(("old", "new", "named"), STUDY_FAULTS, ids=[named[:50] for _, _, named in STUDY_FAULTS])
def test_a_fault_in_a_study_file_is_one_line_with_file_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], old: str, new: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.cli.run.run_study", lambda *_, **__: pytest.fail("it is run"))
    Path("bad.toml").write_text(changed((old, new)))
    status = cli.main(["run", "bad.toml", "--storage", "store.db"])
    stdout, stderr = capsys.readouterr()
    key, *others = named.split(" | ")
    error = one_error(stderr)
    assert error.startswith(f"bad.toml: {key}") or (error.startswith("bad.toml: ") and f": {key}" in error), error
    assert all(text in error for text in others), error
    assert (status, stdout, list(tmp_path.iterdir())) == (2, "", [tmp_path / "bad.toml"])


def test_a_study_file_may_begin_with_a_byte_order_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    skeleton.write(tmp_path / "home" / "mine", skeleton.DEFAULT_POLICY)
    text = changed(('task = "reviews"', 'task = "~/mine"'))
    (tmp_path / "s.toml").write_bytes(codecs.BOM_UTF8 + text.encode())
    assert StudySpec.load(tmp_path / "s.toml").task == str(tmp_path / "home" / "mine" / "task.toml")


def test_every_command_has_cases() -> None:
    lines = [
        line for cases in (COMMAND_LINES, STORES, STUDIES, READING, UPKEEP, ORDERS, OTHERS) for line, _, _ in cases
    ]
    assert {shlex.split(line)[0] for line in lines} >= set(cli.COMMANDS)


def test_the_study_file_of_the_cases_is_one_without_mistakes(place: Path) -> None:
    """So each case is refused for the one thing that was changed."""
    stored = StudySpec.from_dict(made_study.SPEC, "made")
    changes = spec_changes(stored, StudySpec.load(place / "made.toml"))
    assert (changes.allowed, changes.refused) == ([], [])
