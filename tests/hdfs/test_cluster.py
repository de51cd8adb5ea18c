"""The cluster itself: what it says when something is missing, and that it leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.bench import hdfs_cluster


def test_without_maven(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(hdfs_cluster.ClusterError, match="No mvn in PATH: install Maven"):
        hdfs_cluster.fetch()


def test_a_maven_that_cannot_fetch(monkeypatch, tmp_path):
    maven = tmp_path / "mvn"
    maven.write_text("#!/bin/sh\necho no such host\nexit 1\n")
    maven.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(hdfs_cluster.ClusterError, match=r"(?s)could not fetch org\.apache\.hadoop:.*no such host"):
        hdfs_cluster.fetch()


def test_daemons_die_with_whoever_started_them():
    """As a daemon is started, by a process that is then killed."""
    starter = (
        "import os, subprocess, sys\n"
        "daemon = [sys.executable, '-S', '-c', sys.argv[1], str(os.getpid()), *sys.argv[2:]]\n"
        "print(subprocess.Popen(daemon).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    sleep = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with subprocess.Popen(
        [sys.executable, "-c", starter, hdfs_cluster.BOUND, *sleep],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        said = {process.stdout.readline().strip() for _ in range(2)}
        (daemon,) = said - {"up"}
        assert running(int(daemon))
        process.send_signal(signal.SIGKILL)
        process.wait()
    while running(int(daemon)):
        time.sleep(0.01)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
