"""Two machines on this one: network namespaces with a name, an address and an SSH server each, joined by a cable.

They share this machine's files, as machines of a cluster share a file system. The names are those that `hostname` says
there, and each reaches the other by its name.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
"""Open MPI's wheel puts `mpirun` beside this Python."""

_START_SECONDS = 600.0
NETWORK = "10.213.0.0/24"
"""Only seen inside, whatever this machine is connected to."""


def missing_tool(*programs: str) -> str | None:
    """Returns why two machines cannot be made here, which is the reason for a skip; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {"ip": "iproute2", "unshare": "util-linux", "ssh": "openssh-client", "mpirun": "openmpi-bin"}
    for program in ("ip", "unshare", "ssh", *programs):
        if shutil.which(program, path=PATH) is None:
            return f"{program} is not installed (Debian: apt-get install {packages.get(program, program)})"
    if not Path(SSHD).exists():
        return "sshd is not installed (Debian: apt-get install openssh-server)"
    probe = f"evp{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One of the two."""

    name: str
    address: str
    namespace: str
    port: str
    """Its end of the cable."""

    def command(self, *command: str) -> list[str]:
        """Returns the command that runs another one on this machine."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.namespace, *named, *command]

    def pids(self) -> list[int]:
        """Returns the processes of this machine."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(pid) for pid in listed.stdout.split()]


@dataclass(frozen=True, kw_only=True)
class TwoMachines:
    """The two, with what it takes to log in from one to the other."""

    node1: Machine
    node2: Machine
    folder: Path
    servers: "tuple[subprocess.Popen[bytes], ...]"

    @property
    def ssh_options(self) -> str:
        return f"-F {self.folder / 'ssh_config'}"

    def hostfile(self, slots: int, *of: Machine) -> Path:
        """Writes a hostfile of these machines, or of both."""
        path = self.folder / "hosts"
        path.write_text("".join(f"{machine.name} slots={slots}\n" for machine in of or (self.node1, self.node2)))
        return path

    def processes(self, *of: Machine) -> list[int]:
        """Returns the processes of these machines, or of both, but for the SSH servers."""
        servers = {server.pid for server in self.servers}
        return [pid for machine in of or (self.node1, self.node2) for pid in machine.pids() if pid not in servers]


@contextmanager
def two_machines(folder: Path) -> Iterator[TwoMachines]:
    """Makes the two, and removes them and every process on them."""
    machines = [
        Machine(name=f"node{n}", address=f"10.213.0.{n}", namespace=f"evp{os.getpid()}n{n}", port=f"evp{n}")
        for n in (1, 2)
    ]
    servers: list[subprocess.Popen[bytes]] = []
    try:
        _connect(machines)
        _write_ssh_files(folder, machines)
        for machine in machines:
            command = machine.command(SSHD, "-D", "-e", "-f", str(folder / "sshd_config"))
            with (folder / f"sshd_{machine.name}.log").open("w") as log:
                servers.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        found = TwoMachines(node1=machines[0], node2=machines[1], folder=folder, servers=tuple(servers))
        for machine in machines:
            _wait_until_reachable(found, machine)
        yield found
    finally:
        for machine in machines:
            for pid in machine.pids():
                subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)
        for server in servers:
            server.wait()
        for machine in machines:
            subprocess.run(["ip", "netns", "delete", machine.namespace], capture_output=True, check=False)
            shutil.rmtree(_own_etc(machine), ignore_errors=True)


def _connect(machines: Sequence[Machine]) -> None:
    one, two = machines
    for machine in machines:
        _run("ip", "netns", "add", machine.namespace)
        _own_etc(machine).mkdir(parents=True)
        hosts = "".join(f"{other.address} {other.name}\n" for other in machines)
        (_own_etc(machine) / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    ends = [["name", machine.port, "netns", machine.namespace] for machine in machines]
    _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for machine in (one, two):
        inside = ["ip", "-n", machine.namespace]
        _run(*inside, "address", "add", f"{machine.address}/24", "dev", machine.port)
        _run(*inside, "link", "set", machine.port, "up")
        _run(*inside, "link", "set", "lo", "up")


def _own_etc(machine: Machine) -> Path:
    """Returns the folder whose files `ip netns exec` shows in /etc."""
    return Path("/etc/netns") / machine.namespace


def _write_ssh_files(folder: Path, machines: Sequence[Machine]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key in ("host_key", "user_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"HostKey {folder / 'host_key'}\nAuthorizedKeysFile {folder / 'user_key.pub'}\nPidFile none\n"
        "PermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\nUseDNS no\nPrintMotd no\nMaxStartups 100\n"
    )
    names = " ".join(machine.name for machine in machines)
    (folder / "ssh_config").write_text(
        f"Host {names}\n  User root\n  IdentityFile {folder / 'user_key'}\n  StrictHostKeyChecking no\n"
        f"  UserKnownHostsFile {os.devnull}\n  LogLevel ERROR\n  BatchMode yes\n"
    )


def _wait_until_reachable(machines: TwoMachines, machine: Machine) -> None:
    command = machines.node1.command("ssh", *machines.ssh_options.split(), machine.name, "hostname")
    deadline = time.monotonic() + _START_SECONDS
    while True:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout.strip() == machine.name:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{machine.name} cannot be reached: {done.stdout}{done.stderr}")
        time.sleep(0.2)


def _run(*command: str, **options: Any) -> None:
    subprocess.run(command, check=True, capture_output=True, **options)
