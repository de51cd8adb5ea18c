"""A real browser without a window: Chromium, driven over a pipe by its own protocol, with no network.

with Browser(program, folder) as browser:
    browser.open(page)
    browser.evaluate("document.title")
    browser.requests, browser.complaints
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # which does not start as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
# It reads from descriptor 3 and writes to 4.
START = """
import os, sys
for number, end in enumerate(sys.argv[1:3]):
    os.dup2(int(end), 3 + number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def found() -> str | None:
    """The browser that is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def installed() -> str | None:
    """The browser that is installed, or that this user can install from Debian's packages."""
    if found() or os.geteuid() or not shutil.which("apt-get"):
        return found()
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]
    for command in (install, ["apt-get", "update"], install):
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if found():
            break
    return found()


class Browser:
    """A browser with one empty page.

    requests     addresses that the page asked for, but for files and what is in the page itself.
    complaints   what it wrote to the console as an error or warning, and errors of its scripts.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._command = [program, *FLAGS, f"--user-data-dir={folder / 'browser'}"]
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._session: str | None = None
        self._last = 0
        self._rest = b""
        self._loaded = False

    def __enter__(self) -> "Browser":
        questions, self._out = os.pipe()
        self._in, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (questions, answers)]
        command = [sys.executable, "-S", "-c", START, *map(str, ends), *self._command]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=ends, **quiet)
        for end in (questions, answers, *ends):
            os.close(end)
        try:
            self._prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare(self) -> None:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        limits = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._call("Network.emulateNetworkConditions", **limits)

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._rest:
                message, _, self._rest = self._rest.partition(b"\0")
                yield json.loads(message)
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise RuntimeError("the browser ended by itself")
            self._rest += piece

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)
        raise AssertionError("messages go on for ever")

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            address = told["request"]["url"]
            if not address.startswith(("file:", "data:")):
                self.requests.append(address)
        elif method == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(told["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.complaints.append(str(told["args"]))
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, page: Path) -> None:
        """Goes to a file and waits until all of it is loaded."""
        self._loaded = False
        self._call("Page.navigate", url=page.as_uri())
        messages = self._messages()
        while not self._loaded:
            self._note(next(messages))

    def evaluate(self, script: str) -> Any:
        """The value of a script's last expression; a promise's when it is kept."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def picture(self, file: Path) -> None:
        """What a user sees, as PNG."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))
