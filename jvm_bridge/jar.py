"""Builds the jar that makes Quire a state store of Spark: the native library and the provider's classes in one file.

Everything that the build reads is shipped with the package, and the Scala compiler comes with Spark itself; so a C
compiler and a JDK are all that a machine needs. A jar serves one minor version of Spark on one architecture. It is
kept in a cache, under a name that holds the digest of all that went into it, so a jar that is there is up to date.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import quire
from quire.pagemgr import QuireError

# The folder that holds the layers: the project's own, or the package's where it is installed.
ROOT = Path(__file__).parent.parent
LAYERS = ["pagemgr", "structures", "checkpoint", "statestore", "jvm_bridge"]
LIBRARY = "libquire_jni.so"
STAGING = ".quire-"

# As quire._native is built, but for debug information, which would make the jar ten times as large.
COMPILE = ["-std=c11", "-D_GNU_SOURCE", "-O3", "-fno-strict-aliasing", "-fvisibility=hidden", "-fPIC", "-shared"]
LINK = ["-lm", "-lpthread"]
SCALA = ["-usejavacp", "-deprecation", "-feature", "-release", "17"]
JAVA_LEAST = 17


class BuildError(QuireError):
    """The jar cannot be built: something is missing on this machine, or a compiler failed.

    >>> import quire
    >>> try:
    ...     quire.jar("/nowhere")
    ... except quire.BuildError as error:
    ...     print(error)
    no Spark in /nowhere: it has no spark-core_2.13-VERSION.jar; name the folder jars/ of a Spark (4.2 or 4.3)
    """


class Java(NamedTuple):
    """A JDK: its command ``java``, and its home, where the headers are."""

    command: Path
    home: Path


def jar(jars: str | os.PathLike[str] | None = None, output: str | os.PathLike[str] | None = None) -> Path:
    """Gives the path of the jar for a Spark, building the jar if it is not there yet (some 20 seconds).

    ``jars`` is the folder with the jars of that Spark; by default those that PySpark runs with: of ``$SPARK_HOME`` if
    that is set, else of the installed package. ``output`` is a file to copy the jar to; by default it stays in the
    cache, ``$XDG_CACHE_HOME/quire`` or ``~/.cache/quire``.

    >>> quire.jar().name  # doctest: +SKIP
    'quire-0.1.0-spark-4.3.0-linux-x86_64-1f0c5a7e9b3d.jar'
    """
    folder = installed_spark() if jars is None else Path(jars)
    spark = spark_version(folder)
    cache = cache_folder()
    path = cache / f"quire-{quire.__version__}-spark-{spark}-{platform()}-{digest(spark)[:12]}.jar"
    if not path.exists():
        with lock(cache / "lock"):
            if not path.exists():
                build(folder, spark, path)
    if output is None:
        return path
    target = Path(output)
    if target.is_dir():
        raise BuildError(f"cannot write the jar to {target}: it is a folder; name a file")
    try:
        with staging(target.parent) as stage:
            shutil.copyfile(path, stage / target.name)
            (stage / target.name).replace(target)
    except OSError as error:
        raise BuildError(f"cannot write the jar to {target}: {error.strerror or error}") from error
    return target


def installed_spark() -> Path:
    """The jars that PySpark starts its JVM with."""
    home = os.environ.get("SPARK_HOME")
    if home:
        return Path(home) / "jars"
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "PySpark is not installed: pip install 'quire[spark]', or name the folder with the jars of a Spark "
            "(quire.jar(jars=...), quire jar --jars ...)"
        )
    return Path(spec.submodule_search_locations[0]) / "jars"


def supported() -> list[str]:
    """The minor versions of Spark that there are sources for, such as ``4.3``."""
    return sorted(path.name.removeprefix("scala-") for path in (ROOT / "jvm_bridge").glob("scala-*"))


def spark_version(folder: Path) -> str:
    """The version of the Spark whose jars are in a folder."""
    allowed = " or ".join(supported())
    pattern = re.compile(r"spark-core_2\.13-(\d+\.\d+\.\d+(?:-(?!tests|sources|javadoc)[\w.]+)?)\.jar")
    found = sorted({match[1] for path in folder.glob("*.jar") if (match := pattern.fullmatch(path.name))})
    if not found:
        raise BuildError(
            f"no Spark in {folder}: it has no spark-core_2.13-VERSION.jar; name the folder jars/ of a Spark ({allowed})"
        )
    if len(found) > 1:
        raise BuildError(f"more than one Spark in {folder}: {', '.join(found)}; leave the jars of one version there")
    if minor_version(found[0]) not in supported():
        raise BuildError(f"Spark {found[0]} in {folder} is not supported; Quire's provider is for Spark {allowed}")
    return found[0]


def minor_version(version: str) -> str:
    """The version without what comes after its second number: ``4.3`` of ``4.3.0``."""
    return ".".join(version.split(".")[:2])


def platform() -> str:
    """What the native library is for, such as ``linux-x86_64``."""
    machine = os.uname()
    return f"{machine.sysname.lower()}-{machine.machine}"


def c_sources() -> list[Path]:
    """The C files of the native library, relative to ROOT."""
    return [path.relative_to(ROOT) for layer in LAYERS for path in sorted((ROOT / layer).glob("*.c"))]


def headers() -> list[Path]:
    """The C headers, relative to ROOT."""
    return [path.relative_to(ROOT) for layer in LAYERS for path in sorted((ROOT / layer).glob("*.h"))]


def scala_sources(spark: str) -> list[Path]:
    """The Scala files for a version of Spark, relative to ROOT: common ones, then those for that version alone."""
    bridge = ROOT / "jvm_bridge"
    folders = [bridge / "scala", bridge / f"scala-{minor_version(spark)}"]
    return [path.relative_to(ROOT) for folder in folders for path in sorted(folder.glob("*.scala"))]


def digest(spark: str) -> str:
    """A digest of everything of Quire's that goes into the jar for a version of Spark."""
    sha = hashlib.sha256(repr((quire.__version__, COMPILE, LINK, SCALA)).encode())
    for path in [*c_sources(), *headers(), *scala_sources(spark), Path("jvm_bridge/jar.py")]:
        content = (ROOT / path).read_bytes()
        sha.update(f"{path}:{len(content)}\n".encode() + content)
    return sha.hexdigest()


def cache_folder() -> Path:
    """The folder where jars are kept, made if need be: no other user may write to it, since a JVM will run them."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "quire"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise BuildError(f"the cache folder {folder} belongs to another user; set XDG_CACHE_HOME to one of yours")
        folder.chmod(0o700)
    except OSError as error:
        raise BuildError(
            f"cannot use the cache folder {folder}: {error.strerror or error}; set XDG_CACHE_HOME to one of yours"
        ) from error
    return folder


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Lets one process at a time build; the others find its jar."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new folder of our own beside the target, so that the last step is a rename; removed at the end."""
    with tempfile.TemporaryDirectory(prefix=STAGING, dir=folder) as name:
        yield Path(name)


def build(folder: Path, spark: str, path: Path) -> None:
    """Builds the jar for the Spark in a folder; it appears whole or not at all."""
    java = find_java()
    # We hold the lock, so whatever is staged here belongs to a build that was killed.
    for leftover in path.parent.glob(f"{STAGING}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with staging(path.parent) as stage:
        library = stage / LIBRARY
        classes = stage / "classes"
        classes.mkdir()
        with ThreadPoolExecutor() as pool:
            steps = [
                pool.submit(compile_library, java, library),
                pool.submit(compile_scala, java, folder, spark, classes),
            ]
        for step in steps:
            step.result()
        entries = {file.relative_to(classes).as_posix(): file.read_bytes() for file in classes.rglob("*.class")}
        content = library.read_bytes()
        entries[f"native/{platform()}/{LIBRARY}"] = content
        properties = {
            "platform": platform(),
            "sha256": hashlib.sha256(content).hexdigest(),
            "spark": spark,
            "version": quire.__version__,
        }
        entries["quire.properties"] = "".join(f"{key}={value}\n" for key, value in properties.items()).encode()
        write_zip(stage / path.name, entries)
        (stage / path.name).replace(path)


def find_java() -> Java:
    """The JDK to build with: ``$JAVA_HOME``, else the command ``java``."""
    advice = (
        f"install a JDK {JAVA_LEAST} or later with its headers (Debian, Ubuntu: apt-get install "
        "openjdk-17-jdk-headless; Fedora: dnf install java-17-openjdk-devel), or set JAVA_HOME to one"
    )
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        where = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "there is no java on the PATH"
        raise BuildError(f"{where}: {advice}")
    command = Path(found)
    # Asked, not guessed from the path: the command may be a wrapper.
    said = run([found, "-XshowSettings:properties", "-version"], "java")
    settings = dict(re.findall(r"^\s*(java\.home|java\.specification\.version) = (.*)$", said, re.MULTILINE))
    version = settings.get("java.specification.version", "unknown")
    if not version.isdigit() or int(version) < JAVA_LEAST:
        raise BuildError(f"{command} is Java {version}, and Spark needs {JAVA_LEAST}: {advice}")
    java = Java(command, Path(settings["java.home"]))
    if not (java.home / "include" / "jni.h").is_file():
        raise BuildError(f"{java.home} is a Java without headers (no include/jni.h): {advice}")
    return java


def compile_library(java: Java, library: Path) -> None:
    """Compiles the C core with its native methods."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        raise BuildError(
            f"no C compiler: {' '.join(compiler) or 'CC'} is not on the PATH (Debian, Ubuntu: apt-get install gcc "
            "libc6-dev; Fedora: dnf install gcc), or name one: CC=clang"
        )
    include = java.home / "include"
    options = [f'-DQUIRE_VERSION="{quire.__version__}"']
    options += [f"-I{path}" for path in [".", include, include / os.uname().sysname.lower()]]
    run([*compiler, *COMPILE, *options, *map(str, c_sources()), "-o", str(library), *LINK], "the C compiler")


def compile_scala(java: Java, folder: Path, spark: str, classes: Path) -> None:
    """Compiles the provider with the Scala compiler that Spark brings."""
    if not list(folder.glob("scala-compiler-2.13.*.jar")):
        raise BuildError(
            f"no Scala compiler in {folder}: it has no scala-compiler-2.13.*.jar, as every Spark and PySpark does; "
            "add that jar, in the version of the folder's scala-library"
        )
    # A deep stack, since the compiler recurses over expressions.
    command = [str(java.command), "-Xss8m", "-cp", f"{folder.resolve()}/*", "scala.tools.nsc.Main", *SCALA]
    run([*command, "-d", str(classes), *map(str, scala_sources(spark))], "the Scala compiler")


def program(name: str, sources: Sequence[Path], *libraries: Path) -> Path:
    """A jar of Scala sources for the installed Spark, kept where Quire's own is; compiled if need be.

    What it is compiled with besides, such as Quire's own jar, must have another name whenever it is another.
    """
    spark = installed_spark()
    sha = hashlib.sha256(repr([library.name for library in libraries]).encode())
    for source in sources:
        sha.update(source.read_bytes())
    path = cache_folder() / f"{name}-spark-{spark_version(spark)}-{sha.hexdigest()[:12]}.jar"
    with lock(path.parent / "lock"):  # the same as Quire's jar has: whoever holds it clears what is staged
        if not path.exists():
            with staging(path.parent) as stage:
                compiled = stage / path.name
                class_path = ":".join([*map(str, libraries), f"{spark}/*"])
                command = [str(find_java().command), "-Xss8m", "-cp", class_path, "scala.tools.nsc.Main", *SCALA]
                run([*command, "-d", str(compiled), *map(str, sources)], "the Scala compiler")
                compiled.replace(path)
    return path


def run(command: list[str], name: str) -> str:
    """Runs one step of the build in ROOT and gives all that it said; a failure is an error that shows it."""
    # Paths relative to ROOT keep the place of the sources out of what is built.
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise BuildError(f"cannot run {name} ({command[0]}): {error.strerror or error}") from error
    if done.returncode != 0:
        raise BuildError(f"{name} failed ({shlex.join(command[:1])}, exit code {done.returncode}):\n{done.stdout}")
    return done.stdout


def write_zip(path: Path, entries: Mapping[str, bytes]) -> None:
    """Writes a jar; the same entries give the same bytes."""
    manifest = (
        f"Manifest-Version: 1.0\r\nImplementation-Title: Quire\r\nImplementation-Version: {quire.__version__}\r\n\r\n"
    )
    # Readers of jars as a stream want the manifest first.
    ordered = [("META-INF/MANIFEST.MF", manifest.encode()), *sorted(entries.items())]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in ordered:
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            file.writestr(info, content)
