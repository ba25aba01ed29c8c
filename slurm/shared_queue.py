"""One look at the queue for all engines of a user on a host, however many jobs they watch.

Engines are processes of their own, so what squeue printed last lies in a file that they share, on
the host's own disk on purpose. Whoever finds it too old takes the lock and asks again, for all.

- An answer has the time at which its squeue *began*, on the clock that all processes of a boot
  share, and each reader says how old it may be: a job that is not in an answer from before its own
  sbatch is not absent.
- A failure is shared like an answer, and asked about again at growing distances: ten engines do not
  hammer a controller that is down.
- Nobody waits long for another. Whoever cannot have the lock says that squeue does not answer; once
  its holder is overdue, as a stopped process is, each looks for itself.
- The file is only ever replaced as a whole, the kernel frees the lock of whoever dies, and a file
  that cannot be read is as good as none. Where no file can be kept, each looks for itself.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slurm.answers import queue_command
from slurm.commands import CommandFailed, Commands
from storage.errors import LedgerError, SlurmError, StoreError
from storage.file_locks import FileLock
from storage.records import decode, encode

SHORTEST_S = 0.5
"""Between two looks, whoever asks and however urgently."""
COMMAND_TIMEOUT_S = 30.0
LOCK_PATIENCE_S = 10.0
LONGEST_DELAY_S = 30.0
_OVERDUE_S = COMMAND_TIMEOUT_S + 5.0
_LOCK_POLL_S = 0.05

_LOG = logging.getLogger(__name__)


class QueueSilent(SlurmError):
    """squeue gave no answer, to this process or to one whose answers it shares."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """What squeue said last. Times are seconds since the boot that is named."""

    boot: str
    began_at_s: float
    text: str | None
    failure: str = ""
    num_failures: int = 0
    retry_at_s: float = 0.0


def boot_clock_s() -> float:
    """Seconds of the clock that no one sets and that all processes of this host see alike."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def shared_folder(slurm_conf: Path | None) -> Path:
    """Where this user's processes on this host share what they saw of that cluster."""
    named = slurm_conf or os.environ.get("SLURM_CONF", "")
    key = hashlib.sha256(repr((str(named), queue_command(uid=os.getuid()))).encode())
    return Path(tempfile.gettempdir()) / f"headrace-queue-{os.getuid()}" / key.hexdigest()[:16]


class SharedQueue:
    """The queue as of a moment. Without a `folder` it is this process's own."""

    def __init__(
        self,
        commands: Commands,
        *,
        folder: Path | None,
        clock: Callable[[], float] = boot_clock_s,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._commands = commands
        self._folder = folder
        self._clock = clock
        self._sleep = sleep
        self._page: Page | None = None
        self._version: tuple[int, int, int] | None = None

    @cached_property
    def _boot(self) -> str:
        return _boot_id()

    def read(self, *, max_age_s: float, not_before_s: float = float("-inf")) -> Page:
        """A page with a text that is not older than that, and was begun at `not_before_s` or later.

        Raises:
            SlurmError: squeue failed, or does not answer.
        """
        oldest_s = max(self._clock() - max_age_s, not_before_s)
        if self._folder is not None:
            try:
                return self._read_shared(self._folder, oldest_s)
            except (StoreError, OSError) as error:
                self._give_up_sharing(self._folder, error)
        return self._usable(self._page, oldest_s) or self._ask()

    def _read_shared(self, folder: Path, oldest_s: float) -> Page:
        _make_private(folder)
        begin_s = self._clock()
        with FileLock(folder / "lock") as lock:
            while not lock.try_acquire():
                page = self._usable(self._load(folder), oldest_s)
                if page is not None:
                    return page
                if self._is_overdue(lock, waited_s=self._clock() - begin_s):
                    return self._ask()
                self._sleep(_LOCK_POLL_S)
            os.pwrite(lock.fileno(), repr(self._clock()).encode(), 0)
            try:
                return self._usable(self._load(folder), oldest_s) or self._ask()
            finally:
                os.ftruncate(lock.fileno(), 0)

    def _is_overdue(self, lock: FileLock, *, waited_s: float) -> bool:
        """Whether the lock's holder should have been done long ago.

        Raises:
            QueueSilent: it has not, and was waited for.
        """
        try:
            since_s = float(os.pread(lock.fileno(), 64, 0))
        except ValueError:
            return waited_s >= LOCK_PATIENCE_S
        held_s = self._clock() - since_s
        if held_s >= _OVERDUE_S or held_s < 0:
            return True
        if waited_s >= LOCK_PATIENCE_S:
            raise QueueSilent(f"the squeue of another process is silent for {held_s:.0f} s now")
        return False

    def _usable(self, page: Page | None, oldest_s: float) -> Page | None:
        """The page, if it answers. Raises the failure that it tells of while that is fresh."""
        now_s = self._clock()
        if page is None or page.boot != self._boot or page.began_at_s > now_s:
            return None
        if page.text is None:
            if now_s < page.retry_at_s:
                raise QueueSilent(page.failure)
            return None
        return page if page.began_at_s >= oldest_s else None

    def _ask(self) -> Page:
        """Call squeue, and let the others know what it said."""
        before = self._page if self._page is not None and self._page.boot == self._boot else None
        if before is not None:
            since_s = self._clock() - before.began_at_s
            self._sleep(min(SHORTEST_S, max(0.0, SHORTEST_S - since_s)))
        began_at_s = self._clock()
        try:
            text = self._squeue()
        except SlurmError as error:
            num_failures = 1 + (before.num_failures if before is not None else 0)
            delay_s = min(LONGEST_DELAY_S, 2.0 ** min(num_failures - 1, 10))
            failure = Page(
                boot=self._boot,
                began_at_s=began_at_s,
                text=None,
                failure=str(error),
                num_failures=num_failures,
                retry_at_s=self._clock() + delay_s,
            )
            self._publish(failure)
            raise
        page = Page(boot=self._boot, began_at_s=began_at_s, text=text)
        self._publish(page)
        return page

    def _squeue(self) -> str:
        command = queue_command(uid=os.getuid())
        try:
            result = self._commands.run(command, timeout_s=COMMAND_TIMEOUT_S)
        except OSError as error:
            raise QueueSilent(f"squeue cannot be started: {error}") from error
        if result.failed:
            raise CommandFailed(result)
        return result.stdout

    def _publish(self, page: Page) -> None:
        folder = self._folder
        if folder is None:
            self._page = page
            return
        newer = self._load(folder)
        self._page = page
        if newer is not None and newer.boot == page.boot and newer.began_at_s > page.began_at_s:
            return
        draft = folder / f"draft.{os.getpid()}"
        draft.write_bytes(encode(page))
        draft.replace(folder / "page.json")

    def _load(self, folder: Path) -> Page | None:
        """What lies there, read again only when it has changed."""
        path = folder / "page.json"
        try:
            found = path.stat()
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            if version != self._version:
                self._page, self._version = decode(Page, path.read_bytes()), version
        except (FileNotFoundError, LedgerError):
            return None
        return self._page

    def _give_up_sharing(self, folder: Path, error: Exception) -> None:
        _LOG.warning(
            "the queue is not shared with this user's other processes, so each asks Slurm itself: "
            "%s; make %r writable, or set TMPDIR to a folder of this host that is",
            error,
            str(folder),
        )
        self._folder = None


def _make_private(folder: Path) -> None:
    """A folder that nobody else can have prepared, nor can read or change.

    Raises:
        OSError: it cannot be made.
        StoreError: it is another's, or open to others.
    """
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        is_open = stat.S_IMODE(found.st_mode) & 0o077
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or is_open:
            raise StoreError(f"{str(path)!r} is not a folder of this user alone")


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
