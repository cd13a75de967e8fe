"""The worker process: prepares tasks and runs trials for the controller, one at a time.

It is kept from trial to trial, with the trainer's module imported and its models cached; after an error the engine ends
it. It never touches the store or the sampler, and imports torch only if the trainer does. Its output and its children's
is appended to the log of the trial it runs.
"""

import ctypes
import faulthandler
import gc
import io
import os
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ppo_core import checkpoint
from ppo_core.config.hyperparameters import PPOConfig
from ppo_core.distributed import launch as launched
from ppo_core.loading.digest import digests
from ppo_core.loading.task_file import get_task
from ppo_core.report import NextMove
from tuner.engine import protocol
from tuner.engine.gpu import limit_memory, require_own_gpu
from tuner.engine.process import WorkerProcess, end_all
from tuner.engine.run_trial import read_checkpoint, run_trial
from tuner.environment import existing
from tuner.files import trial_log


class ControllerPipe:
    """The controller, at the other end of the worker's pipe; the process exits when the pipe closes."""

    def __init__(self, pipe: "connection.Connection[protocol.Message, protocol.Job | NextMove]") -> None:
        self._pipe = pipe

    def emit(self, message: protocol.Message) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            sys.exit(0)

    def ask(self, report: protocol.Stepped) -> NextMove:
        """Report a step, and wait for the answer."""
        self.emit(report)
        answer: NextMove = self.receive()
        return answer

    def receive(self) -> Any:
        """Return the next job or answer."""
        try:
            return self._pipe.recv()
        except (EOFError, OSError):
            sys.exit(0)


def main(pipe: "connection.Connection[protocol.Message, protocol.Job | NextMove]", inherited: Sequence[int]) -> None:
    """Do the jobs from the pipe until it closes, keeping the file descriptors in `inherited` open."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides
    for each in (pipe.fileno(), *inherited):
        os.set_inheritable(each, False)
    for each in inherited:  # a child may outlive this process
        os.register_at_fork(after_in_child=partial(os.close, each))
    _end_with_controller()
    line_buffer_output()
    faulthandler.enable()
    controller = ControllerPipe(pipe)
    while True:
        controller.emit(_carry_out(controller.receive(), controller, inherited))
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _end_with_controller() -> None:
    """Have this process and its children killed when the controller dies, by a guard in their process group."""
    with suppress(OSError):  # without a shell it ends at its next report
        os.posix_spawn("/bin/sh", ["sh", "-c", "read -r _; kill -s KILL 0"], os.environ)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # standard input, which ends with the controller, is the guard's alone
    os.close(nothing)


def _carry_out(job: protocol.Job, controller: ControllerPipe, inherited: Sequence[int]) -> protocol.Message:
    """Do a job and return its last message; an error of the task or the trainer becomes a `Failed`."""
    _begin_log(job)
    try:
        if isinstance(job, protocol.PrepareTask):
            return _prepare(job, controller)
        if job.ranks > launched.size():
            return _supervise(job, controller, inherited)
        if isinstance(job, protocol.ReadCheckpoint):
            return read_checkpoint(job)
        return run_trial(job, controller.ask, lambda phase: controller.emit(protocol.Entered(phase)))
    except Exception as error:
        traceback.print_exception(error)
        return protocol.Failed.of(error)
    finally:
        flush_output()


def _begin_log(job: protocol.Job) -> None:
    if isinstance(job, protocol.TrialSpec):
        path = trial_log.path_of(job.folder)
        begins = "starts" if job.resume_from is None else f"resumes from step {checkpoint.step_of(job.resume_from)}"
        what = f"trial {job.number} {begins}"
    elif isinstance(job, protocol.ReadCheckpoint):
        path = trial_log.path_of(job.folder)
        what = f"trial {job.number} is evaluated at step {job.step} on the {job.split} prompts"
    else:
        path, what = job.folder / trial_log.PREPARATION_NAME, f"preparing task {job.task}"
    with warnings.catch_warnings():  # entering it has Python print warnings again that it has printed once
        pass
    if launched.size() == 1:  # else its supervisor has begun the log
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = f"{os.getpid()} on host {socket.gethostname()}" + (f", GPU {gpu}" if gpu else "")
        trial_log.begin(path, what, where + (f", {job.ranks} processes" if job.ranks > 1 else ""))
    send_output_to(path)


def _prepare(job: protocol.PrepareTask, controller: ControllerPipe) -> protocol.Prepared:
    task = get_task(job.task)
    assets = task.prepare(lambda what, share: controller.emit(protocol.Progress(what, share)))
    if job.configs:
        from ppo_core.loading import fits, ready

        require_own_gpu()
        limit_memory()
        configs = [PPOConfig.from_dict(config) for config in job.configs]
        for note in ready.require_ready(configs, task, assets, tries_rewards=job.tries_rewards):
            controller.emit(protocol.Progress(note, 1.0))
        largest = fits.largest(configs, task, assets, job.device)
        if largest is not None:
            controller.emit(protocol.Progress(f"the largest trial: {fits.line(*largest)}", 1.0))
            one = largest[0].checkpoint
            sizes = (one, job.checkpoints * one, shutil.disk_usage(existing(job.folder)).free)
            each, most, free = map(checkpoint.size, sizes)
            controller.emit(protocol.Progress(f"checkpoints of {each}, up to {most} in all; {free} are free", 1.0))
    return protocol.Prepared(digests(task, assets, job.value_models))


_NOTICE_SECONDS = 2.0  # tolerance: a broken connection may be noticed this much before the death that broke it


def _supervise(
    job: protocol.TrialSpec | protocol.ReadCheckpoint, controller: ControllerPipe, inherited: Sequence[int]
) -> protocol.Message:
    """Run a job on several processes, as their controller, and return its last message; if one fails, all are ended."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        count, port = str(job.ranks), str(server.getsockname()[1])  # a free one
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks: list[WorkerProcess] = []
    try:
        for rank in range(job.ranks):
            launch = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(WorkerProcess(job.threads, launch=launch, inherited=inherited))
            ranks[rank].give(job)
        while True:
            ends = {each.end_signal for each in ranks}
            ready = connection.wait({*(each.pipe for each in ranks), *ends})
            for rank, each in enumerate(ranks):
                if each.pipe not in ready and each.end_signal not in ready:
                    continue
                message = each.receive()
                if isinstance(message, protocol.Lost):
                    ranks.remove(each)
                    sys.exit(f"rank {rank} of {count} ended: {message.how}")
                if isinstance(message, protocol.Failed):
                    print(f"rank {rank} of {count} failed: {message.message}", file=sys.stderr)
                    if message.is_for_user or not connection.wait(ends, _NOTICE_SECONDS):
                        return message
                elif rank == 0 and isinstance(message, protocol.Stepped):
                    each.give(controller.ask(message))
                elif rank == 0 and isinstance(message, protocol.Entered):
                    controller.emit(message)
                elif rank == 0:
                    return message
    finally:
        for each in ranks:
            each.kill()
        end_all(ranks)


# The output, redirected at file descriptors 1 and 2, to include that of C libraries and child processes

_STREAMS = {"stdout": 1, "stderr": 2}


class _Forgiving(io.FileIO):
    """A file that ignores write errors: a full disk must not end a trial that prints."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def line_buffer_output() -> None:
    """Replace Python's streams by line-buffered ones that never fail."""
    for name, descriptor in _STREAMS.items():
        try:
            os.fstat(descriptor)
        except OSError:  # the controller was started without it
            _redirect([descriptor], os.devnull)
        raw = io.BufferedWriter(_Forgiving(descriptor, "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True))


def send_output_to(path: Path) -> None:
    """Append all output to the file from now on, or discard it if the file cannot be written."""
    flush_output()
    try:
        _redirect(_STREAMS.values(), path)
    except OSError:
        _redirect(_STREAMS.values(), os.devnull)


def flush_output() -> None:
    """Flush the output buffers, those of C libraries too."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ctypes.CDLL(None).fflush(None)


def _redirect(descriptors: Collection[int], path: Path | str) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor in descriptors:
        os.dup2(opened, descriptor)
    if opened not in descriptors:
        os.close(opened)
