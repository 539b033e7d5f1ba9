"""Processes that start within milliseconds: each is forked from one that has imported all they
need. Importing takes each process four seconds of a core.

They are processes like all others: children of the one that starts them, each in a session of its
own, with its own arguments, variables and files. Some tests start the same programs in the plain
way, so that those are tried, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from engine.model.build import library
from engine.paths import PROGRAM_ROOT

SERVER = "from tests.support.forked_processes import serve_first; serve_first({})"
SERVES = b"serve_first"
"""The command of a forked process has this word, since it is that of the server."""
SERVER_NAME = "forks"
MODULES = (
    "engine.tools.cli.launched",
    "engine.tools.cli.train",
    "engine.runtime.distributed.worker",
    "engine.training.loop.trainer",
    "tests.support.launches",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
)
"""Forked processes need these. The tiny models of runs are llamas."""
LARGEST_REQUEST = 1 << 20
FREE = 500
"""From this number on, no file is open in a process that was just forked."""
_SUBREAPER, _NAME = 36, 15
"""These are requests to `prctl`: to get orphans, and to name this process."""
_lock = threading.Lock()


class ForkedProcess(subprocess.Popen):
    """It runs a command of Python's `-c`, `-m`, or of a file. Everything else is as for `Popen`,
    but for the name of the process, which is the value of its variable RANK, if it has one.
    """

    modules: tuple[str, ...] = ()
    """What is imported before the process is forked, beside MODULES."""

    def _execute_child(self, *given: Any) -> None:
        names = [*inspect.signature(subprocess.Popen._execute_child).parameters][1:]
        how = dict(zip(names, given, strict=True))
        pipes = [
            how[name]
            for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        plain = {0: how["p2cread"], 1: how["c2pwrite"], 2: how["errwrite"]}
        files = {number: number if own == -1 else own for number, own in plain.items()}
        files |= {number: number for number in how["pass_fds"]}
        command, env = [*map(os.fspath, how["args"])], how["env"]
        try:
            if not os.access(command[0], os.X_OK):
                raise FileNotFoundError(2, os.strerror(2), command[0])
            env = dict(os.environ if env is None else env)
            folder = os.fspath(how["cwd"] or os.getcwd())
            self.pid = server().fork([command, env, folder], files, self.modules)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


class ForkedApp(ForkedProcess):
    """A process that serves the app."""

    modules = ("app.main",)


class Server:
    """A process that others are forked from. It has imported, and has no threads."""

    def __init__(self, line: socket.socket, pid: int):
        self._line = line
        self.pid = pid

    @classmethod
    def started(cls) -> Server:
        """Starts one as a new Python."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVER.format(theirs.fileno())],
                cwd=PROGRAM_ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return cls(ours, process.pid)

    @classmethod
    def forked(cls) -> Server:
        """Forks one from this process, which must have no threads."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            ours.close()
            _servers.clear()
            os.setsid()
            serve(theirs)
            os._exit(0)
        theirs.close()
        return cls(ours, pid)

    def fork(self, how: list, files: dict[int, int], modules: tuple[str, ...]) -> int:
        """Returns the number of a new process, a child of this one. how: its command, variables
        and folder. files: those that it gets, by the numbers that they have there. modules: what
        the server imports before.
        """
        request = json.dumps([*how, [*files], modules]).encode()
        with _lock:
            _ask_system(_SUBREAPER, 1)
            try:
                socket.send_fds(self._line, [request], [*files.values()])
                return int(self._line.recv(100))
            finally:
                _ask_system(_SUBREAPER, 0)


_servers: list[Server] = []


def server() -> Server:
    """Returns the server of this process, which the first call starts. Both end together. Call it
    before a test changes what a new Python does.
    """
    if not _servers:
        _servers.append(Server.started())
    return _servers[0]


def fork_from_here() -> None:
    """Lets a process that was forked be the start of others: of all that it starts from now on."""
    _servers[:] = [Server.forked()]


def is_server(pid: int) -> bool:
    """Tells whether a process is one that others are forked from."""
    # One that has just been started has not yet taken its name.
    return any(each.pid == pid for each in _servers) or _name_of(pid) == SERVER_NAME


def forked_rank(pid: int) -> str | None:
    """Returns the variable RANK of a forked process, or None where it is another process."""
    kind, _, rank = _name_of(pid).partition(" ")
    return rank if kind == "rank" else None


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")


def _ask_system(number: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(number, value, 0, 0, 0)


# --------------------------------------------------------------------- in the server


def serve_first(descriptor: int) -> None:
    """Imports, and then serves."""
    _import(*MODULES)
    library.transformers()
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=descriptor))


def _import(*modules: str) -> None:
    for module in modules:
        importlib.import_module(module)


def serve(line: socket.socket) -> None:
    """Forks a process at each request, until the other end is gone."""
    _ask_system(_NAME, SERVER_NAME.encode())
    with line:
        while True:
            request, descriptors, _, _ = socket.recv_fds(line, LARGEST_REQUEST, 16)
            if not request:
                return
            *how, modules = json.loads(request)
            _import(*modules)
            line.send(str(_forked(how, descriptors, line)).encode())
            for each in descriptors:
                os.close(each)


def _forked(request: list, descriptors: list[int], line: socket.socket) -> int:
    """Forks twice, so that the process becomes a child of the one that asks for orphans."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os._exit(0)
        line.detach()
        *how, numbers = request
        _take_files(dict(zip(numbers, descriptors)))
        _run(*how)
    os.close(write)
    os.waitpid(between, 0)
    pid = int(os.read(read, 100))
    os.close(read)
    return pid


def _take_files(files: dict[int, int]) -> None:
    """Gives files their numbers, and closes all others."""
    # None may take the place of another that is still to be moved.
    moved = {number: os.dup2(own, FREE + number, False) for number, own in files.items()}
    os.closerange(3, FREE)
    for number, own in moved.items():
        os.dup2(own, number)
        os.close(own)


def _run(command: list[str], env: dict[str, str], folder: str) -> NoReturn:
    """Runs a command as a new Python would, and ends the process."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    name = f"rank {env['RANK']}" if "RANK" in env else "python"
    _ask_system(_NAME, name.encode())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    arguments = [each for each in command[1:] if each not in ("-P", "-u")]
    code: Any = 1
    try:
        _customize(env.get("PYTHONPATH", ""))
        code = _do(arguments)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    _end(code)


def _do(arguments: list[str]) -> int:
    kind, *others = arguments
    if kind == "-c":
        sys.argv[:] = ["-c", *others[1:]]
        exec(others[0], {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv[:] = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(kind, run_name="__main__")
    return 0


def _customize(path: str) -> None:
    """Looks for modules where a new Python would, and runs the file that it would run first."""
    folders = [*filter(None, path.split(os.pathsep))]
    sys.path[1:1] = folders
    for folder in folders:
        custom = os.path.join(folder, "sitecustomize.py")
        if os.path.exists(custom):
            runpy.run_path(custom)
            return


def _end(code: Any) -> NoReturn:
    """Ends the process as Python does, but for what belongs to the process that it is forked from.
    code: what `sys.exit` was given.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)
