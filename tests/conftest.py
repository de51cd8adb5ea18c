"""Settings for all tests.

QUIRE_TEST_PROFILE  how long the random tests run: quick (under sanitizers), normal, long (for an hour's search).
QUIRE_TEST_CLASSES  an archive of classes for Spark's drivers (tools/share_classes.py).
QUIRE_TEST_EXPECT   a folder that quire must be imported from, so that the sanitized build is surely the one tested.
"""

import os
import shutil
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
from seeds import SEED

import quire

hypothesis.settings.register_profile("quick", max_examples=8, stateful_step_count=25, deadline=None)
hypothesis.settings.register_profile("normal", max_examples=40, stateful_step_count=40, deadline=None)
hypothesis.settings.register_profile("long", max_examples=3000, stateful_step_count=120, deadline=None)
hypothesis.settings.load_profile(os.environ.get("QUIRE_TEST_PROFILE", "normal"))

ROOT = Path(__file__).resolve().parents[1]

# The tests' JVMs live for seconds to minutes: half of that would go into optimising code that is then hardly run.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
if archive := os.environ.get("QUIRE_TEST_CLASSES"):
    # JVMs of another class path cannot use it, and are not to say so.
    JVM_OPTIONS += f" -XX:SharedArchiveFile={archive} -Xshare:auto -Xlog:disable -Xlog:all=error:stderr"
os.environ.setdefault("JAVA_TOOL_OPTIONS", JVM_OPTIONS)


def pytest_report_header() -> str:
    return f"quire {quire.__version__} from {Path(quire.__file__).parent}, QUIRE_TEST_SEED={SEED}"


def pytest_sessionstart() -> None:
    expected = os.environ.get("QUIRE_TEST_EXPECT")
    if expected and not Path(quire.__file__).is_relative_to(expected):
        pytest.exit(f"quire is imported from {quire.__file__}, not from {expected}", returncode=3)


@pytest.fixture(autouse=True)
def seed():
    """Shows the seed with every failure."""
    print(f"QUIRE_TEST_SEED={SEED}")


@pytest.fixture(scope="session")
def tally(record_testsuite_property):
    """How many cases of each kind there were, for tools/run_faults.py: what is counted goes into pytest's report."""
    counted = Counter()
    yield counted
    for name, count in sorted(counted.items()):
        record_testsuite_property(name, count)


@pytest.fixture
def folder(tmp_path):
    """A folder for one test, removed at once: checkpoints are many small files."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(params=[1024, 4096])
def page_size(request):
    return request.param


@pytest.fixture
def pm(page_size):
    with quire.PageManager(page_size=page_size) as manager:
        yield manager


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.arena"


@pytest.fixture
def source_root():
    return ROOT
