"""The ranks of one start meet in torch's key-value store, before there is a process group.

The store listens at MASTER_ADDR and MASTER_PORT: rank 0 holds it, or torchrun does. The process group uses the same one
afterwards, as another tenant.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from evenpack.errors import RunError
from evenpack.launch_environment import AGENT_STORE, MASTER_PORT

MEETING_SECONDS = 600.0
"""Seconds for all ranks to come: importing torch from a cold network file system takes minutes on many machines."""

_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 5.0
"""Seconds of one attempt to reach the store."""
_READERS_SECONDS = 10.0
_SHOWN_RANKS = 8
_STOP_SECONDS = 3.0
"""Seconds from the loss of the store to its error: where all ranks are stopped, the guard ends this one before."""


class Meeting:
    """All ranks of one start; the store lives as long as this."""

    def __init__(
        self,
        purpose: str,
        *,
        rank: int,
        size: int,
        patience_seconds: float = MEETING_SECONDS,
    ) -> None:
        """Waits until every rank has come.

        Meetings of one process need purposes of their own: some ranks come to the next one before all have left.

        Raises: RunError if the store is not reached or lost, or if a rank does not come within `patience_seconds`.
        """
        self.rank = rank
        self.size = size
        self._patience = patience_seconds
        self._deadline = time.monotonic() + patience_seconds
        self._store = _open_store(f"evenpack/{purpose}", rank=rank, patience_seconds=patience_seconds)
        with self._loss_explained():
            self.id = self._lead() if rank == 0 else self._follow()
            """An id that all ranks of this start have, and no others."""

    def process_group_url(self) -> str:
        """Returns the `init_method` by which torch's process group meets in this store, under this id.

        Where torchrun starts ranks again with `--node-rank`, the store still has the addresses of the earlier ones.
        """
        place = (dist.PrefixStore(self.id, self._store), self.rank, self.size)  # type: ignore[attr-defined]
        scheme = f"evenpack-{self.id}"
        register_rendezvous_handler(scheme, lambda _url, **_options: iter([place]))  # type: ignore[no-untyped-call]
        return f"{scheme}://"

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """Returns on rank 0 what every rank gives, in the order of ranks; None on the others. `value` is of JSON.

        Raises: RunError if the store is lost.
        """
        keys = [f"{self.id}/{name}/{rank}" for rank in range(self.size)]
        with self._loss_explained():
            self._store.set(keys[self.rank], json.dumps(value))
            if self.rank == 0:
                self._wait_for(keys)
            return [json.loads(text) for text in self._store.multi_get(keys)] if self.rank == 0 else None

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Returns on every rank what rank 0 gives. Raises: RunError if the store is lost."""
        key = f"{self.id}/{name}"
        with self._loss_explained():
            if self.rank == 0:
                self._store.set(key, json.dumps(value))
            self._wait_for([key])
            answer = json.loads(self._store.get(key))
            self._store.set(f"{key}/read/{self.rank}", "")
            return answer

    def wait_for_readers(self, name: str) -> None:
        """Waits a little until every rank has read a broadcast: where rank 0 ends, so does its store."""
        deadline = time.monotonic() + _READERS_SECONDS
        keys = [f"{self.id}/{name}/read/{rank}" for rank in range(self.size)]
        while self.rank == 0 and not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _lead(self) -> str:
        """Makes the id, and gives it to every rank that has come.

        torchrun's store may still hold what ranks wrote that it has started earlier. So each rank writes a word of its
        own, and follows only an answer to it; the answer is written again until all have said that they follow.
        """
        own = uuid.uuid4().hex
        words = [f"came/{rank}" for rank in range(1, self.size)]
        follows = [f"follows/{rank}" for rank in range(1, self.size)]
        answered: list[str] = []
        while not (self._store.check(follows) and all(self._text(key) == own for key in follows)):
            if self._store.check(words) and (came := [self._text(key) for key in words]) != answered:
                self._store.set("answer", json.dumps({"id": own, "came": came}))
                answered = came
            self._wait(lambda: self._missing(words) or self._missing(follows, own))
        return own

    def _follow(self) -> str:
        own = uuid.uuid4().hex
        self._store.set(f"came/{self.rank}", own)
        while True:
            if self._store.check(["answer"]):
                answer = json.loads(self._text("answer"))
                came = answer["came"]
                if len(came) == self.size - 1 and came[self.rank - 1] == own:
                    self._store.set(f"follows/{self.rank}", answer["id"])
                    return str(answer["id"])
            self._wait(list)

    def _missing(self, keys: list[str], text: str | None = None) -> list[int]:
        """Returns the ranks, from 1 on, whose key does not exist or has another text."""

        def is_there(key: str) -> bool:
            return bool(self._store.check([key])) and text in (None, self._text(key))

        return [rank for rank, key in enumerate(keys, 1) if not is_there(key)]

    def _text(self, key: str) -> str:
        return str(self._store.get(key).decode())

    def _wait_for(self, keys: list[str]) -> None:
        """Waits until the store has the keys of ranks from 0 on, and lets signals be handled meanwhile.

        Raises: RunError after `patience_seconds`.
        """
        self._deadline = time.monotonic() + self._patience
        while not self._store.check(keys):
            self._wait(lambda: [rank for rank, key in enumerate(keys) if not self._store.check([key])])

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Waits a moment. Raises: RunError after the deadline, with the ranks that are `missing`."""
        if time.monotonic() > self._deadline:
            raise RunError(
                f"rank {self.rank} on {socket.gethostname()} has waited {self._patience:g} s for the others to start; "
                f"{_name_ranks(missing())}. Look at the first lines of their log, and whether their machine is up"
            )
        time.sleep(_POLL_SECONDS)

    @contextmanager
    def _loss_explained(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            time.sleep(_STOP_SECONDS)
            raise RunError(
                f"rank {self.rank} on {socket.gethostname()} has lost the store in which the ranks meet "
                f"({str(error).partition(chr(10))[0]}): rank 0, which holds it unless torchrun does, has ended; its "
                "log says why"
            ) from error


def _name_ranks(missing: list[int]) -> str:
    if not missing:
        return "not all have come to rank 0"
    shown = ", ".join(map(str, missing[:_SHOWN_RANKS])) + (", ..." if len(missing) > _SHOWN_RANKS else "")
    return f"rank {shown} has not come" if len(missing) == 1 else f"{len(missing)} have not come: ranks {shown}"


def _open_store(prefix: str, *, rank: int, patience_seconds: float) -> dist.Store:
    """Connects to the store, in which keys begin with `prefix`. Raises: RunError if it is not reached."""
    address, port = os.environ["MASTER_ADDR"], MASTER_PORT.read(os.environ)
    assert port is not None, "`complete_environment` has set it"
    host = socket.gethostname()
    try:
        socket.getaddrinfo(address, port)
    except socket.gaierror as error:
        raise RunError(
            f"{host} does not know the address of rank 0, {address} ({error.strerror}): set MASTER_ADDR, or give "
            "`deepspeed --master_addr ADDRESS`"
        ) from error
    is_server = rank == 0 and os.environ.get(AGENT_STORE) != "True"
    deadline = time.monotonic() + patience_seconds
    while True:
        left = deadline - time.monotonic()
        try:
            if not is_server:  # torch would print a screen of C++ frames for each attempt before rank 0 listens
                socket.create_connection((address, port), timeout=max(1.0, min(left, _CONNECT_SECONDS))).close()
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                is_master=is_server,
                timeout=timedelta(seconds=max(1.0, min(left, _CONNECT_SECONDS))),
                wait_for_workers=False,
                multi_tenant=True,
            )
            break
        except (dist.DistError, OSError) as error:
            if left > 0 and not is_server:
                time.sleep(_POLL_SECONDS)
                continue
            what = f"{host} has not reached rank 0 at {address}:{port} within {patience_seconds:g} s"
            do = "is the address one that every machine reaches, and the port open?"
            if is_server:
                what = (
                    f"{host} cannot listen for the other ranks at {address}:{port} ({str(error).partition(chr(10))[0]})"
                )
                do = "another run may use the port (MASTER_PORT), or the address is that of another machine"
            raise RunError(f"{what}; {do}") from error
    store.set_timeout(timedelta(seconds=patience_seconds))
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
