"""Pages: any two states of one line, the pages that differ between them, and those put on the older state."""

import contextlib
import random
from pathlib import Path

import hypothesis.strategies as st
import pytest
from families import COUNTER, FamiliesMachine, content
from hypothesis import given, settings
from hypothesis.stateful import precondition, rule
from models import KEYS, VALUES

import quire
from quire.checkpoint import pages


class PagesMachine(FamiliesMachine):
    """Copies made from images, mapped or not, and a follower brought up to date by pages alone."""

    follower = None

    def teardown(self):
        super().teardown()
        if self.follower is not None:
            self.follower.close()

    def image_file(self, snapshot):
        path = Path(self.folder.name) / f"image-{next(COUNTER)}"
        snapshot.save(path)
        return path

    def taken(self, pin, mapped):
        path = self.image_file(pin.snapshot)
        image = path if mapped else path.read_bytes()
        other = quire.PageManager.from_image(image)
        path.unlink()
        assert content(other) == pin.model
        return other

    def on_line(self, pin):
        return self.line[: len(pin.line)] == pin.line

    @precondition(lambda self: any(self.on_line(pin) for pin in self.pins))
    @rule(data=st.data(), mapped=st.booleans())
    def write_and_apply(self, data, mapped):
        pin = data.draw(st.sampled_from([pin for pin in self.pins if self.on_line(pin)]))
        payloads = pages.write(self.pm, pin.snapshot.epoch)
        with self.taken(pin, mapped) as other:
            origin = pages.origin(other)
            assert origin == pin.snapshot.epoch
            for payload in payloads:
                pages.apply(other, payload)
            other.commit()
            other.check()
            assert content(other) == self.model
            assert pages.origin(other) == other.epoch > origin

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), mapped=st.booleans(), key=KEYS, value=VALUES)
    def write_on_a_copy(self, data, mapped, key, value):
        """The pages that a copy changes fit a second copy of the same image, and not what the first one came from."""
        pin = data.draw(st.sampled_from(self.pins))
        with self.taken(pin, mapped) as one, self.taken(pin, not mapped) as two:
            one.map("made here")[key] = value
            for name, (ordered, values) in pin.model.items():
                handle = one.ordered_map(name) if ordered else one.map(name)
                for known in list(values)[::2]:
                    del handle[known]
                handle[key] = value
            changed = pages.write(one, pages.origin(one))
            one.commit()
            one.check()
            for payload in changed:
                pages.apply(two, payload)
            two.commit()
            two.check()
            assert content(two) == content(one)
            with pytest.raises(quire.MismatchError):
                pages.apply(two, changed[0])

    @rule()
    def write_all(self):
        with quire.PageManager(page_size=self.page_size) as other:
            for payload in pages.write(self.pm, 0) if pages.origin(self.pm) == 0 else []:
                pages.apply(other, payload)
            other.commit()
            other.check()
            assert content(other) == self.model

    @rule()
    def follow(self):
        """A chain of pages from the empty state on; after a restore it starts anew."""
        if self.follower is None or self.line[: len(self.followed)] != self.followed:
            if self.follower is not None:
                self.follower.close()
            self.follower, self.followed, self.at = quire.PageManager(page_size=self.page_size), [], 0
        payloads = pages.write(self.pm, self.at)
        self.commit()
        for payload in payloads:
            pages.apply(self.follower, payload)
        self.follower.commit()
        self.follower.check()
        assert content(self.follower) == self.model
        self.at, self.followed = self.pm.epoch, list(self.line)

    def reopen(self):
        if self.path is not None:
            super().reopen()
            if self.follower is not None:
                self.follower.close()
            self.follower = None

    reopen = precondition(lambda self: self.path is not None)(rule()(reopen))


TestPagesMachine = PagesMachine.TestCase


def sample(pm, count=3000):
    pm.map("users").put_many([b"user %d" % n for n in range(count)], [b"x" * 50] * count)
    pm.ordered_map("log").put_many([b"%08d" % n for n in range(count)], [b"y" * 20] * count)
    return pm.commit()


def test_the_pages_of_a_few_changes_are_few(pm):
    since = sample(pm, 20000)
    whole = sum(map(len, pages.write(pm, 0)))
    pm.map("users")[b"user 7"] = b"z" * 50
    some = pages.write(pm, since)
    assert sum(map(len, some)) < whole / 50
    assert abs(pages.size(pm, since) - sum(map(len, some))) < 1000
    assert abs(pages.size(pm, 0) - whole) < whole / 50


def test_pages_are_refused_where_they_do_not_fit(pm):
    sample(pm)
    payloads = pages.write(pm, 0)
    with quire.PageManager(page_size=8192) as other, pytest.raises(quire.MismatchError, match="with pages of 8192"):
        pages.apply(other, payloads[0])
    with quire.PageManager(page_size=pm.page_size) as other:
        other.map("something")[b"k"] = b"v"
        with pytest.raises(quire.MismatchError, match="this is another"):
            pages.apply(other, payloads[0])
        other.commit()
        with pytest.raises(quire.MismatchError, match="this is another"):
            pages.apply(other, payloads[0])
    with pytest.raises(quire.InvalidError, match="since -1"):
        pages.write(pm, -1)


def followed(*files):
    """A state that files of pages lead to, from nothing or from an image."""
    first, *rest = files
    state = quire.PageManager.from_image(first) if isinstance(first, bytes) else quire.PageManager(page_size=1024)
    for payloads in rest if isinstance(first, bytes) else files:
        for payload in payloads:
            pages.apply(state, payload)
        state.commit()
    return state


def image_of(pm, tmp_path):
    with pm.snapshot() as snapshot:
        snapshot.save(tmp_path / "image")
    return (tmp_path / "image").read_bytes()


def test_what_was_loaded_has_two_names(tmp_path):
    """A base of the very state that was loaded, and a commit that changes nothing, fit what is written after them."""
    with quire.PageManager(page_size=1024) as pm:
        sample(pm, 50)
        start = pages.write(pm, 0)
    with followed(start) as pm:
        base = image_of(pm, tmp_path)
        nothing = pages.write(pm, pages.origin(pm))
        pm.commit()
        pm.map("users")[b"new"] = b"1"
        changed = pages.write(pm, pm.epoch)
        pm.commit()
        expected = content(pm)
    for files in ((start, changed), (base, changed), (start, nothing, changed), (base, nothing, changed)):
        with followed(*files) as state:
            assert content(state) == expected
            state.check()


@settings(max_examples=7 * settings.default.max_examples)
@given(data=st.data())
def test_damaged_payloads_are_refused_or_harmless(data):
    with quire.PageManager(page_size=1024) as pm:
        sample(pm, 40)
        payload = bytearray(pages.write(pm, 0)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        # The records' own fields more often than what is in the pages, which a checksum of the file covers.
        at = data.draw(st.one_of(st.integers(0, 120), st.integers(0, len(payload) - 1)))
        payload[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    with quire.PageManager(page_size=1024) as other:
        try:
            pages.apply(other, bytes(payload[: cut if data.draw(st.booleans()) else None]))
            other.commit()
            content(other)
            other.check()
        except quire.QuireError:
            pass


# ------------------------------------------------------------------------------------------------ mapped images


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file of several chunks, and what is in it."""
    path = tmp_path_factory.mktemp("images") / "big.image"
    model = {b"key %d" % n: b"%d" % n * 40 for n in range(60000)}
    with quire.PageManager() as pm:
        pm.map("users").put_many(list(model), list(model.values()))
        pm.commit()
        with pm.snapshot() as snapshot:
            snapshot.save(path)
    assert path.stat().st_size > 4 * 2**21
    return path, model


def test_a_mapped_image_is_read_when_it_is_touched(saved):
    path, model = saved
    with quire.PageManager.from_image(path) as pm:
        users = pm.map("users")
        assert users[b"key 77"] == model[b"key 77"]
        assert len(users) == len(model)
        users[b"key 77"] = b"new"
        del users[b"key 78"]
        pm.commit()
        pm.abort()
        pm.check()
        changed = dict(model)
        changed[b"key 77"] = b"new"
        del changed[b"key 78"]
        assert dict(users.items()) == changed
        users.clear()
        pm.commit()
        for _ in range(20):
            users[b"again"] = b"1"
            pm.commit()
            del users[b"again"]
            pm.commit()
        pm.check()
        assert pm.stats().bytes_held < path.stat().st_size * 0.6
    with quire.PageManager.from_image(path) as pm:
        assert dict(pm.map("users").items()) == model


def test_a_mapped_image_may_be_removed_and_counts_as_held(saved, tmp_path):
    path, model = saved
    copy_of_it = tmp_path / "copy"
    copy_of_it.write_bytes(path.read_bytes())
    with quire.PageManager.from_image(copy_of_it) as pm:
        copy_of_it.unlink()
        assert dict(pm.map("users").items()) == model
        assert pm.stats().bytes_held >= path.stat().st_size * 0.9
    with pytest.raises(quire.LimitError):
        quire.PageManager.from_image(path, limit="1m")
    with pytest.raises(quire.NotFoundError, match="no image named"):
        quire.PageManager.from_image(copy_of_it)
    with pytest.raises(quire.InvalidError, match="not int"):
        quire.PageManager.from_image(7)
    with pytest.raises(quire.CorruptError, match="less than any image"):
        quire.PageManager.from_image(b"short")


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_mapped_image_never_gives_a_wrong_value(saved, seed):
    path, model = saved
    chance = random.Random(seed)
    damaged = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 3)):
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    if seed % 4 == 0:
        del damaged[chance.choice([-1, len(damaged) // 2, chance.randrange(len(damaged))]) :]
    file = path.with_name("damaged")
    file.write_bytes(damaged)
    with pytest.raises(quire.CorruptError, match=str(file)), quire.PageManager.from_image(file) as pm:
        users = pm.map("users")
        for key in chance.sample(sorted(model), 200):
            with contextlib.suppress(quire.CorruptError):
                assert users[key] == model[key]
                users[key] = model[key]
        assert dict(users.items()) == model
        pm.check()
