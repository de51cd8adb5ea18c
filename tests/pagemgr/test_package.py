"""What is installed: the examples in the docstrings, the command line, the wheel."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
import zipfile

import pytest

import quire


def modules():
    names = ["quire", "quire.cli", "quire.demo"]
    for package in ("quire.pagemgr", "quire.structures", "quire.checkpoint", "quire.statestore", "quire.jvm_bridge"):
        names += [
            package,
            *(f"{package}.{found.name}" for found in pkgutil.iter_modules(importlib.import_module(package).__path__)),
        ]
    return names


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0


def test_public_names():
    for name in quire.__all__:
        assert hasattr(quire, name)


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "quire", *arguments], capture_output=True, text=True, timeout=300)


def test_the_demo_keeps_off_a_checkpoint_that_is_there(tmp_path):
    done = run("demo", "--checkpoint", str(tmp_path))
    assert done.returncode == 1
    assert "is there already" in done.stderr


def test_command_line():
    assert run("--version").stdout == f"quire {quire.__version__}\n"
    assert "demo" in run("--help").stdout
    for wrong in ([], ["nothing"], ["demo", "--batches", "1"]):
        assert run(*wrong).returncode == 2


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(source_root, tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
    ]
    subprocess.run(
        [*command, "--config-settings=--build-option=--bdist-dir=" + str(tmp_path / "b"), str(source_root)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"quire"}
    inside = {name for name in names if name.startswith("quire/")}
    assert {name.rsplit(".", 1)[1] for name in inside} == {"py", "so", "typed", "pyi", "c", "h", "scala"}
    wanted = [
        "__init__.py",
        "py.typed",
        "pagemgr/__init__.py",
        "structures/maps.py",
        "structures/schema.py",
        "bench/__init__.py",
        "pagemgr/pages.c",
        "jvm_bridge/quire_jni.c",
        "jvm_bridge/scala/QuireStateStoreProvider.scala",
    ]
    assert {f"quire/{name}" for name in wanted} <= inside
    assert sum(name.endswith(".so") for name in inside) == 1
