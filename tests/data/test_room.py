"""Pictures that are decoded at the same time fit into memory together."""

import io
import threading

import pytest
from PIL import Image

from headwater.data import decode as decoding
from headwater.data.room import Room
from headwater.data.transforms import Resize, Transforms
from headwater.errors import BadSampleError


def png(width, height):
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "png")
    return file.getvalue()


def test_a_picture_larger_than_the_memory_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(decoding, "ROOM", Room(999))
    with pytest.raises(BadSampleError, match=r"x: 10×10 is 100 pixels, and the memory here is for 99 at a time"):
        decoding.decode(png(10, 10), "x")
    assert decoding.decode(png(9, 11), "x").size == (9, 11)


def test_many_bombs_at_once_take_turns_and_all_are_decoded(monkeypatch):
    most = 0

    class Watched(Room):
        def __setattr__(self, name, value):
            nonlocal most
            super().__setattr__(name, value)
            if name == "_used":
                most = max(most, value)

    monkeypatch.setattr(decoding, "ROOM", Watched(25_000_000))
    bomb, sizes = png(1000, 1000), []
    shrink = Transforms([Resize((8, 8))])
    threads = [threading.Thread(target=lambda: sizes.append(shrink.pixels(bomb, "x").shape)) for _ in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sizes == [(8, 8, 3)] * 12
    assert most <= 20_000_000  # two at a time, while they are transformed as well


def test_room_comes_back_after_a_fault(monkeypatch):
    room = Room(1000)
    monkeypatch.setattr(decoding, "ROOM", room)
    with pytest.raises(BadSampleError):
        decoding.decode(png(10, 10)[:-20], "x")
    with room.of(1000):
        pass


def test_a_large_one_is_not_overtaken_for_ever():
    room, inside, done = Room(10), threading.Event(), []
    with room.of(5):
        large = threading.Thread(target=lambda: [done.append("large") for _ in [0] if enter(room, 10, inside)])
        large.start()
        while not room._door.locked():
            pass
        small = threading.Thread(target=lambda: [done.append("small") for _ in [0] if enter(room, 1, inside)])
        small.start()
    inside.set()
    large.join()
    small.join()
    assert done == ["large", "small"]


def test_who_waits_gets_in_when_there_is_more_room():
    room, inside, done = Room(10), threading.Event(), []
    inside.set()
    with room.of(5):
        large = threading.Thread(target=lambda: done.append(enter(room, 10, inside)))
        large.start()
        while not room._door.locked():
            pass
        room.allow(15)
        large.join()
    assert done == [True]


def enter(room, num_bytes, inside):
    with room.of(num_bytes):
        return inside.wait(60)
