"""Headers of tars: read as Python's tarfile reads them, without what a stranger could do to it."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.layouts.members import Member, read_members

FORMS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
names = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="/"), min_size=1, max_size=40)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=5).map("/".join)


def members_of(data):
    return list(read_members(io.BytesIO(data), len(data)))


@given(files=st.lists(st.tuples(paths, st.binary(max_size=1200)), max_size=6), form=st.sampled_from(FORMS),
       folders=st.booleans())  # fmt: skip
def test_members_are_those_that_tarfile_finds(files, form, folders):
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as tar:
        for name, body in files:
            member = tarfile.TarInfo(name)
            member.size = len(body)
            try:
                tar.addfile(member, io.BytesIO(body))
            except ValueError:  # too long for this form
                continue
            if folders:
                folder = tarfile.TarInfo("folder")
                folder.type = tarfile.DIRTYPE
                tar.addfile(folder)
    with tarfile.open(fileobj=io.BytesIO(sink.getvalue())) as tar:
        expected = [Member(each.name, each.offset_data, each.size) for each in tar if each.isreg()]
    assert members_of(sink.getvalue()) == expected


def header(name="a.jpg", size=b"00000000001\0", kind=b"0"):
    raw = bytearray(512)
    raw[: len(name)] = name.encode()
    raw[124 : 124 + len(size)] = size
    raw[156:157] = kind
    raw[257:265] = b"ustar\x0000"
    raw[148:156] = b" " * 8
    raw[148:156] = f"{sum(raw):06o}\0 ".encode()
    return bytes(raw)


def extra(text, kind=b"x"):
    return header("x", f"{len(text):011o}\0".encode(), kind) + text + bytes(-len(text) % 512)


def test_a_file_of_more_than_eight_gigabytes_has_its_size_in_binary():
    size = 9 << 30
    found = read_members(io.BytesIO(header(size=b"\x80" + size.to_bytes(11, "big"))), 512 + size)
    assert next(found) == Member("a.jpg", 512, size)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (header(size=b"\xff" * 11 + b"\0") + bytes(512), "for a number"),
        (extra(b"13 size=-512\n") + header() + bytes(512), "for a size"),
        (header(size=b"\x80" + b"\x10" * 11), "more than are left"),
        (extra(b"1" * 400_000) + header() + bytes(512), "damaged"),
        (extra(bytes(2 << 20)), "the limit is"),
        (extra(b"22 GNU.sparse.major=1\n") + header() + bytes(512), "sparse"),
        (bytes(511), "shorter|middle"),
        (b"x" * 512, "checksum|number"),
    ],
)
def test_what_no_reader_should_follow_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        members_of(data)
