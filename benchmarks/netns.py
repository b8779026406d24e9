"""Ranks on a network of a known rate: one Linux network namespace per rank, joined by rate-limited veth links.

Two ranks share one veth pair. More than two hang on a bridge, which has a namespace of its own. The rate holds in
both directions, at both ends of each link (token bucket filter of `tc`). Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PREFIX = "cfbench"
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

CONGESTION_CONTROL = "cubic"
"""BBR estimates the rate, and behind a token bucket it stays 5 to 35% below, otherwise on every connection."""

Command = list[str]


class Unavailable(RuntimeError):
    """This machine lets us make no rate-limited network."""


@dataclass(frozen=True)
class Layout:
    """Names and addresses of one network. `pid` makes namespaces unique; other names are local to a namespace."""

    pid: int
    ranks: int

    @property
    def hub(self) -> str | None:
        """Namespace of the bridge; None for two ranks, whose interfaces are the two ends of one pair."""
        return f"{PREFIX}-{self.pid}-hub" if self.ranks > 2 else None

    def namespace(self, rank: int) -> str:
        return f"{PREFIX}-{self.pid}-{rank}"

    def interface(self, rank: int) -> str:
        return f"veth{rank}"

    def address(self, rank: int) -> str:
        return f"10.213.{(rank + 1) // 256}.{(rank + 1) % 256}"

    def namespaces(self) -> list[str]:
        return [self.namespace(rank) for rank in range(self.ranks)] + ([self.hub] if self.hub else [])

    def ends(self) -> list[tuple[str, str]]:
        """(namespace, interface) of every end of a link; what leaves through an end is held to the rate."""
        ends = [(self.namespace(rank), self.interface(rank)) for rank in range(self.ranks)]
        return ends + ([(self.hub, f"port{rank}") for rank in range(self.ranks)] if self.hub else [])


def setup_commands(layout: Layout) -> list[Command]:
    """Make the namespaces and links, without a rate."""
    commands = [["ip", "netns", "add", name] for name in layout.namespaces()]
    if layout.hub is None:
        commands.append(_veth(layout.namespace(0), layout.interface(0), layout.namespace(1), layout.interface(1)))
    else:
        commands.append(["ip", "-n", layout.hub, "link", "add", "bridge", "type", "bridge"])
        commands.append(["ip", "-n", layout.hub, "link", "set", "bridge", "up"])
        for rank in range(layout.ranks):
            port = f"port{rank}"
            commands.append(_veth(layout.namespace(rank), layout.interface(rank), layout.hub, port))
            commands.append(["ip", "-n", layout.hub, "link", "set", port, "master", "bridge", "up"])
    for rank in range(layout.ranks):
        inside = ["ip", "-n", layout.namespace(rank)]
        interface = layout.interface(rank)
        commands.append([*inside, "link", "set", "lo", "up"])
        # Gloo takes an address of the interface: leave it only the one given here.
        commands.append([*inside, "link", "set", interface, "addrgenmode", "none"])
        commands.append([*inside, "addr", "add", f"{layout.address(rank)}/16", "dev", interface])
        commands.append([*inside, "link", "set", interface, "up"])
        # Congestion control by loss, as Linux has it where nobody chose. One that paces what it sends by its own
        # estimate of the rate (BBR) stays up to a third below the filter's, differently on every connection.
        route = ["route", "change", "10.213.0.0/16", "dev", interface, "proto", "kernel", "scope", "link"]
        commands.append([*inside, *route, "src", layout.address(rank), "congctl", CONGESTION_CONTROL])
    return commands


def _veth(namespace: str, interface: str, peer_namespace: str, peer: str) -> Command:
    ours, theirs = [interface, "netns", namespace], ["peer", "name", peer, "netns", peer_namespace]
    return ["ip", "link", "add", *ours, "type", "veth", *theirs]


def rate_commands(layout: Layout, rate: float | None) -> list[Command]:
    """Hold every end of every link to `rate` Gbit/s, in place of what it was held to; None: no limit."""
    if rate is None:
        queue = ["noqueue"]
    else:
        queue = ["tbf", "rate", f"{rate:g}gbit", "burst", "1mb", "latency", "100ms"]
    return [["tc", "-n", name, "qdisc", "replace", "dev", end, "root", *queue] for name, end in layout.ends()]


def set_rate(layout: Layout, rate: float | None) -> None:
    """Hold the network to `rate` Gbit/s, or to none. Any process of this machine may call it. Raises Unavailable."""
    for command in rate_commands(layout, rate):
        _run(command)


def teardown_commands(layout: Layout) -> list[Command]:
    """Remove the namespaces, and with them the links."""
    return [["ip", "netns", "delete", name] for name in layout.namespaces()]


def stale(names: Iterable[str], alive: Callable[[int], bool]) -> list[str]:
    """Those of the namespaces `names` that a benchmark made whose process is gone."""
    found = []
    for name in names:
        parts = name.split("-")
        if len(parts) == 3 and parts[0] == PREFIX and parts[1].isdigit() and not alive(int(parts[1])):
            found.append(name)
    return found


class Network:
    """The network of one benchmark, as a context manager. Entering raises Unavailable, and leaves nothing behind."""

    def __init__(self, ranks: int) -> None:
        self.layout = Layout(os.getpid(), ranks)

    def __enter__(self) -> Network:
        for tool in ("ip", "tc"):
            if shutil.which(tool, path=SEARCH) is None:
                raise Unavailable(f"the command {tool} is missing (Debian and Ubuntu: apt-get install iproute2)")
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")
        try:
            listed = _run(["ip", "netns", "list"]).splitlines()
            for name in stale([line.split()[0] for line in listed if line.strip()], _alive):
                _run(["ip", "netns", "delete", name])
            for command in setup_commands(self.layout):
                _run(command)
            set_rate(self.layout, 1.0)  # tells now, not after minutes, whether the kernel has the filter
            set_rate(self.layout, None)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def inside(self, rank: int) -> Command:
        """What to put before a command so that it runs on the network as `rank`."""
        return [tool_path("ip"), "netns", "exec", self.layout.namespace(rank)]

    def close(self) -> None:
        """Remove whatever is there; never raises."""
        for command in teardown_commands(self.layout):
            subprocess.run([tool_path(command[0]), *command[1:]], capture_output=True, check=False)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def tool_path(tool: str) -> str:
    """Where a tool lies; `ip` and `tc` are often outside of PATH."""
    return shutil.which(tool, path=SEARCH) or tool


def _run(command: Sequence[str]) -> str:
    done = subprocess.run([tool_path(command[0]), *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise Unavailable(f"`{' '.join(command)}` failed: {message}")
    return done.stdout
