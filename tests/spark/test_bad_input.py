"""Wrong settings, foreign and damaged checkpoints, no memory and no space: a clear error or the right result."""

import os
import random
import re
import shutil
import struct
import subprocess

import pytest
from pyspark.errors import StreamingQueryException
from spark import harness, workloads
from spark.harness import HDFS, QUIRE, REAL, ROCKSDB, SEED, STORE
from stores import crc32c

pytestmark = pytest.mark.slow

only_quire = pytest.mark.skipif(QUIRE != REAL, reason="another provider stands in for Quire")


class Place:
    """A source and a checkpoint for one query."""

    def __init__(self, spark, folder, build=workloads.by_key):
        self.spark, self.build = spark, build
        self.source, self.checkpoint = folder / "source", folder / "checkpoint"
        self.source.mkdir(parents=True, exist_ok=True)

    def go(self, batches=(), provider=QUIRE, conf=None, build=None, checkpoint=None):
        """Releases batches and runs to the end; the output of the batches that ran."""
        harness.release(self.source, batches)
        output = {}
        with harness.settings(self.spark, {**(conf or {}), STORE + "providerClass": provider}):
            frame = (build or self.build)(harness.stream(self.spark, self.source))
            harness.finish(harness.start(frame, "update", checkpoint or self.checkpoint, output))
        return output

    def fails(self, *arguments, **more):
        """As go(), for what must fail; all that the error says."""
        with pytest.raises(StreamingQueryException) as caught:
            self.go(*arguments, **more)
        return full_text(caught.value)


def full_text(error):
    """The message of an error and of all its causes in the JVM."""
    texts, cause = [str(error)], getattr(error, "_origin", None)
    while cause is not None:
        texts.append(str(cause.toString()))
        cause = cause.getCause()
    return "\n".join(texts)


@pytest.fixture
def place(spark, folder):
    return Place(spark, folder)


@pytest.fixture
def batches():
    return harness.cuts("bad input", harness.rows("bad input", count=200), 5)


@only_quire
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memoryLimits", "1g"),
        ("memoryLimit", "12 parsecs"),
        ("memoryLimit", "-1"),
        ("checkpointMode", "fast"),
        ("pageSize", "1000"),
        ("pageSize", "big"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_allowed(place, batches, name, value):
    text = place.fails(batches[:1], conf={STORE + "quire." + name: value})
    assert f"quire.{name}" in text
    assert value in text or name == "memoryLimits"
    if name == "memoryLimits":
        assert "quire.memoryLimit" in text and "quire.checkpointMode" in text and "quire.pageSize" in text
    if name == "checkpointMode":
        assert "delta" in text
    # Nothing is left behind that a right setting would stumble over.
    assert harness.total(place.go())


@only_quire
def test_a_wrong_bound_of_the_log_is_refused_with_the_reason(place, batches):
    harness.release(place.source, batches[:1])
    for name, value, reason in [
        ("extentTarget", "0.5", "no longer than there are live keys"),
        ("extentTarget", "1", "no longer than there are live keys"),
        ("extentTarget", "NaN", "no longer than there are live keys"),
        ("extentTarget", "nan", "not a number"),
        ("extentTarget", "1e10", "no log is that long"),
        ("extentTarget", "Infinity", "no log is that long"),
        ("extentTarget", "two", "not a number"),
        ("maxBytesPerCommit", "lots", "not a size"),
        ("maxTimePerCommit", "0ms", "at least 1ms"),
        ("maxTimePerCommit", "soon", "not a time"),
    ]:
        text = place.fails(conf={harness.MODE: "cec", STORE + "quire.cec." + name: value})
        assert f"quire.cec.{name} is '{value}'" in text and reason in text, text
    assert harness.total(place.go(conf={harness.MODE: "cec"}))


def change_provider(checkpoint, before, after):
    """Rewrites Spark's log of offsets, which holds a query to the provider it began with."""
    for path in (checkpoint / "offsets").iterdir():
        if path.name.isdigit():
            path.write_text(path.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


@pytest.mark.parametrize("other", [HDFS, ROCKSDB], ids=["hdfs", "rocksdb"])
def test_a_query_goes_on_with_the_provider_it_began_with(place, folder, batches, other):
    """Spark's own rule: the session's provider is for new queries."""
    place.go(batches[:2], provider=other)
    found = place.go(batches[2:], provider=QUIRE)
    assert harness.recorded_conf(place.checkpoint)[STORE + "providerClass"] == other
    straight = Place(place.spark, folder / "straight")
    straight.go(batches[:2], provider=other)
    assert not harness.difference(found, straight.go(batches[2:], provider=other))


@only_quire
@pytest.mark.parametrize("other", [HDFS, ROCKSDB], ids=["hdfs", "rocksdb"])
def test_a_checkpoint_of_another_provider_is_refused_and_left_alone(place, batches, other):
    place.go(batches[:2], provider=other)
    change_provider(place.checkpoint, other, QUIRE)
    text = place.fails(batches[2:3])
    assert "Quire" in text and "checkpoint" in text, text
    assert str(place.checkpoint / "state") in text, text
    # Given back to the provider that wrote it, the query goes on.
    change_provider(place.checkpoint, QUIRE, other)
    assert harness.total(place.go(provider=other))


@only_quire
@pytest.mark.parametrize("other", [HDFS, ROCKSDB], ids=["hdfs", "rocksdb"])
def test_sparks_own_stores_do_not_take_a_checkpoint_of_quire(place, batches, other):
    place.go(batches[:2])
    change_provider(place.checkpoint, QUIRE, other)
    place.fails(batches[2:3], provider=other)
    change_provider(place.checkpoint, other, QUIRE)
    assert harness.total(place.go())


def test_a_changed_schema_is_reported_by_sparks_checker(place, batches):
    place.go(batches[:2])

    def changed(frame):
        return workloads.aggregate(frame.groupBy("key", "word"))

    text = place.fails(batches[2:3], build=changed)
    assert "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE" in text
    assert harness.total(place.go())


# ------------------------------------------------------------------------------------------------ damaged files


def victims(checkpoint, rng):
    """Sets of files to spoil together, and whether what they held is then gone for good.

    Of one partition: the newest delta, the newest base, all bases, all that holds the newest version, and any one file.
    """
    partition = rng.choice(sorted((checkpoint / "state" / "0").glob("[0-9]*")))
    deltas, bases = ([*partition.glob(f"*.{kind}")] for kind in ("qdelta", "qbase"))
    assert deltas and bases, sorted(partition.iterdir())
    delta, base = max(deltas, key=version), max(bases, key=version)
    newest = [path for path in (delta, base) if version(path) == version(delta)]
    any_one = rng.choice([*deltas, *bases])
    return [([delta], False), ([base], False), (bases, False), (newest, True), ([any_one], False)]


def version(path):
    return int(path.name.split(".")[0].split("_")[0])


def damage(path, kind, rng):
    """Spoils one file, with its checksum by Hadoop gone, so that only Quire's own can notice."""
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    content = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif kind == "longer":
        path.write_bytes(content + rng.randbytes(rng.randrange(1, 64)))
    else:
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :])


@pytest.fixture(scope="module")
def sound(spark, tmp_path_factory):
    """A query with deltas and several bases behind it: itself, a copy of its checkpoint, and its next batch."""
    folder = tmp_path_factory.mktemp("sound")
    place = Place(spark, folder)
    batches = harness.cuts("damage", harness.rows("damage", count=300), 9)
    with harness.settings(spark, {STORE + "providerClass": QUIRE, STORE + "minDeltasForSnapshot": "2"}):
        frame = place.build(harness.stream(spark, place.source))
        query = harness.start(frame, "update", place.checkpoint, forever=True)
        for low, high in ((0, 3), (3, 6), (6, 8)):
            harness.release(place.source, batches[low:high])
            query.processAllAvailable()
            if high < 8:
                harness.wait_for_maintenance()
        query.stop()
    copy = folder / "copy"
    shutil.copytree(place.checkpoint, copy)
    return place, copy, place.go(batches[8:])


@only_quire
@pytest.mark.parametrize("kind", ["missing", "empty", "truncated", "flipped", "longer"])
def test_a_damaged_file_is_named_or_repaired_and_never_believed(sound, folder, kind):
    """The next batch gives what it gives on the sound checkpoint, or fails with the name of a file that was spoiled."""
    place, checkpoint, expected = sound
    assert harness.total(expected)
    rng = random.Random(f"{SEED} {kind}")
    outcomes = []
    for number, (files, gone) in enumerate(victims(checkpoint, rng)):
        copy = folder / f"copy{number}"
        shutil.copytree(checkpoint, copy)
        spoiled = [copy / path.relative_to(checkpoint) for path in files]
        for path in spoiled:
            damage(path, kind, rng)
        names = [str(path.relative_to(copy / "state" / "0")) for path in spoiled]
        # Nobody knows the id of a version that nothing is left of.
        names += [re.sub(r"_[^.]+", "_*", name) for name in names]
        try:
            found = place.go(checkpoint=copy)
        except StreamingQueryException as error:
            text = full_text(error)
            assert any(name in text for name in names), f"{kind} {names}: the error names none of them: {text}"
            outcomes.append(f"{names}: refused")
        else:
            assert not gone, f"{kind} {names}: nothing else held that version"
            assert not harness.difference(found, expected), f"{kind} {names}"
            outcomes.append(f"{names}: right result")
        shutil.rmtree(copy, ignore_errors=True)  # maintenance may be at work in it
    print(kind, *outcomes, sep="\n")


def with_header(path, change):
    """Gives a file another header, under checksums that are right."""
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    data = path.read_bytes()
    (end,) = struct.unpack_from("<I", data, 12)
    head = change(data[: end - 4])
    head = head[:12] + struct.pack("<I", len(head) + 4) + head[16:]
    path.write_bytes(head + crc32c(head) + data[end:])


@only_quire
def test_files_of_tomorrow_are_told_from_damage(sound, folder):
    """Of a later format, and packed by a codec that this Spark does not have."""
    place, checkpoint, _ = sound
    for number, (change, said) in enumerate(
        [
            (lambda head: head[:8] + struct.pack("<I", 2) + head[12:], "format version 2, this build reads version 1"),
            (lambda head: head.replace(b"lz4", b"lz9"), "packed by lz9"),
        ]
    ):
        copy = folder / f"copy{number}"
        shutil.copytree(checkpoint, copy)
        newest = max(copy.glob("state/0/*/*.qdelta"), key=version)
        for path in [newest, *newest.parent.glob("*.qbase")]:
            with_header(path, change)
        text = place.fails(checkpoint=copy)
        assert newest.parent.name in text and ".q" in text and said in text, text


# ------------------------------------------------------------------------------------------------ no memory, no space


def large(seed, count, first=0):
    """Rows whose state takes some 20 kB each."""
    found = harness.rows(seed, count=count)
    for number, row in enumerate(found, first):
        row["key"], row["word"] = f"key {number}", chr(97 + number % 26) * 20_000
    return found


def longest(frame):
    return frame.groupBy("key").agg({"word": "max", "id": "count"})


@only_quire
def test_a_reached_memory_limit_fails_the_query_and_a_higher_one_goes_on(spark, folder):
    batches = [large("small", 4), large("large", 400, first=2)]
    place, straight = Place(spark, folder, longest), Place(spark, folder / "straight", longest)
    expected = straight.go(batches)
    text = place.fails(batches, conf={STORE + "quire.memoryLimit": "4m"})
    assert "memoryLimit" in text and ("4194304" in text or "4m" in text), text
    found = place.go(conf={STORE + "quire.memoryLimit": "512m"})
    assert found and not harness.difference(found, {number: expected[number] for number in found})
    assert max(found) == max(expected)
    for number in expected:
        if number not in found:
            # That batch was committed under the low limit: it is not to be repeated.
            assert (place.checkpoint / "commits" / str(number)).exists()


def test_a_file_where_a_folder_of_state_belongs_is_reported(place, folder, batches):
    place.go(batches[:2])
    copy = folder / "copy"
    shutil.copytree(place.checkpoint, copy)
    shutil.rmtree(copy / "state" / "0" / "1")
    (copy / "state" / "0" / "1").write_text("not a folder")
    text = place.fails(batches[2:3], checkpoint=copy)
    assert str(copy / "state" / "0" / "1") in text, text


@pytest.fixture
def small_disk(folder):
    """A file system of its own, a few hundred kB in size, where the state will go."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    state = folder / "checkpoint" / "state"
    state.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(state)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield state
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)


def test_a_full_disk_fails_the_query_and_room_lets_it_go_on(spark, folder, small_disk):
    rng = random.Random(f"{SEED} full")
    batches = [harness.rows(f"full {number}", count=150) for number in range(4)]
    for row in (row for batch in batches for row in batch):
        row["key"], row["word"] = f"key {row['id']}", rng.randbytes(1500).hex()
    place, straight = Place(spark, folder, longest), Place(spark, folder / "straight", longest)
    expected = straight.go(batches)
    text = place.fails(batches)
    assert "No space left on device" in text, text
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    found = place.go()
    assert found and not harness.difference(found, {number: expected[number] for number in found})
    assert max(found) == max(expected)
