"""The jar: what is in it, how it is built, how its native library is loaded, and how a session is given it."""

import doctest
import hashlib
import importlib
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import quire

builder = importlib.import_module("quire.jvm_bridge.jar")
session = importlib.import_module("quire.statestore.session")
NATIVE = f"native/{builder.platform()}/libquire_jni.so"


@pytest.fixture(scope="module")
def jar():
    return quire.jar()


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire"


def contents(jar):
    with zipfile.ZipFile(jar) as file:
        return {name: file.read(name) for name in file.namelist()}


def properties(entries):
    return dict(line.split("=", 1) for line in entries["quire.properties"].decode().splitlines())


@pytest.mark.parametrize("name", ["quire.jvm_bridge.jar", "quire.statestore.session"])
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


# The jar


@pytest.mark.slow
def test_the_jar_holds_classes_library_and_their_description(jar):
    entries = contents(jar)
    classes = [name for name in entries if name.endswith(".class")]
    assert {"io/quire/spark/QuireStateStoreProvider.class", "io/quire/spark/QuireExtensions.class"} <= set(classes)
    assert set(entries) == {*classes, NATIVE, "META-INF/MANIFEST.MF", "quire.properties"}
    assert next(iter(entries)) == "META-INF/MANIFEST.MF"
    assert properties(entries) == {
        "platform": builder.platform(),
        "sha256": hashlib.sha256(entries[NATIVE]).hexdigest(),
        "spark": builder.spark_version(builder.installed_spark()),
        "version": quire.__version__,
    }
    # Bytes 4 to 8 of a class say the version of Java that it is for: 61 is Java 17.
    assert {int.from_bytes(entries[name][4:8], "big") for name in classes} == {61}


@pytest.mark.slow
def test_the_library_shows_its_native_methods_and_no_place_on_this_machine(jar):
    library = contents(jar)[NATIVE]
    assert b"Java_io_quire_spark_Native" in library
    assert b"JNI_OnLoad" in library
    assert str(Path(builder.ROOT).resolve()).encode() not in library


@pytest.mark.slow
def test_a_second_build_gives_the_same_bytes(jar, empty_cache, tmp_path):
    again = quire.jar(output=tmp_path / "again.jar")
    assert again == tmp_path / "again.jar"
    assert again.read_bytes() == jar.read_bytes()
    (cached,) = empty_cache.glob("*.jar")
    assert cached.name == jar.name
    assert {path.name for path in empty_cache.iterdir()} == {cached.name, "lock"}
    assert stat.S_IMODE(empty_cache.stat().st_mode) == 0o700


@pytest.mark.slow
def test_the_command_prints_the_path(jar):
    done = subprocess.run([sys.executable, "-m", "quire", "jar"], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{jar}\n", "")
    done = subprocess.run(
        [sys.executable, "-m", "quire", "jar", "--jars", "/nowhere"], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "no Spark in /nowhere" in done.stderr


@pytest.mark.slow
def test_an_installed_package_has_every_source(source_root, tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=source_root, check=True, capture_output=True)
    sources = [*builder.c_sources(), *builder.headers()]
    sources += [path for version in builder.supported() for path in builder.scala_sources(version)]
    assert [path for path in sources if not (tmp_path / "quire" / path).is_file()] == []


def test_the_digest_follows_every_source_and_flag(monkeypatch, tmp_path):
    files = [
        "pagemgr/a.c",
        "pagemgr/a.h",
        "jvm_bridge/jar.py",
        "jvm_bridge/scala/A.scala",
        "jvm_bridge/scala-4.3/B.scala",
    ]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    seen = {builder.digest("4.3.0")}
    for name in files:
        (tmp_path / name).write_text("two")
        seen.add(builder.digest("4.3.0"))
    monkeypatch.setattr(builder, "COMPILE", [*builder.COMPILE, "-g"])
    seen.add(builder.digest("4.3.0"))
    assert len(seen) == len(files) + 2


def test_two_processes_build_once(empty_cache, tmp_path):
    (tmp_path / "spark-core_2.13-4.3.0.jar").touch()
    program = """
import importlib, sys, time
builder = importlib.import_module("quire.jvm_bridge.jar")
def build(folder, spark, path):
    print("built")
    time.sleep(1)
    path.write_text("a jar")
builder.build = build
builder.jar(sys.argv[1])
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sorted(process.communicate(timeout=120)[0] for process in both) == ["", "built\n"]
    assert [process.returncode for process in both] == [0, 0]


# What is refused


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no Spark in"),
        (["spark-core_2.12-3.5.1.jar"], "no Spark in"),
        (["spark-core_2.13-4.2.0-tests.jar"], "no Spark in"),
        (["spark-core_2.13-4.1.0.jar"], r"Spark 4\.1\.0 in .* is not supported; .* for Spark 4\.2 or 4\.3"),
        (["spark-core_2.13-5.0.0-preview1.jar"], r"Spark 5\.0\.0-preview1 in .* is not supported"),
        (["spark-core_2.13-4.2.0.jar", "spark-core_2.13-4.3.0.jar"], r"more than one Spark in .*: 4\.2\.0, 4\.3\.0"),
    ],
)
def test_another_spark_is_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(quire.BuildError, match=message):
        quire.jar(tmp_path)


def test_test_jars_do_not_hide_the_version(tmp_path):
    for name in ["spark-core_2.13-4.2.0.jar", "spark-core_2.13-4.2.0-tests.jar"]:
        (tmp_path / name).touch()
    assert builder.spark_version(tmp_path) == "4.2.0"


def test_spark_home_comes_before_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert builder.installed_spark() == tmp_path / "jars"


def test_missing_pyspark_is_said(monkeypatch):
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(quire.BuildError, match="PySpark is not installed"):
        quire.jar()


def fake_java(folder, version):
    """A command that answers as a Java of that version does, with its home beside it."""
    command = folder / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(
        f"#!/bin/sh\necho '    java.home = {folder}' >&2\necho '    java.specification.version = {version}' >&2\n"
    )
    command.chmod(0o755)
    return command


def test_missing_java_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(quire.BuildError, match=r"no java on the PATH: install a JDK 17 .*openjdk-17-jdk-headless"):
        builder.find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(quire.BuildError, match=f"JAVA_HOME is {tmp_path}, and there is no bin/java"):
        builder.find_java()


def test_a_java_that_cannot_build_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    fake_java(tmp_path / "old", "1.8")
    with pytest.raises(quire.BuildError, match=r"is Java 1\.8, and Spark needs 17"):
        builder.find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "bare"))
    command = fake_java(tmp_path / "bare", "17")
    with pytest.raises(quire.BuildError, match="without headers"):
        builder.find_java()
    (tmp_path / "bare" / "include").mkdir()
    (tmp_path / "bare" / "include" / "jni.h").touch()
    assert builder.find_java() == (command, tmp_path / "bare")


def test_a_compiler_that_is_missing_or_fails_is_shown(monkeypatch, tmp_path):
    java = builder.Java(tmp_path / "java", tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(quire.BuildError, match="no C compiler: no-such-compiler"):
        builder.compile_library(java, tmp_path / "library.so")
    monkeypatch.delenv("CC")
    (tmp_path / "pagemgr").mkdir()
    (tmp_path / "pagemgr" / "bad.c").write_text("int f(void) { return nothing; }\n")
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    with pytest.raises(quire.BuildError, match=r"(?s)the C compiler failed .*bad\.c:1.*nothing"):
        builder.compile_library(java, tmp_path / "library.so")
    with pytest.raises(quire.BuildError, match="no Scala compiler in"):
        builder.compile_scala(java, tmp_path, "4.3.0", tmp_path)


def test_the_cache_is_made_private(empty_cache):
    empty_cache.mkdir(parents=True)
    empty_cache.chmod(0o777)
    assert builder.cache_folder() == empty_cache
    assert stat.S_IMODE(empty_cache.stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_used_is_said(monkeypatch, empty_cache):
    empty_cache.parent.mkdir()
    empty_cache.write_text("a file")
    with pytest.raises(quire.BuildError, match=f"cannot use the cache folder {empty_cache}.*XDG_CACHE_HOME"):
        builder.cache_folder()
    empty_cache.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: empty_cache.parent.stat().st_uid + 1)
    with pytest.raises(quire.BuildError, match="belongs to another user"):
        builder.cache_folder()


# Loading


def probe(tmp_path, *jars, options=()):
    """Loads the library of each jar in one JVM; gives what the probe said and what was left in the JVM's tmp."""
    java = builder.find_java()
    folder = tmp_path / "tmp"
    folder.mkdir(exist_ok=True)
    command = [str(java.command), f"-Djava.io.tmpdir={folder}", "-XX:-UsePerfData", *options]
    command += ["-cp", f"{builder.installed_spark()}/*", str(Path(__file__).parent / "NativeLibraryProbe.java")]
    done = subprocess.run([*command, *map(str, jars)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines(), list(folder.rglob("*"))


def changed(jar, path, **changes):
    """A copy of a jar with other properties, or with another library."""
    entries = contents(jar)
    entries[NATIVE] = changes.pop("library", entries[NATIVE])
    entries["quire.properties"] = "".join(f"{k}={v}\n" for k, v in {**properties(entries), **changes}.items()).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return path


@pytest.mark.slow
def test_two_class_loaders_load_side_by_side_and_leave_nothing(jar, tmp_path):
    said, left = probe(tmp_path, jar, jar)
    loaded = ["unpacking rwx------ quire-", "unpacking rw------- libquire_jni.so", f"loaded {quire.__version__}"]
    folders = [line for line in said if line.startswith("unpacking rwx------ quire-")]
    assert [line if line not in folders else loaded[0] for line in said] == [*loaded, *loaded, "mapped 2"]
    assert len(set(folders)) == 2
    assert left == []


@pytest.mark.slow
def test_a_library_that_does_not_fit_is_refused_and_leaves_nothing(jar, tmp_path):
    library = contents(jar)[NATIVE]
    flipped = bytes([*library[:5000], library[5000] ^ 1, *library[5001:]])
    garbage = b"not a library"
    cases = {
        "tampered with": changed(jar, tmp_path / "1.jar", library=flipped),
        "and Quire's jar is for linux-riscv64": changed(jar, tmp_path / "2.jar", platform="linux-riscv64"),
        "and Quire's jar is for Spark 4.1.0": changed(jar, tmp_path / "3.jar", spark="4.1.0"),
        f"jar is version 9.9.9, and the native library in it is {quire.__version__}": changed(
            jar, tmp_path / "4.jar", version="9.9.9"
        ),
        "mounted noexec, name another one with -Dquire.native.dir": changed(
            jar, tmp_path / "5.jar", library=garbage, sha256=hashlib.sha256(garbage).hexdigest()
        ),
    }
    said, left = probe(tmp_path, *cases.values())
    # One line for each, since all eight threads get the same message.
    refused = [line for line in said if not line.startswith("unpacking")]
    assert len(refused) == len(cases) + 1
    for line, message in zip(refused, cases, strict=False):
        assert line.startswith("refused ")
        assert message in line
    # Only the one with another version was good enough to be loaded at all.
    assert refused[-1] == "mapped 1"
    assert left == []


@pytest.mark.slow
def test_the_folder_to_unpack_in_can_be_chosen(jar, tmp_path):
    other = tmp_path / "other"
    said, left = probe(tmp_path, jar, options=[f"-Dquire.native.dir={other}"])
    assert said[0].startswith(f"refused Quire cannot unpack its native library in {other}")
    assert said[1:] == ["mapped 0"]
    other.mkdir()
    said, left = probe(tmp_path, jar, options=[f"-Dquire.native.dir={other}"])
    assert said == [f"loaded {quire.__version__}", "mapped 1"]
    assert left == list(other.iterdir()) == []


# Sessions


@pytest.fixture
def new_builder(monkeypatch):
    pyspark = pytest.importorskip("pyspark")
    sql = pytest.importorskip("pyspark.sql")
    monkeypatch.setattr(pyspark.SparkContext, "_gateway", None)
    for name in ["PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(quire, "jar", lambda: Path("/quire.jar"))
    return sql.SparkSession.builder


def test_configure_sets_all_that_the_provider_needs(new_builder):
    assert quire.configure(new_builder, memory_limit="512M", page_size=8192) is new_builder
    assert new_builder._options == {
        "spark.jars": "/quire.jar",
        "spark.sql.extensions": "io.quire.spark.QuireExtensions",
        "spark.sql.streaming.stateStore.providerClass": "io.quire.spark.QuireStateStoreProvider",
        "spark.sql.streaming.stateStore.quire.memoryLimit": "512m",
        "spark.sql.streaming.stateStore.quire.pageSize": "8192",
    }


def test_configure_keeps_what_is_there_and_can_be_repeated(new_builder):
    new_builder.config("spark.jars", "/a.jar,/b.jar").config("spark.sql.extensions", "a.Extension")
    for _ in range(2):
        quire.configure(new_builder)
        assert new_builder._options["spark.jars"] == "/a.jar,/b.jar,/quire.jar"
        assert new_builder._options["spark.sql.extensions"] == "a.Extension,io.quire.spark.QuireExtensions"


@pytest.mark.parametrize("value", [0, -1, 1024, True, 1.5, None, "", "1t", "5 m", "m", "1.5g", "512mb", "1023k"])
def test_a_bad_memory_limit_is_refused(new_builder, value):
    with pytest.raises(quire.InvalidError, match=r"memory_limit is .* at least 1m"):
        quire.configure(new_builder, memory_limit=value)


@pytest.mark.parametrize("value", [0, 512, 1025, 131072, "4096", True, None, 4096.0])
def test_a_bad_page_size_is_refused(new_builder, value):
    with pytest.raises(quire.InvalidError, match=r"page_size is .* one of 1024, 2048, .*65536"):
        quire.configure(new_builder, page_size=value)


def test_other_bad_arguments_of_configure_are_refused(new_builder):
    with pytest.raises(quire.InvalidError, match="no option checkpoints; allowed are memory_limit, page_size"):
        quire.configure(new_builder, checkpoints="pages")
    with pytest.raises(quire.InvalidError, match=r"takes a SparkSession\.builder, not dict"):
        quire.configure({})
    assert new_builder._options == {}
    with pytest.raises(quire.InvalidError, match="Spark Connect"):
        quire.configure(new_builder.remote("sc://localhost"))


def test_configure_says_that_pyspark_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(quire.NotFoundError, match=r"configure\(\) needs PySpark"):
        quire.configure(object())


@pytest.mark.slow
def test_configure_says_when_it_is_too_late(tmp_path):
    program = """
import quire
from pyspark.sql import SparkSession

def builder():
    return SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")

def attempt():
    try:
        return quire.configure(builder()).getOrCreate()
    except quire.BusyError as error:
        print("refused:", error)

early = builder().getOrCreate()
attempt()
early.stop()
attempt()
"""
    done = python(program, tmp_path)
    said = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(said) == 2, done.stdout + done.stderr
    assert all("running already, without Quire's jar" in line and "spark-submit --jars" in line for line in said)


@pytest.mark.slow
def test_configure_may_be_called_again_for_the_running_session(jar, tmp_path):
    program = """
import quire
from pyspark.sql import SparkSession

def builder():
    return SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")

first = quire.configure(builder()).getOrCreate()
second = quire.configure(builder()).getOrCreate()
print("same:", first is second)
first.stop()
third = quire.configure(builder()).getOrCreate()
print("jars:", third.sparkContext.getConf().get("spark.jars"))
third.stop()
plain = builder().config("spark.sql.extensions", "").getOrCreate()
try:
    quire.configure(builder())
except quire.BusyError as error:
    print("refused:", error)
"""
    done = python(program, tmp_path)
    assert "same: True" in done.stdout, done.stdout + done.stderr
    assert str(jar) in done.stdout.split("jars:")[1].splitlines()[0]
    assert "refused: a SparkContext is active already" in done.stdout


def python(program, folder):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_"))}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
