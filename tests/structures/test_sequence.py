"""Lists and deques: random operations against a list, and what Python's own promise besides."""

import collections

import pyarrow as pa
import pytest
from models import SequenceMachine

import quire

TestSequenceMachine = SequenceMachine.TestCase


def test_list_behaves_as_a_list(pm):
    log, plain = pm.list("log"), []
    for target in (log, plain):
        target.append(b"b")
        target.insert(0, b"a")
        target.extend([b"c", b"d"])
        target += [b"e"]
        target[1] = b"B"
        del target[0]
        target.reverse()
        target.remove(b"c")
        assert target.index(b"B") == 2
        assert target.count(b"d") == 1
        assert b"e" in target
        assert target.pop() == b"B"
        assert target.pop(0) == b"e"
        assert target[-1] == b"d"
    assert log == plain
    assert log[:] == plain
    assert log != [b"x"]
    pm.check()


def test_deque_behaves_as_a_deque(pm):
    jobs, plain = pm.deque("jobs"), collections.deque()
    for target in (jobs, plain):
        target.extend([b"1", b"2", b"3", b"4", b"5"])
        target.extendleft([b"0", b"-1"])
        target.rotate(2)
        target.rotate(-3)
        target.rotate(100)
        target.append(b"end")
        target.appendleft(b"start")
        assert target.popleft() == b"start"
        assert target.pop() == b"end"
    assert list(jobs) == list(plain)
    jobs.clear()
    jobs.rotate(3)
    assert len(jobs) == 0
    pm.check()


def test_values_that_are_not_there_are_named(pm):
    log = pm.list("log")
    log.extend([b"a", b"b", b"a"])
    for call in (log.index, log.remove, lambda value: log.index(value, 1, 2)):
        with pytest.raises(ValueError, match="b'x' is not in 'log'"):
            call(b"x")
    assert (log.index(b"a"), log.index(b"a", 1), log.index(b"b", -2), log.index(b"b", 0, 2)) == (0, 2, 1, 1)
    with pytest.raises(quire.InvalidError):
        log.index(b"a", 1, -1)
    log.remove(b"a")
    assert log[:] == [b"b", b"a"]


def test_positions_outside_are_index_errors(pm):
    log = pm.list("log")
    for call in (log.pop, pm.deque("log").popleft, lambda: log[0], lambda: log[-1]):
        with pytest.raises(IndexError) as caught:
            call()
        assert isinstance(caught.value, quire.QuireError)
    log.append(b"a")
    for index in (1, -2, 1 << 70):
        with pytest.raises(IndexError, match="has 1 records"):
            log[index]
        with pytest.raises(IndexError):
            log[index] = b"x"
        with pytest.raises(IndexError):
            del log[index]


def test_list_and_deque_are_two_faces_of_one_structure(pm):
    pm.list("log").extend([b"a", b"b"])
    assert pm.deque("log").popleft() == b"a"
    assert pm.sets() == {"log": "sequence"}


def test_extend_from_arrow(pm):
    log = pm.list("log")
    log.extend(pa.array(["x", "y"]))
    log.extend(pa.chunked_array([[b"1"], [b"2", b"3"]]))
    log.extend(pa.array([b"abc", b"def"], pa.binary(3))[1:])
    log.extend(log)
    assert log[:] == [b"x", b"y", b"1", b"2", b"3", b"def"] * 2
    with pytest.raises(quire.InvalidError, match="null"):
        log.extend(pa.array([b"a", None]))
    assert len(log) == 12


def test_empty_sequence(pm):
    log = pm.list("log")
    assert list(log) == list(reversed(log)) == log[:] == []
    assert log.to_array().to_pylist() == []
    assert list(log.to_batches()) == []
    log.extend([])
    assert not log


@pytest.mark.slow
def test_many_records_from_both_ends_and_the_middle(pm):
    jobs = pm.deque("jobs")
    jobs.extend([b"%d" % number for number in range(20_000)])
    for number in range(1000):
        jobs.appendleft(b"left%d" % number)
        jobs.insert(10_000, b"mid%d" % number)
    pm.check()
    assert len(jobs) == 22_000
    assert jobs[0] == b"left999"
    del jobs[500:21_500]
    pm.check()
    assert len(jobs) == 1000
    while jobs:
        jobs.popleft()
    pm.commit()
    pm.check()
    assert pm.stats().frames_used < 60
