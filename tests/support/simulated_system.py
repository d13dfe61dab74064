"""A process that lacks what Windows ("win32") or macOS ("darwin") lack, and is told that it runs there.

The libraries are Linux's, loaded before: what the package itself imports, calls, opens and locks is what is tried.
os.name and the separator of paths stay, and what the process starts runs on Linux again.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import multiprocessing.context
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: Loaded before anything is taken away: they ask for the system, or for what it lacks, as they are imported.
LOADED = (
    *("asyncio", "concurrent.futures.thread", "concurrent.futures.process", "multiprocessing.managers", "subprocess"),
    *("logging", "tempfile", "random", "rich.console", "rich.table", "platformdirs", "psutil", "torch"),
    "torch._inductor.config",
)
MODULES = {"win32": ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"), "darwin": ()}
#: What the other has not either.
OF_LINUX = """
os: copy_file_range eventfd fdatasync getrandom getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise
os: posix_fallocate removexattr sched_getaffinity sched_setaffinity setxattr splice waitid O_DIRECT O_PATH O_TMPFILE
signal: SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT SIGPOLL pidfd_send_signal sigtimedwait sigwaitinfo
select: epoll
mmap: MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_REMOVE MAP_POPULATE MAP_STACK
"""
OF_UNIX = """
os: O_ACCMODE O_ASYNC O_CLOEXEC O_DIRECTORY O_DSYNC O_NDELAY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC RTLD_GLOBAL
os: RTLD_LOCAL RTLD_NOW WCOREDUMP WEXITED WEXITSTATUS WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WNOWAIT WTERMSIG
os: chown chroot confstr ctermid environb fchdir fchmod fchown fork forkpty fpathconf fstatvfs fwalk getegid getenvb
os: geteuid getgid getgroups getloadavg getpgid getpgrp getpriority getsid getuid initgroups killpg lchown lockf major
os: minor mkfifo mknod nice openpty pathconf posix_spawn posix_spawnp pread preadv pwrite pwritev readv register_at_fork
os: sched_yield sendfile setegid seteuid setgid setpgid setpriority setsid setuid spawnlp spawnvp statvfs sync sysconf
os: tcgetpgrp ttyname uname wait wait3 wait4 writev
signal: ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF
signal: SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGWINCH SIGXCPU alarm getitimer pause
signal: pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait
select: poll PIPE_BUF
mmap: MADV_DONTNEED MADV_FREE MADV_NORMAL MADV_WILLNEED MAP_ANON MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ
time: CLOCK_MONOTONIC CLOCK_PROCESS_CPUTIME_ID CLOCK_THREAD_CPUTIME_ID clock_gettime clock_gettime_ns tzset
faulthandler: register unregister
"""
GLIBC = ("malloc_trim", "mallinfo2", "omp_get_max_threads", "omp_set_num_threads", "prctl")
O_BINARY = 0x8000
UNAME = {
    "win32": ("Windows", "AMD64", "Intel64 Family 6 Model 151 Stepping 2, GenuineIntel"),
    "darwin": ("Darwin", "arm64", "arm"),
}


def simulate(system: str) -> None:
    """Make this process one of the system, for good."""
    for name in LOADED:
        importlib.import_module(name)
    sysconfig.get_config_vars()
    sys.platform = system
    name, machine, processor = UNAME[system]
    for asked, answer in (("system", name), ("machine", machine), ("processor", processor), ("platform", name)):
        setattr(platform, asked, lambda *_, answer=answer, **__: answer)
    remove(OF_LINUX)
    if system == "win32":
        be_windows()
    hide_folders()
    loader: Any = ctypes
    loader.CDLL = type("CDLL", (ctypes.CDLL,), {"__init__": _loading(system), "__getattr__": _found})
    for name in MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]


def remove(text: str) -> None:
    """Remove what is listed, as far as this Python has it."""
    for line in text.split("\n")[1:-1]:
        module, _, names = line.partition(": ")
        for name in names.split():
            vars(importlib.import_module(module)).pop(name, None)


def hide_folders() -> None:
    """Linux's /proc and /sys, but from psutil, which has its own ways on each system."""

    def hiding(call: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any = ".", *arguments: Any, **more: Any) -> Any:
            hidden = not isinstance(path, int) and os.fsdecode(path).startswith(("/proc/", "/sys/"))
            if hidden and not _caller().startswith("psutil"):
                raise FileNotFoundError(2, "No such file or directory", path)
            return call(path, *arguments, **more)

        return opened

    builtins.open = io.open = hiding(open)
    for name in ("listdir", "scandir", "stat"):
        setattr(os, name, hiding(getattr(os, name)))


def _caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def be_windows() -> None:
    """Locks of bytes, files that are in use, binary files, no links, no fork."""
    fcntl, readlink, listed = importlib.import_module("fcntl"), os.readlink, os.listdir
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    multiprocessing.context._concrete_contexts = {"spawn": multiprocessing.get_context("spawn")}  # type: ignore[attr-defined]

    def locking(handle: int, mode: int, count: int) -> None:
        assert os.lseek(handle, 0, os.SEEK_CUR) > os.fstat(handle).st_size, "others could not read a locked byte"
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if mode else fcntl.LOCK_UN)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error

    def unless_in_use(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *others: Any, **more: Any) -> Any:
            opened = [_link(f"/proc/self/fd/{each}", readlink) for each in listed("/proc/self/fd")]
            for each in (path, *others):
                if os.path.realpath(each) in opened:
                    raise PermissionError(13, "The process cannot access the file because it is being used", each)
            return call(path, *others, **more)

        return called

    def open_binary(path: Any, flags: int, *arguments: Any, call: Any = os.open, **more: Any) -> int:
        assert not _caller().startswith("attn_dispatch") or flags & O_BINARY, f"{path} would be opened as text"
        return int(call(path, flags & ~O_BINARY, *arguments, **more))

    def utime(path: Any, *arguments: Any, call: Any = os.utime, follow_symlinks: bool = True, **more: Any) -> None:
        if not follow_symlinks:
            raise NotImplementedError("utime: follow_symlinks unavailable on this platform")
        call(path, *arguments, **more)

    found = ModuleType("msvcrt")
    vars(found).update(LK_UNLCK=0, LK_LOCK=1, LK_NBLCK=2, locking=locking)
    sys.modules["msvcrt"] = found
    remove(OF_UNIX)
    for name in ("replace", "rename", "unlink", "remove"):
        setattr(os, name, unless_in_use(getattr(os, name)))
    for name, instead in {"open": open_binary, "utime": utime, "O_BINARY": O_BINARY}.items():
        setattr(os, name, instead)


def _link(path: str, readlink: Callable[[str], str]) -> str:
    try:
        return readlink(path)
    except OSError:  # that of the listing itself
        return ""


def _loading(system: str) -> Callable[..., None]:
    def load(self: Any, name: str | None, *arguments: Any, call: Any = ctypes.CDLL.__init__, **more: Any) -> None:
        if name is None and system == "win32":
            raise TypeError("argument of type 'NoneType' is not iterable")
        call(self, name, *arguments, **more)

    return load


def _found(self: Any, name: str, call: Any = ctypes.CDLL.__getattr__) -> Any:
    if name in GLIBC:
        raise AttributeError(name)
    return call(self, name)
