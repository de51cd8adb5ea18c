"""Child drivers and their processes, each ended by its own id."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from spark.harness import SEED, Output

CHILD = Path(__file__).with_name("child.py")


class Driver:
    """A running child.py, or another that takes the same."""

    def __init__(
        self,
        folder: Path,
        provider: str,
        names: list[str],
        master: str = "local[2]",
        conf: Mapping[str, str] | None = None,
        child: Path = CHILD,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "driver.log"
        command = [sys.executable, str(child), str(folder), provider, master, json.dumps(dict(conf or {})), *names]
        environment = {**os.environ, "QUIRE_TEST_SEED": str(SEED)}
        with self.log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, env=environment
            )
        self.jvm = 0

    def lines(self) -> Iterator[list[str]]:
        """What the driver says, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            words = line.split()
            if words[:1] == ["jvm"]:
                self.jvm = int(words[1])
            if words:
                yield words

    def kill(self) -> None:
        """SIGKILL for the JVM, then for the Python process that started it."""
        if self.jvm and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.jvm, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def errors(self, most: int = 3000) -> str:
        """The end of what it wrote to standard error, in so many characters."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-most:]

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


def written(folder: Path, name: str) -> Output:
    """What a child wrote, batch by batch."""
    found = (folder / name / "output").glob("*.json")
    return {int(path.stem): Counter(json.loads(path.read_text(encoding="utf-8"))) for path in found}


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat that follow the name of the process; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def executors(jvm: int) -> list[int]:
    """The executor JVMs below a driver's JVM."""
    parents = {int(path.name): stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    below, found = {jvm}, []
    for _ in range(4):
        below |= {pid for pid, fields in parents.items() if fields and int(fields[1]) in below}
    for pid in below - {jvm}:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"CoarseGrainedExecutorBackend" in command and command.split(b"\0")[0].endswith(b"java"):
            found.append(pid)
    return sorted(found)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def workers(executor: int) -> list[int]:
    """The Python workers of an executor: children of its daemon."""
    fields = {int(path.name): stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    daemons = {pid for pid, found in fields.items() if found and int(found[1]) == executor}
    return sorted(pid for pid, found in fields.items() if found and int(found[1]) in daemons)
