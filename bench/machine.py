"""What a result depends on besides the code: machine, versions, where files lie; and how much memory is held."""

import ctypes
import gc
import hashlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from quire.jvm_bridge import jar as jars

SHARED_MEMORY = Path("/dev/shm")
COMPACT = Path("/proc/sys/vm/compact_memory")
LAYERS = ("pagemgr", "structures", "checkpoint", "statestore", "jvm_bridge")
PACKAGES = ("quire", "lmdb", "rocksdict", "sortedcontainers", "numpy", "pyarrow", "pyspark")


def read(path: str) -> str:
    """A file of the kernel, or nothing where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def first(pattern: str, text: str, default: str) -> str:
    """The first match's group."""
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else default


def machine() -> dict[str, str | int | float]:
    """The machine that the numbers come from."""
    memory_kilobytes = int(first(r"^MemTotal:\s*(\d+)", read("/proc/meminfo"), "0"))
    return {
        "cpu": first(r"^model name\s*:\s*(.+)$", read("/proc/cpuinfo"), platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_kilobytes / (1 << 20), 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages": first(r"\[(\w+)\]", read("/sys/kernel/mm/transparent_hugepage/enabled"), "unknown"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """The versions of everything that is measured."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version, "code_of_quire": code()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["java"] = java_version()
    return found


def code() -> str:
    """A digest of Quire's own sources, benchmarks aside: states of the code between two versions differ in it."""
    digest = hashlib.sha256()
    for layer in LAYERS:
        folder = Path(next(iter(importlib.import_module(f"quire.{layer}").__path__)))
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".c", ".h", ".scala"):
                digest.update(f"{layer}/{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def java_version() -> str:
    """The version of the JVM that cases with Spark run in."""
    try:
        told = subprocess.run([jars.find_java().command, "-version"], capture_output=True, text=True, check=False)
    except (jars.BuildError, OSError):
        return "not installed"
    return first(r'version "([^"]+)"', told.stderr, "unknown")


def compact_memory() -> bool:
    """Has the kernel join free memory in small pieces to large ones; False where this process may not.

    After hours of work it lies in small pieces, and the huge pages that stores ask for are dear: what runs later would
    be measured on another machine than what runs first.
    """
    try:
        COMPACT.write_text("1")
    except OSError:
        return False
    return True


def storage(bytes_needed: int) -> Path:
    """The folder for the files of peers: in memory if there is room, so that no disk is measured."""
    if os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= bytes_needed:
        return SHARED_MEMORY
    return Path(tempfile.gettempdir())


def resident_bytes(folder: Path) -> int:
    """The memory of this process plus what its files in a folder take; mapped files count once, by their blocks."""
    gc.collect()
    if "pyarrow" in sys.modules:
        sys.modules["pyarrow"].default_memory_pool().release_unused()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # so that memory freed but kept for later is not counted
    except (AttributeError, OSError):
        pass
    anonymous = int(first(r"^RssAnon:\s*(\d+)", read("/proc/self/status"), "0")) << 10
    return anonymous + sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
