"""Real queries with their checkpoints on a real HDFS: daemons and drivers die, nothing is lost, and Python can tell.

QUIRE_HDFS  "all" for more of everything that dies, in each mode; on two busy cores a mode's deaths of DataNodes alone
            take five minutes, most of them to start JVMs. One mode: -k delta.
"""

import json
import os
import random
import re
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import count

import pytest
from spark import harness, processes
from spark.harness import QUIRE, ROCKSDB, SEED, STORE

import quire
from quire.bench.hdfs_cluster import CLIENT
from quire.checkpoint import Checkpoint, tools
from quire.checkpoint.container import FileKind
from quire.checkpoint.storage import join, storage_for

pytestmark = pytest.mark.slow

ALL = os.environ.get("QUIRE_HDFS") == "all"
MODES = harness.MODES if ALL else ["delta"]
BATCHES = 12
ROWS_OF_BATCH = 60  # of harness.ticks
ROUNDS = 4 if ALL else 1
KILLS = 10 if ALL else 1
KILL_BATCHES = max(BATCHES, 3 * KILLS)
CONF = {
    **{f"spark.hadoop.{name}": value for name, value in CLIENT.items()},
    # So that short runs see files being removed.
    "spark.sql.streaming.minBatchesToRetain": "3",
}
LEFTOVER = re.compile(r"\.(\d+)(?:_[^.]+)?\.q\w+\..*tmp")


@pytest.fixture(scope="module", params=MODES)
def mode(request):
    return request.param


def driver(cluster, mode, folder, names, batches=BATCHES, path=None, **more):
    """A process that runs queries up to a batch, from where they stand."""
    place = {"checkpoint": cluster.uri(path or home(folder)), "batches": str(batches)}
    conf = {**CONF, STORE + "quire.checkpointMode": mode, **place, **more}
    return processes.Driver(folder, QUIRE, names, conf=conf)


def home(folder):
    """Where on HDFS a test has its checkpoints."""
    return f"/{folder.name}"


def ends(driver):
    """Whether a driver gets to its end."""
    ended = False
    for words in driver.lines():
        ended = words == ["end"]
    driver.process.wait()
    return ended


def run(*arguments, **more):
    with driver(*arguments, **more) as running:
        assert ends(running), running.errors()


def checkpoint_url(cluster, folder, name):
    return cluster.web_url(f"{home(folder)}/{name}/checkpoint")


# ------------------------------------------------------------------------------------------------ what must come out


def totals(batches):
    """The state of the query numbers after so many batches."""
    found = {}
    for id in range(ROWS_OF_BATCH * batches):
        rows, sum = found.get(id * id % 211, (0, 0))
        found[id * id % 211] = (rows + 1, sum + id)
    return found


def numbers_output(batches):
    """What each batch of the query numbers gives."""
    output = {}
    for batch in range(batches):
        now = totals(batch + 1)
        touched = {id * id % 211 for id in range(ROWS_OF_BATCH * batch, ROWS_OF_BATCH * (batch + 1))}
        output[batch] = Counter(
            f"number={number}, rows={now[number][0]}, sum={now[number][1]}" for number in sorted(touched)
        )
    return output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The output of all queries: by arithmetic, or by Spark's own store on a local disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    names, batches = NAMES[1:], max(BATCHES + 2, KILL_BATCHES)
    with processes.Driver(folder, ROCKSDB, names, conf={**CONF, "batches": str(batches)}) as running:
        assert ends(running), running.errors()
    output = {name: processes.written(folder, name) for name in names}
    assert all(harness.total(found) for found in output.values())
    return {**output, "numbers": numbers_output(batches)}


def batches_of(name, batches):
    """How many of them a driver runs of that query."""
    return batches // 2 if name == "transform" else batches


def differences(folder, undisturbed, names, batches=BATCHES):
    """What the batches of a test's queries have that those of the undisturbed ones do not, and the other way round."""
    lines = []
    for name in names:
        found, expected, last = processes.written(folder, name), undisturbed[name], batches_of(name, batches)
        first, wanted = ({n: rows for n, rows in output.items() if n < last} for output in (found, expected))
        lines += [f"{name}: {harness.difference(first, wanted)}"] if first != wanted else []
    return "\n".join(lines)


def state_of(checkpoint, version=None):
    """The state of the query numbers, as Python reads it: two partitions of UnsafeRows."""
    found = {}
    for store in checkpoint.stores():
        with store.load(version) as state:
            for key, value in state.map("default").items():
                (number,), (rows, sum) = struct.unpack("<8xq", key), struct.unpack("<8xqq", value)
                assert number not in found
                found[number] = (rows, sum)
    return found


def verified(url, capsys, every_file=False):
    """Exit code of quire verify, and what it printed."""
    capsys.readouterr()
    code = tools.guarded("verify", lambda: tools.verify(url, every_file=every_file))
    return code, capsys.readouterr().out


def committed(url):
    """The version that the query stands at, by Spark's log of commits."""
    storage, path = storage_for(url)
    return 1 + max(int(entry.name) for entry in storage.list(join(path, "commits")) if entry.name.isdigit())


def leftovers(url):
    """Files below a checkpoint's stores that killed writers have left, each with the oldest version beside it."""
    found = []
    storage, _ = storage_for(url)
    for store in Checkpoint(url).stores():
        for entry in storage.list(store._path):
            match = LEFTOVER.fullmatch(entry.name)
            if match:
                found.append((entry.name, int(match[1]), store.versions()[0].number))
    return found


# ------------------------------------------------------------------------------------------------ restarts

# Python's workers take long to start, so that transform comes only if asked; the join has four stores.
NAMES = ["numbers", "join", *(["transform"] if ALL else [])]


@pytest.fixture(scope="module")
def restarted(cluster, mode, tmp_path_factory):
    """A folder whose queries (an aggregation, a join of four stores, several families) were run in several lives."""
    folder = tmp_path_factory.mktemp(f"restarted-{mode}")
    for batches in (4, 8, BATCHES) if ALL else (6, BATCHES):
        run(cluster, mode, folder, NAMES, batches)
    return folder


def test_a_query_that_is_restarted_gives_what_an_undisturbed_one_gives(restarted, undisturbed):
    assert not differences(restarted, undisturbed, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_bases_are_written_and_old_files_removed(cluster, mode, restarted, name):
    for store in Checkpoint(checkpoint_url(cluster, restarted, name)).stores():
        listing = store.listing()
        assert bool(listing.bases) == (mode != "cec"), store
        assert listing.versions[-1].number >= batches_of(name, BATCHES)
        if name != "transform" and listing.bases:
            assert listing.versions[0].number > 1, store


@pytest.mark.parametrize("name", NAMES)
def test_the_tools_read_it(cluster, restarted, capsys, name):
    url = checkpoint_url(cluster, restarted, name)
    code, text = verified(url, capsys, every_file=True)
    assert code == 0, text
    assert tools.inspect(url, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] == url
    stores = {"numbers": 2, "join": 8, "transform": 2}
    assert len(found["stores"]) == stores[name]
    for store in found["stores"]:
        assert int(store["newest"].partition("_")[0]) >= batches_of(name, BATCHES) and store["extent"]["files"]
    assert sum(store["keys"] for store in found["stores"])


def test_python_reads_the_right_values(cluster, restarted, capsys):
    url = checkpoint_url(cluster, restarted, "numbers")
    checkpoint, version = Checkpoint(url), committed(url)
    assert state_of(checkpoint, version) == totals(version)
    printed = {}
    for partition in (0, 1):
        assert tools.dump(url, partition=partition, version=str(version), format="json") == 0
        for line in capsys.readouterr().out.splitlines():
            record = json.loads(line)
            (number,) = struct.unpack("<8xq", bytes.fromhex(record["key"]))
            printed[number] = struct.unpack("<8xqq", bytes.fromhex(record["values"][0]))
    assert printed == totals(version)


def test_what_is_damaged_is_named_and_repaired_from_an_older_base_where_there_is_one(
    cluster, mode, restarted, undisturbed, capsys
):
    """Of one query the delta that a restart needs is cut, of the other the newest base has a wrong bit."""
    if mode == "cec":
        pytest.skip("this mode has no bases")
    rng = random.Random(f"{SEED} damage")
    delta, whole = spoil_delta(checkpoint_url(cluster, restarted, "numbers"), rng)
    base, repairable = spoil_base(checkpoint_url(cluster, restarted, "join"), rng)
    for name, file in (("numbers", delta), ("join", base)):
        code, text = verified(checkpoint_url(cluster, restarted, name), capsys, every_file=True)
        assert code == 1 and file in text, text
    with driver(cluster, mode, restarted, ["join"] * repairable + ["numbers"], BATCHES + 2) as running:
        assert not ends(running), "it went on from a file that was cut"
        assert delta.partition(home(restarted))[2] in running.errors(100_000)
    storage, path = storage_for(delta)
    storage.write_atomic(path, whole, replace=True)
    run(cluster, mode, restarted, ["numbers"], BATCHES + 2)
    assert not differences(restarted, undisturbed, ["numbers"] + ["join"] * repairable, BATCHES + 2)


def spoil_delta(url, rng):
    """Cuts a delta that the newest committed version needs; its URL, and what it held."""
    store, version = Checkpoint(url).store(0, rng.randrange(2)), committed(url)
    storage, _ = storage_for(url)
    listing = store.listing()
    for file in listing.files:
        if file.version.number == version and file.kind == FileKind.BASE:
            storage.delete(file.path)
    (file,) = (file for file in listing.deltas.values() if file.version.number == version)
    with storage.open(file.path) as stream:
        whole = stream.read()
    storage.write_atomic(file.path, whole[: rng.randrange(len(whole))], replace=True)
    return store.name_of(file), whole


def spoil_base(url, rng):
    """Flips a bit in the newest base that a restart may use; its URL, and whether an older one is there."""
    store, version = rng.choice(Checkpoint(url).stores()), committed(url)
    storage, _ = storage_for(url)
    bases = [file for at, file in sorted(store.listing().bases.items()) if at.number <= version]
    with storage.open(bases[-1].path) as stream:
        content = bytearray(stream.read())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    storage.write_atomic(bases[-1].path, bytes(content), replace=True)
    return store.name_of(bases[-1]), len(bases) > 1


# ------------------------------------------------------------------------------------------------ deaths


def test_a_cluster_is_healed_when_every_block_has_its_copies(cluster, folder):
    """Those who kill DataNodes rest on it."""
    storage, path = storage_for(cluster.web_url(home(folder)))
    files = [f"{path}/{number}" for number in range(20)]
    cluster.heal()
    for file in files:
        storage.write_atomic(file, b"on two nodes")
        storage._client.set_replication(file, cluster.data_nodes)
    cluster.heal()
    for node in range(1, cluster.data_nodes):
        cluster.kill(node)
    for file in files:
        with storage.open(file) as stream:
            assert stream.read() == b"on two nodes"
    cluster.heal()


@pytest.mark.parametrize("mode", harness.MODES if ALL else [harness.MODES[SEED % 3]])
def test_data_nodes_that_die_during_commits_and_during_recovery(cluster, mode, folder, undisturbed, capsys):
    """One of three is killed while batches are committed, another one while the query reads its checkpoint."""
    rng = random.Random(f"{SEED} data nodes")
    names = ["numbers", "join"]
    half = BATCHES // 2
    for round in range(ROUNDS):
        here = folder / str(round)
        path = f"{home(folder)}/{round}"
        first, second = rng.sample(range(cluster.data_nodes), 2)
        cluster.heal()
        with driver(cluster, mode, here, names, half, path, slow="4") as running:
            ended = False
            for words in running.lines():
                ended = words == ["end"]
                if words == ["numbers", "1"]:
                    time.sleep(rng.uniform(0, 0.5))
                    cluster.kill(first)
            running.process.wait()
            assert ended, running.errors()
        assert not differences(here, undisturbed, names, half)
        cluster.heal()
        with driver(cluster, mode, here, names, BATCHES, path) as running:
            ended = False
            for words in running.lines():
                ended = words == ["end"]
                if words[0] == "jvm":
                    time.sleep(rng.uniform(0, 2))
                    cluster.kill(second)
            running.process.wait()
            assert ended, running.errors()
        assert not differences(here, undisturbed, names)
        for name in names:
            # One DataNode is still dead: Python must find the other copy, too.
            code, text = verified(cluster.web_url(f"{path}/{name}/checkpoint"), capsys)
            assert code == 0, text


def test_a_name_node_that_dies(cluster, mode, folder, undisturbed):
    """The query waits for it, or fails and says who did not answer; in its next life it has lost nothing."""
    rng = random.Random(f"{SEED} name node")
    names, deaths = ["numbers", "join"], 0
    cluster.heal()
    for life in count():
        with driver(cluster, mode, folder, names, slow="4") as running:
            ended = False
            for words in running.lines():
                ended = words == ["end"]
                if words[0] == "numbers" and deaths <= min(life, ROUNDS - 1):
                    deaths += 1
                    time.sleep(rng.uniform(0, 0.5))
                    cluster.kill_name_node()
                    time.sleep(rng.choice([0, 1, 12]) if ALL else 1)
                    cluster.start_name_node()
            running.process.wait()
            assert ended or re.search("localhost:|safe mode", running.errors(100_000)), running.errors()
        cluster.heal()
        if ended:
            break
    assert deaths
    assert not differences(folder, undisturbed, names)


def test_a_driver_that_is_killed_again_and_again(cluster, mode, folder, undisturbed, capsys):
    """Files that it left half written are passed over, and removed with the versions they are of."""
    rng = random.Random(f"{SEED} drivers")
    names = ["numbers", "join"]
    killed, ended = 0, False
    cluster.heal()
    while not ended:
        # At most two batches further than before, so that there is always something left to kill.
        after, delay = rng.randrange(1, 3), rng.uniform(0, 0.5)
        with driver(cluster, mode, folder, names, KILL_BATCHES, slow="4") as running:
            for words in running.lines():
                ended = words == ["end"]
                after -= words[0] == "numbers"
                if killed < KILLS and after <= 0 and not ended:
                    time.sleep(delay)
                    running.kill()
                    killed += 1
                    break
            else:
                running.process.wait()
                assert ended, running.errors()
        if killed == 1 and not ended:
            leave_half_a_file(checkpoint_url(cluster, folder, "numbers"))
            code, text = verified(checkpoint_url(cluster, folder, "numbers"), capsys)
            assert code == 0, text
    assert killed == KILLS, "the queries ended before they could be killed often enough"
    assert not differences(folder, undisturbed, names, KILL_BATCHES)
    for name in names:
        url = checkpoint_url(cluster, folder, name)
        code, text = verified(url, capsys, every_file=True)
        assert code == 0, text
        left = [name for name, version, oldest in leftovers(url) if version < oldest]
        assert not left
    assert state_of(Checkpoint(checkpoint_url(cluster, folder, "numbers")), KILL_BATCHES) == totals(KILL_BATCHES)


def leave_half_a_file(url):
    """What a driver leaves that is killed in the middle of a commit, in case none was so far."""
    storage, path = storage_for(url)
    for number, suffix in ((1, "qdelta"), (2, "qbase")):
        hidden = f"{path}/state/0/0/.{number}.{suffix}.0f0f0f0f-1111-2222-3333-444444444444.TID7.tmp"
        storage.write_atomic(hidden, b"half a fi")


# ------------------------------------------------------------------------------------------------ readers and writers


def test_python_reads_while_the_query_runs(cluster, mode, folder, capsys):
    url, looks = checkpoint_url(cluster, folder, "numbers"), 0
    more = {"slow": "8", "spark.sql.streaming.minBatchesToRetain": "5"}
    with driver(cluster, mode, folder, ["numbers"], **more) as running:
        ended = False
        for words in running.lines():
            ended = words == ["end"]
            if words[0] == "numbers":
                code, text = verified(url, capsys, every_file=int(words[1]) % 2 == 0)
                assert code == 0, text
                checkpoint = Checkpoint(url)
                # By now the query may be further than the line that it printed.
                version = min(store.resolve().number for store in checkpoint.stores())
                assert version > int(words[1])
                assert state_of(checkpoint, version) == totals(version)
                assert tools.inspect(url) == 0
                looks += running.process.poll() is None
        running.process.wait()
        assert ended, running.errors()
    assert looks > 2, "the query was faster than the reader"


WRITER = """
import sys, time
from quire import ExistsError
from quire.checkpoint.storage import storage_for
url, letter, files, start = sys.argv[1], sys.argv[2].encode(), int(sys.argv[3]), float(sys.argv[4])
storage, path = storage_for(url)
for number in range(files):
    time.sleep(max(0, start + 0.2 * number - time.time()))
    try:
        storage.write_atomic(f"{path}/{number}.qdelta", letter * 2_000_000)
        print(number, flush=True)
    except ExistsError:
        pass
"""


def test_of_two_processes_that_write_one_version_one_wins_whole(cluster, folder):
    """By Python's storage; whoever reads meanwhile finds nothing, or all of the winner's."""
    url, letters, files = cluster.web_url(home(folder)), "ab", 40 if ALL else 12
    wholes = {letter.encode() * 2_000_000 for letter in letters}
    storage, path = storage_for(url)
    storage.write_atomic(f"{path}/first", b"")
    seen, wrong, done = Counter(), [], threading.Event()

    def watch():
        while not done.is_set():
            for entry in storage.list(path):
                if entry.name.endswith(".qdelta"):
                    with storage.open(join(path, entry.name)) as file:
                        content = file.read()
                    seen[entry.name] += 1
                    if entry.size != 2_000_000 or content not in wholes:
                        wrong.append((entry, len(content), set(content)))

    reader = threading.Thread(target=watch)
    reader.start()
    try:
        start = time.time() + 1
        commands = [[sys.executable, "-c", WRITER, url, letter, str(files), str(start)] for letter in letters]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        won = [writer.communicate()[0].split() for writer in writers]
    finally:
        done.set()
        reader.join()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert sorted(map(int, won[0] + won[1])) == list(range(files)), "each version has one winner"
    assert seen and not wrong
    for letter, numbers in zip(letters, won, strict=True):
        for number in numbers:
            with storage.open(f"{path}/{number}.qdelta") as file:
                assert file.read() == letter.encode() * 2_000_000
    assert len(storage.list(path)) == files + 1, "nothing hidden is left"


def test_a_file_is_replaced_at_once(cluster, folder):
    """A reader finds the old one or the new one at any moment."""
    storage, path = storage_for(cluster.web_url(f"{home(folder)}/1.qdelta"))
    storage.write_atomic(path, b"0" * 1000)
    done = threading.Event()

    def replace():
        for number in range(1, 30):
            storage.write_atomic(path, str(number % 10).encode() * (1000 + number), replace=True)
        done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        while not done.is_set():
            with storage.open(path) as file:
                content = file.read()
            assert len(content) >= 1000 and len(set(content)) == 1
    finally:
        writer.join()


@pytest.mark.skipif(not ALL, reason="takes two minutes: QUIRE_HDFS=all")
def test_two_drivers_on_one_checkpoint(cluster, mode, folder, capsys):
    """Both write the same versions at once, until Spark's logs stop one; every file is always that of one of them."""
    url, names, path = checkpoint_url(cluster, folder, "numbers"), ["numbers"], home(folder)
    folders = [folder / "one", folder / "other"]
    with (
        driver(cluster, mode, folders[0], names, path=path, slow="4") as one,
        driver(cluster, mode, folders[1], names, path=path, slow="4") as other,
    ):
        sound = 0
        while one.process.poll() is None or other.process.poll() is None:
            code, text = verified(url, capsys)
            # 2: there is nothing yet.
            assert code in (0, 2), text
            sound += code == 0
            time.sleep(0.2)
        ended = [ends(one), ends(other)]
        for running, well in zip((one, other), ended, strict=True):
            # The last where the other one's Spark has removed an old entry of the log of offsets meanwhile.
            known = r"(?i)concurrent|multiple streaming|batch \d+ doesn.t exist"
            assert well or re.search(known, running.errors(100_000)), running.errors()
    assert sound
    run(cluster, mode, folders[0], names, BATCHES + 2, path)
    expected = numbers_output(BATCHES + 2)
    for each in folders:
        for number, rows in processes.written(each, "numbers").items():
            assert number >= BATCHES + 2 or rows == expected[number]
    assert state_of(Checkpoint(url), BATCHES + 2) == totals(BATCHES + 2)


def test_operators_in_python_keep_their_state_on_hdfs(cluster, folder):
    """Over REST, which the session tells the workers how to reach; stopped in the middle."""
    conf = {**CONF, "batches": "8"}
    with processes.Driver(folder / "local", ROCKSDB, ["tally"], conf=conf) as running:
        assert ends(running), running.errors()
    for batches in (4, 8):
        rest = {"spark.hadoop.dfs.namenode.http-address": f"localhost:{cluster.web_port}"}
        run(cluster, "delta", folder, ["python"], batches=batches, **rest)
    expected, found = processes.written(folder / "local", "tally"), processes.written(folder, "python")
    wanted = range(8)
    assert not harness.difference({n: found[n] for n in wanted}, {n: expected[n] for n in wanted})
    url = checkpoint_url(cluster, folder, "python")
    assert tools.verify(url) == 0
    assert quire.read_state(url, "TallyInPython", version=8).num_rows > 0
