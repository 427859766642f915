"""Hosts on this machine: network namespaces, joined by links that are limited to a rate.

A namespace has no name in the system. A process that waits for the end of its standard input keeps
it open. So the kernel removes hosts, links and mounts when this process ends, for any reason.
"""

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from shutil import which

from benchmarks.hosts.links import way

#: The programs that are needed, of util-linux and iproute2.
TOOLS = ("unshare", "nsenter", "setpriv", "mount", "ip", "tc")
#: The burst must hold a whole segment (64 KiB), which is limited before the sender cuts it.
_BURST = "128kb latency 200ms"


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        address: for the other hosts; "" for the switch.
        holder: the process that holds it open.
    """

    address: str
    holder: subprocess.Popen

    def command(self, *command: str) -> list[str]:
        """A command that runs on this host, in the current folder, and ends with this process."""
        target = ["--target", str(self.holder.pid), "--net", "--mount", f"--wd={os.getcwd()}"]
        return ["setpriv", "--pdeathsig", "KILL", "nsenter", *target, *command]

    def run(self, script: str) -> None:
        """Run shell commands on this host as root."""
        ran = subprocess.run(
            self.command("sh", "-ec", script),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ran.returncode:
            raise RuntimeError(f"host {self.address}: {ran.stdout.strip()}\n{script}")


def cannot() -> str:
    """The reason why hosts cannot be made here; "" if they can."""
    if os.geteuid():
        return "making hosts takes root"
    missing = [tool for tool in TOOLS if not which(tool)]
    return f"making hosts takes {', '.join(missing)} (util-linux, iproute2)" if missing else ""


@contextmanager
def make_hosts(number: int, links: str, rate: str) -> Iterator[list[Host]]:
    """Make hosts that all reach each other.

    Args:
        number: the number of hosts, at least 1.
        links: "star" joins all to one switch. "ring" joins each to the next one and to the one
            before; hosts forward messages for others the shorter way.
        rate: the rate of each link in each direction, as `tc` takes it, such as 500mbit.
    """
    with ExitStack() as held:
        hosts = [_host(held, f"10.77.0.{i + 1}") for i in range(number)]
        if links == "star":
            _join_by_switch(_host(held, ""), hosts, rate)
        else:
            _join_in_ring(hosts, rate)
        yield hosts


def _host(held: ExitStack, address: str) -> Host:
    holder = held.enter_context(  # leaving the context closes its input, which ends it
        subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    )
    assert holder.stdout
    holder.stdout.readline()  # it has started
    host = Host(address, holder)
    host.run("ip link set lo up")
    if address:  # gloo listens on the address of the machine's name
        host.run(
            f"mount -t tmpfs tmpfs /mnt; "
            f"echo '127.0.0.1 localhost\n{address} {socket.gethostname()}' > /mnt/hosts; "
            f"mount --bind /mnt/hosts /etc/hosts"
        )
    return host


def _shaped(device: str, rate: str) -> str:
    return f"ip link set {device} up; tc qdisc add dev {device} root tbf rate {rate} burst {_BURST}"


def _cable(one: Host, device: str, other: Host, its_device: str, rate: str) -> None:
    """Make a link between two hosts, limited at both ends."""
    ends = one.holder.pid, other.holder.pid
    subprocess.run(
        f"ip link add {device} netns {ends[0]} type veth peer name {its_device} netns {ends[1]}",
        shell=True,
        check=True,
    )
    one.run(_shaped(device, rate))
    other.run(_shaped(its_device, rate))


def _join_by_switch(switch: Host, hosts: Sequence[Host], rate: str) -> None:
    switch.run("ip link add bridge type bridge; ip link set bridge up")
    for i, host in enumerate(hosts):
        _cable(host, "eth0", switch, f"port{i}", rate)
        host.run(f"ip address add {host.address}/24 dev eth0")
        switch.run(f"ip link set port{i} master bridge")


def _join_in_ring(hosts: Sequence[Host], rate: str) -> None:
    n = len(hosts)
    for host in hosts:
        host.run(
            f"ip address add {host.address}/32 dev lo; "
            "echo 1 > /proc/sys/net/ipv4/ip_forward; "
            "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter; "
            "echo 0 > /proc/sys/net/ipv4/conf/default/rp_filter"
        )
    for i, host in enumerate(hosts):
        if n > 1:
            _cable(host, "right", hosts[(i + 1) % n], "left", rate)
    for i, host in enumerate(hosts):
        for j, other in enumerate(hosts):
            if i != j:
                step = way(i, j, n)
                gate = hosts[(i + step) % n].address
                via = "" if other.address == gate else f"via {gate} onlink"
                device = "right" if step == 1 else "left"
                host.run(f"ip route add {other.address}/32 {via} dev {device} src {host.address}")
