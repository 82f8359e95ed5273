"""Verifies the data during training: each rank reads a part of the prepared files and compares their checksums.

opened        reports whether the sources have changed, and starts a thread on each rank
wants_stop    damage is found: the ranks then stop together
saving        waits until all is read, and looks at each save whether a file has changed since the start: nothing
              learned from damaged or changed data is kept
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenpack.data.checksums import Damage
from evenpack.data.manifest import MANIFEST
from evenpack.data.prepared import PreparedData
from evenpack.data.sources.files import InputFile
from evenpack.data.verification import Verified, Verifier, refuse_changed_sources
from evenpack.engine.activity import doing
from evenpack.engine.parts.part import Part, Step
from evenpack.engine.world.distributed import World
from evenpack.errors import DataError, EvenpackError, RunError
from evenpack.units import counted

log = logging.getLogger(__name__)

_MESSAGE_SECONDS = 30.0
"""Seconds between messages of the ranks while they wait: far below the time-outs of their collectives."""
_POLL_SECONDS = 0.1
"""Seconds between two checks of how far this rank has read."""


class DataVerification(Part):
    """Reads a rank's part of the prepared files once, by a thread, unless data.verify_in_training is false."""

    def __init__(self, prepared: PreparedData, world: World) -> None:
        self._prepared = prepared
        self._world = world
        self._verifier = Verifier(self._prepared.directory, self._prepared.manifest)
        self._share = (0, 1)
        self._cancelled = threading.Event()
        self._verified: Verified | None = None
        self._error: str | None = None
        self._read_bytes = 0
        # A daemon, because a run that ends with an error must not wait for the disk.
        self._thread = threading.Thread(target=self._read, name="verification", daemon=True)
        self._is_due = self._prepared.config.verify_in_training
        self._before: dict[Path, InputFile] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Starts to read, and ends the thread. An error that damaged data may have caused is reported as damage."""
        finding = self._world.on_main(lambda: _changed_sources(self._prepared))
        if finding is not None and self._world.is_main:
            log.warning("%s. This run continues with the packs as they were prepared", finding)
        self._share = _share(self._prepared, self._world)
        if self._sees_changes:
            self._before = self._verifier.states()
        if self._is_due:
            self._thread.start()
        try:
            yield
        except EvenpackError:
            raise
        except Exception as error:
            if self._verified is not None:  # what is known so far
                try:
                    self._verifier.refuse(self._verified.damages, seen=f" (seen by rank {self._world.rank})")
                except DataError as damage:
                    raise damage from error
            raise
        finally:
            self._cancelled.set()

    @property
    def wants_stop(self) -> bool:
        """Whether this rank has read its part and found damage."""
        return self._verified is not None and bool(self._verified.damages)

    def saving(self, step: Step) -> None:
        """Waits until all files are read, at the first save, and compares their states with those of the start.

        Raises: DataError, on all ranks, naming each damaged or changed file.
        """
        if self._is_due:
            self._wait_until_verified(step)
        changes: tuple[Damage, ...] = ()
        if self._sees_changes:
            changes = self._verifier.find_changes(self._before)
        for rank, (found, host) in enumerate(self._world.all_gather((changes, socket.gethostname()))):
            seen = f" (seen by rank {rank} on {host}; the checkpoint of step {step.steps_done} is not saved)"
            self._verifier.refuse(found, seen=seen)

    @property
    def _sees_changes(self) -> bool:
        """Whether this rank compares states: one on each machine does, which may have a copy of its own."""
        return self._world.local_rank == 0

    def _wait_until_verified(self, step: Step) -> None:
        if self._thread.is_alive() and self._world.is_main:
            log.info("the checkpoint waits until the prepared data is verified")
        doing.enter("verifying the data", step.steps_done)
        while not all(self._world.all_gather(self._is_read())):
            pass
        self._is_due = False
        reports = self._world.all_gather((self._verified, self._error, socket.gethostname()))
        for rank, (verified, error, host) in enumerate(reports):
            if verified is None:
                raise RunError(f"rank {rank} on {host} could not verify the prepared data: {error}")
            seen = f" (seen by rank {rank} on {host}; nothing learned from it since is saved)"
            self._verifier.refuse(verified.damages, seen=seen)
        if self._world.is_main:
            log.info("%s", _describe([verified for verified, _, _ in reports if verified is not None]))

    def _read(self) -> None:
        share, shares = self._share
        try:
            self._verified = self._verifier.verify_share(
                share, shares, is_cancelled=self._cancelled.is_set, on_read=self._note_bytes
            )
        except Exception as error:  # any error is reported by `saving` on all ranks
            self._error = f"{type(error).__name__}: {error}"

    def _note_bytes(self, count: int) -> None:
        self._read_bytes = count

    def _is_read(self) -> bool:
        """Waits for this rank's part, until the next message at most, and returns whether it is read."""
        deadline, seen = time.monotonic() + _MESSAGE_SECONDS, self._read_bytes
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_POLL_SECONDS)
            if self._read_bytes != seen:
                seen = self._read_bytes
                doing.tick()
        if self._thread.is_alive():
            return False
        if doing.activity == "verifying the data":  # once: to wait is no progress
            doing.enter("waiting for verification")
        return True


def _share(prepared: PreparedData, world: World) -> tuple[int, int]:
    """Returns this rank's index among those that see the same files, and their number: machines may have copies."""
    status = (prepared.directory / MANIFEST).stat()
    seen = world.all_gather((status.st_ino, status.st_ctime_ns))
    alike = [rank for rank, identity in enumerate(seen) if identity == seen[world.rank]]
    return alike.index(world.rank), len(alike)


def _changed_sources(prepared: PreparedData) -> str | None:
    try:
        refuse_changed_sources(prepared.config, prepared.manifest, prepared.directory)
    except DataError as error:
        return str(error)
    return None


def _describe(shares: list[Verified]) -> str:
    read, seconds = sum(share.bytes for share in shares), max(share.elapsed_seconds for share in shares)
    return (
        f"the prepared data is as it was written: {read / 1e6:,.1f} MB verified by {counted(len(shares), 'rank')} in "
        f"{seconds:,.2f} s during the training ({read / max(seconds, 1e-9) / 1e9:.2f} GB/s)"
    )
