"""Two nodes on one machine: network namespaces with an address and processes of their own, joined by a cable, with a launcher in
each. All is gone with the processes that hold the namespaces, also after kill -9 of the tests. The nodes see the same files, as
those of a cluster do."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.faults.harness import Lab
from tests.helpers import ROOT, wait_until

# in a range reserved for examples, which no network uses
ADDRESSES = ("192.0.2.1", "192.0.2.2")
INTERFACE = "eth0"
RENDEZVOUS_PORT = 29400
TOOLS = ("unshare", "nsenter", "setpriv", "ip")

# A program that keeps a namespace: it ends with its standard input, and that with the tests.
HOLDER = ["unshare", "--net", "cat"]
# What is started so is killed with the tests, and all that it starts itself is killed with it, at one moment.
MACHINE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Node:
    """A network namespace, and the launcher that runs in it: none, or one."""

    def __init__(self, number):
        self.number = number
        self.address = ADDRESSES[number]
        self.launcher = None
        self.holder = subprocess.Popen(HOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        # It answers from within the namespace.
        self.holder.stdin.write(b"\n")
        self.holder.stdin.flush()
        self.holder.stdout.readline()

    def inside(self, *command):
        return ["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *command]

    def run(self, *command):
        subprocess.run(self.inside(*command), check=True, capture_output=True, text=True)

    def connect(self):
        self.run("ip", "address", "add", f"{self.address}/24", "dev", INTERFACE)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "link", "set", INTERFACE, "up")

    def plug(self, is_in):
        """Pull the plug of the cable, or put it in. With it out no packet comes or goes, and nobody is told."""
        self.run("ip", "link", "set", INTERFACE, "up" if is_in else "down")

    def kill(self):
        """End all processes of the node at one moment."""
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()

    def close(self):
        self.kill()
        self.holder.stdin.close()
        self.holder.stdout.close()
        self.holder.wait(30)


@contextlib.contextmanager
def two_nodes():
    with contextlib.ExitStack() as made:
        nodes = []
        for number in range(2):
            nodes.append(Node(number))
            made.callback(nodes[-1].close)
        first, second = nodes
        cable = ["type", "veth", "peer", "name", INTERFACE, "netns", str(second.holder.pid)]
        first.run("ip", "link", "add", INTERFACE, *cable)
        for node in nodes:
            node.connect()
        yield nodes


def reason_against():
    """Why there can be no two nodes here; "" where there can be."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (util-linux, iproute2)"
    try:
        with two_nodes() as (node, _):
            node.run(*MACHINE, "true")
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"network namespaces are not allowed here: {said}"
    return ""


class Job:
    """One training run over two nodes with a rank each, which launch/c10d.sh starts, and what strikes it."""

    # Shorter than torchrun's own 30 and 5 s. Its read_timeout of 60 s stays: a launcher that asks during an outage ends after it.
    RENDEZVOUS = {"last_call_timeout": 2, "keep_alive_interval": 1}

    def __init__(self, lab: Lab, nodes, name, hooks=None):
        self.lab, self.nodes, self.name = lab, nodes, name
        self.settings = {}
        # What --nnodes gets.
        self.nodes_asked = "2"
        self.ledger = lab.folder / f"{name}.ledger"
        self.hooks = {"ledger": {"path": str(self.ledger)}, **(hooks or {})}

    def start(self, *nodes):
        """Launch on these nodes, or on both. Their trainer is the one with hooks."""
        for node in nodes or self.nodes:
            options = {"is_host": int(node.number == 0), **self.RENDEZVOUS}
            environment = {
                **os.environ,
                # torchrun is there.
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "PROCESSES": "1",
                "TRAINER": "tests/faults/launch.py",
                "FAULTS_ATTEMPT": "0",
                "FAULT_HOOKS": json.dumps(self.hooks),
                # Gloo would look for the address of the machine's name.
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "HEAD": f"{ADDRESSES[0]}:{RENDEZVOUS_PORT}",
                "NODES": self.nodes_asked,
                # torchrun would find out both by the names of the machines, which these nodes do not have.
                "PET_LOCAL_ADDR": node.address,
                "PET_RDZV_CONF": ",".join(f"{key}={value}" for key, value in options.items()),
            }
            command = node.inside(*MACHINE, "sh", "launch/c10d.sh", *self.lab.flags(self.name, **self.settings))
            with self.log(node).open("a") as log:
                streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                node.launcher = subprocess.Popen(command, env=environment, cwd=ROOT, **streams)

    def log(self, node):
        return self.lab.folder / f"{self.name}.node_{node.number}"

    def output(self):
        return "\n".join(self.log(node).read_text() for node in self.nodes)

    def newest_update(self):
        """The number of the update that rank 0 has done last; 0 before the first."""
        path = Path(f"{self.ledger}.0")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # The last one may be half written.
        done = [json.loads(line)["update"] for line in lines if line.endswith("\n")]
        return done[-1] if done else 0

    def until_update(self, number):
        wait_until(lambda: self.newest_update() >= number, 120, self.output)

    def lose(self, node):
        """The cable is pulled, then all processes of the node end: nobody is told."""
        node.plug(False)
        node.kill()

    def bring_back(self, node):
        node.plug(True)
        self.start(node)

    def wait(self, seconds=180):
        for node in self.nodes:
            code = node.launcher.wait(seconds)
            assert code == 0, f"node {node.number}: exit code {code}\n{self.output()}"
