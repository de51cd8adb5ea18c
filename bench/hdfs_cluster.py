"""A real HDFS on this machine, for benchmarks and tests: a NameNode and DataNodes, each a JVM of its own, on loopback.

The daemons are those of Hadoop's jar for tests, of the version that PySpark has the client of; Maven fetches it once
into the folder where Quire's jar is kept. They run on free ports, keep all they write in one folder, and die with the
process that started them, however it ends. A DataNode that was killed counts as live for another DEAD_AFTER_SECONDS.

    with Cluster(folder) as cluster:
        spark.readStream...option("checkpointLocation", cluster.uri("/query"))
        cluster.kill(0)
        Checkpoint(cluster.web_url("/query"))
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.jvm_bridge import jar as jars
from quire.pagemgr import QuireError

# What the daemons need of Spark's jars.
NEEDED = ["hadoop-client-api", "hadoop-client-runtime", "slf4j-api", "log4j", "jcl-over-slf4j", "jsr305", "snappy-java"]
MAIN = "org.apache.hadoop.hdfs.server."
NAME_NODE = "namenode"
# For whoever writes many small files: a file's last block takes a few milliseconds to be reported, and a client that
# asks too early sleeps 400 ms before it asks again.
CLIENT = {"dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "5"}
HEARTBEAT_SECONDS = 1
RECHECK_MILLISECONDS = 2000
DEAD_AFTER_SECONDS = 2 * RECHECK_MILLISECONDS // 1000 + 10 * HEARTBEAT_SECONDS
# A NameNode lets each DataNode make two copies at a time, which is two a second for small files.
COPIES_AT_ONCE = 100
# A daemon that is not up by then never will be; on a quiet machine it takes four seconds.
UP_SECONDS = 180
LOGGING = """
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1} %m%n
"""
# Becomes the given program, which gets SIGKILL when the thread that started it ends, with its process or before.
BOUND = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class ClusterError(QuireError):
    """There is no HDFS to run on; the text says why and what to do."""


def fetch() -> Path:
    """The jar with the daemons, brought into the cache once."""
    client = next(jars.installed_spark().glob("hadoop-client-api-*.jar"), None)
    if client is None:
        raise ClusterError(f"{jars.installed_spark()} has no Hadoop client: pip install 'quire[spark]'")
    version = client.stem.removeprefix("hadoop-client-api-")
    path = jars.cache_folder() / f"hadoop-client-minicluster-{version}.jar"
    with jars.lock(path.parent / "lock"):
        if not path.exists():
            with jars.staging(path.parent) as stage:
                _copy_from_maven(version, stage)
                (stage / path.name).replace(path)
    return path


def _copy_from_maven(version: str, folder: Path) -> None:
    maven = shutil.which("mvn")
    if not maven:
        raise ClusterError("No mvn in PATH: install Maven (Debian, Ubuntu: apt-get install maven)")
    artifact = f"org.apache.hadoop:hadoop-client-minicluster:{version}"
    copy = "org.apache.maven.plugins:maven-dependency-plugin:2.8:copy"
    command = [maven, "--batch-mode", "--quiet", copy, f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
    print(f"== Fetching {artifact} with Maven (56 MB the first time)", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, check=False)
    if done.returncode:
        raise ClusterError(f"Maven could not fetch {artifact}: {' '.join(command)}\n{done.stdout[-3000:]}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that the system gives to outgoing connections."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)


class Cluster:
    """A running HDFS.

    folder       for the daemons' data and logs (NAME.log); whoever made it removes it.
    data_nodes   how many.
    replication  of new files, unless their writer asks for another.
    conf         more settings of HDFS's own.
    """

    def __init__(
        self,
        folder: Path,
        data_nodes: int = 3,
        replication: int = 2,
        heap: str = "192m",
        conf: Mapping[str, Any] | None = None,
    ) -> None:
        spark = jars.installed_spark()
        needed = [str(path) for name in NEEDED for path in sorted(spark.glob(f"{name}-*.jar"))]
        self._class_path = ":".join([str(fetch()), *needed])
        self._java = str(jars.find_java().command)
        self._folder = folder
        self._heap = heap
        self.data_nodes = data_nodes
        self._rpc, self.web_port, *ports = free_ports(2 + 3 * data_nodes)
        self._ports = [ports[3 * node : 3 * node + 3] for node in range(data_nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._conf = {
            "fs.defaultFS": self.uri(""),
            "dfs.namenode.http-address": f"localhost:{self.web_port}",
            "dfs.namenode.name.dir": f"file://{folder}/{NAME_NODE}",
            "dfs.namenode.edits.noeditlogchannelflush": "true",
            "dfs.replication": replication,
            "dfs.permissions.enabled": "false",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.namenode.safemode.extension": 0,
            "dfs.namenode.safemode.min.datanodes": 1,
            "dfs.heartbeat.interval": HEARTBEAT_SECONDS,
            "dfs.namenode.heartbeat.recheck-interval": RECHECK_MILLISECONDS,
            "dfs.namenode.redundancy.interval.seconds": "1s",
            # A copy may have been ordered from a DataNode that was killed; the NameNode waits five minutes for it.
            "dfs.namenode.reconstruction.pending.timeout-sec": 3,
            # Of two DataNodes that are left, one is soon "too busy" (twice the average), and a block then has one copy.
            "dfs.namenode.redundancy.considerLoad": "false",
            "dfs.namenode.replication.max-streams": COPIES_AT_ONCE,
            "dfs.namenode.replication.max-streams-hard-limit": COPIES_AT_ONCE,
            "dfs.namenode.replication.work.multiplier.per.iteration": COPIES_AT_ONCE,
            **CLIENT,
            **(conf or {}),
        }

    def uri(self, path: str) -> str:
        """Where Spark finds a path."""
        return f"hdfs://localhost:{self._rpc}{path}"

    def web_url(self, path: str) -> str:
        """Where Quire's tools find a path."""
        return f"webhdfs://localhost:{self.web_port}{path}"

    # ------------------------------------------------------------------------------------------------ daemons

    def __enter__(self) -> "Cluster":
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "log4j2.properties").write_text(LOGGING)
        try:
            self._launch("format", "namenode.NameNode", {}, "-format", "-nonInteractive")
            if self._daemons.pop("format").wait():
                raise ClusterError(f"The NameNode could not make its folder:\n{self.log('format')}")
            self.start_name_node()
            for node in range(self.data_nodes):
                self.start(node)
            self.wait_until_live()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all daemons."""
        for name in list(self._daemons):
            self._kill(name)

    def _launch(self, name: str, main: str, conf: Mapping[str, Any], *arguments: str) -> None:
        settings = [word for key, value in {**self._conf, **conf}.items() for word in ("-D", f"{key}={value}")]
        flags = [f"-Xmx{self._heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        flags += [f"-Djava.io.tmpdir={self._folder}", f"-Dlog4j2.configurationFile={self._folder}/log4j2.properties"]
        command = [self._java, *flags, "-cp", self._class_path, MAIN + main, *settings, *arguments]
        with self._log_path(name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [sys.executable, "-S", "-c", BOUND, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )

    def _log_path(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def log(self, name: str) -> str:
        """The end of what a daemon wrote."""
        return self._log_path(name).read_text(encoding="utf-8", errors="replace")[-3000:]

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()

    def start(self, node: int) -> None:
        """Starts a DataNode, on the ports and with the blocks that it had."""
        transfer, web, ipc = self._ports[node]
        conf = {
            "dfs.datanode.data.dir": f"file://{self._folder}/data{node}",
            "dfs.datanode.address": f"127.0.0.1:{transfer}",
            "dfs.datanode.http.address": f"127.0.0.1:{web}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{ipc}",
            # The REST interface sends its clients to a DataNode by this name.
            "dfs.datanode.hostname": "localhost",
        }
        self._launch(f"datanode{node}", "datanode.DataNode", conf)

    def kill(self, node: int) -> None:
        """SIGKILL for a DataNode."""
        self._kill(f"datanode{node}")

    def restart(self, node: int) -> None:
        """Starts a DataNode again, killed or not, and waits until all are live."""
        if f"datanode{node}" in self._daemons:
            self.kill(node)
        self.start(node)
        self.wait_until_live()

    def start_name_node(self) -> None:
        """Starts the NameNode, with all that it knew."""
        self._launch(NAME_NODE, "namenode.NameNode", {})

    def kill_name_node(self) -> None:
        """SIGKILL for the NameNode."""
        self._kill(NAME_NODE)

    def restart_name_node(self) -> None:
        """Kills the NameNode, starts it again, and waits until it has all DataNodes back."""
        self.kill_name_node()
        self.start_name_node()
        self.wait_until_live()

    # ------------------------------------------------------------------------------------------------ what it says

    def _ask(self, what: str) -> Any:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(f"http://localhost:{self.web_port}/{what}", timeout=10)

    def _bean(self, name: str) -> dict[str, Any]:
        with self._ask(f"jmx?qry=Hadoop:service=NameNode,name={name}") as answer:
            found: dict[str, Any] = json.load(answer)["beans"][0]
        return found

    def _recent(self, node: int) -> bool:
        """Whether the NameNode has heard of a DataNode lately: it counts a dead one as live for a while."""
        nodes = json.loads(self._bean("NameNodeInfo")["LiveNodes"])
        address = f"127.0.0.1:{self._ports[node][0]}"
        found = [each for each in nodes.values() if each["xferaddr"] == address]
        return bool(found) and found[0]["lastContact"] <= 2 * HEARTBEAT_SECONDS

    def wait_until_live(self) -> None:
        """Until the NameNode takes writes and every DataNode that runs has reported to it, and is let serve."""
        running = [node for node in range(self.data_nodes) if f"datanode{node}" in self._daemons]
        deadline = time.monotonic() + UP_SECONDS
        state: object = "no answer"
        while time.monotonic() < deadline:
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    raise ClusterError(f"The {name} ended by itself:\n{self.log(name)}")
            with contextlib.suppress(OSError, LookupError, ValueError):
                state = self._bean("FSNamesystemState")["FSState"]
                if state == "Operational" and all(self._recent(node) and self._listens(node) for node in running):
                    return
            time.sleep(0.1)
        raise ClusterError(f"HDFS was not up after {UP_SECONDS} s ({state}):\n{self.log(NAME_NODE)}")

    def _listens(self, node: int) -> bool:
        return all(self._connects(port) for port in self._ports[node])

    @staticmethod
    def _connects(port: int) -> bool:
        with socket.socket() as probe:
            probe.settimeout(5)
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def heal(self) -> None:
        """Starts all that was killed, and waits until every block is on as many DataNodes as it is to be.

        Where one DataNode may die and nothing be lost, this must come before the next one's death.
        """
        if NAME_NODE not in self._daemons:
            self.start_name_node()
        for node in range(self.data_nodes):
            if f"datanode{node}" not in self._daemons:
                self.start(node)
        self.wait_until_live()
        deadline = time.monotonic() + UP_SECONDS
        state: dict[str, int] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, LookupError):
                state = self._lacking()
                if not any(state.values()):
                    return
            time.sleep(0.1)
        raise ClusterError(f"HDFS had blocks with too few copies after {UP_SECONDS} s: {state}")

    def _lacking(self) -> dict[str, int]:
        """How many blocks have too few copies, or none: counted anew, as the NameNode's metrics are ten seconds old."""
        with self._ask("fsck?path=/") as answer:
            text = answer.read().decode()
        names = ("Under-replicated blocks", "Missing blocks")
        return {name: int(re.findall(rf"{name}:\s*(\d+)", text)[0]) for name in names}
