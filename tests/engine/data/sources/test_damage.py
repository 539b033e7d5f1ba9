"""Files that are damaged, cut off, of another kind than their name says, or no files end in one
sentence that names the file and the last good place, within limits of memory and time.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import socket
import subprocess
import sys

import pytest

from engine.config.data_settings import DataConfig
from engine.data.sources import bounded_lines, search
from engine.data.sources.open_source import open_source
from engine.errors import DataError
from tests.support import data_files as made
from tests.support.data_files import COMPRESS, write
from tests.support.stuck import never_stuck

ROWS = [{"text": str(random.Random(i).getrandbits(160))} for i in range(5000)]
CONTENT = made.as_lines(ROWS).encode()
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def read(path, streaming=True):
    return [row for _, row in open_source(DataConfig(source=str(path)), streaming).read()]


def refused(path, streaming=True):
    """The sentence that reading ends with, and the rows before it."""
    rows = []
    with pytest.raises(DataError) as caught:
        for _, row in open_source(DataConfig(source=str(path)), streaming).read():
            rows.append(row)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert path.name in sentence
    return sentence, rows


@pytest.mark.parametrize("compression", COMPRESS)
def test_a_compressed_file_that_is_cut_off_names_its_last_good_line(tmp_path, compression):
    content = COMPRESS[compression](CONTENT * 4)
    path = write(tmp_path / f"a.jsonl{compression}", content[: len(content) * 9 // 10])
    sentence, rows = refused(path)
    assert sentence == f"{path.name} is cut off after line {len(rows)}; write or fetch it again."
    assert rows and rows == (ROWS * 4)[: len(rows)]
    assert refused(path, streaming=False)[0] == sentence


@pytest.mark.parametrize("compression", COMPRESS)
def test_damage_within_a_compressed_file_is_told_as_that(tmp_path, compression):
    content = COMPRESS[compression](CONTENT * 8)
    place = len(content) * 9 // 10
    damaged = content[:place] + b"\xff" * 4000 + content[place + 4000 :]
    path = write(tmp_path / f"a.jsonl{compression}", damaged)
    sentence, rows = refused(path)
    # bzip2 may take what follows the damage for the rest of a block that does not end.
    assert re.match(rf"{path.name} is (damaged \(.*\)|cut off) after line ", sentence)
    assert sentence.endswith(f" after line {len(rows)}; write or fetch it again.")
    assert rows and rows[:100] == ROWS[:100]


def test_what_stands_before_a_cut_in_a_long_file_is_read(tmp_path, monkeypatch):
    """Also where blocks before the damaged one were read by the thread."""
    from engine.data.sources import open_text

    monkeypatch.setattr(open_text, "_BLOCK", 1 << 16)
    for compression in (".gz", ".zst"):
        content = COMPRESS[compression](CONTENT * 4)
        path = write(tmp_path / f"a.jsonl{compression}", content[:-20])
        assert len(refused(path)[1]) > len(ROWS) * 2


SENTENCES = {
    "zeros behind lines": (
        "a.jsonl",
        CONTENT + bytes(5000),
        r"^a\.jsonl is damaged after line 5000: it goes on with zero bytes, as after a crash; ",
    ),
    "zeros in the middle of a line": (
        "a.jsonl",
        CONTENT + b'{"text": "a' + bytes(5000),
        r"^a\.jsonl is damaged after line 5000: it goes on with zero bytes",
    ),
    "zeros alone": ("a.jsonl", bytes(5000), r"^a\.jsonl begins with zero bytes, as after a crash"),
    "a zero": ("a.jsonl", b'{"a": 1}\n{"a": "\0b"}\n', r"^Line 2 of a\.jsonl holds zero bytes, wh"),
    "zeros behind a table": (
        "a.csv",
        b"a,b\n1,2\n" + bytes(99),
        r"^a\.csv is damaged after line 2: it goes on with zero bytes",
    ),
    "zeros behind a text": (
        "a.txt",
        b"a\nb\n" + bytes(99),
        r"^a\.txt is damaged after line 2: it goes on with zero bytes",
    ),
    "zeros behind a list": (
        "a.json",
        b'[{"a": 1}]' + bytes(99),
        r"^a\.json is damaged at line 1, column 11: it goes on with zero bytes",
    ),
    "a line that is cut off": (
        "a.jsonl",
        CONTENT[:-9],
        r"^a\.jsonl is cut off in line 5000, its last; remove that line, or",
    ),
    "a cut between names": ("a.jsonl", b'{"a": 1}\n{"a": 1,', r"^a\.jsonl is cut off in line 2"),
    "lists in lines": ("a.jsonl", b"[1]\n[2]\n", r"^Line 1 of a\.jsonl is a list, not an object"),
    "objects over lines that break": (
        "a.jsonl",
        b'{\n"a": 1\n}\n{\n"a" 2\n}',
        r"^a\.jsonl is not valid JSON \(expecting ':' delimiter at line 5, column 5\)",
    ),
    "latin-1 lines": (
        "a.jsonl",
        '{"a": "e"}\n{"a": "é"}'.encode("latin-1"),
        r"^Line 2 of a\.jsonl is not UTF-8 text; save the file as UTF-8\.",
    ),
    "a latin-1 table": ("a.csv", "a\nb\né".encode("latin-1"), r"^Line 3 of a\.csv is not UTF-8"),
    "a latin-1 text": ("a.md", "a\nb\né".encode("latin-1"), r"^Line 3 of a\.md is not UTF-8"),
    "a latin-1 list": (
        "a.json",
        '[\n{"a": "é"}]'.encode("latin-1"),
        r"^Line 2 of a\.json is not UTF-8 text",
    ),
    "half a character": (
        "a.csv",
        "a;b\n1;2\n".encode("utf-16")[:-1],
        r"^a\.csv is not UTF-16-LE text after line",
    ),
    "gzip by another name": (
        "a.jsonl",
        gzip.compress(CONTENT),
        r"^a\.jsonl is compressed with gzip, which its name does not say; give it a name .* \.gz\.",
    ),
    "a plain file named gzip": (
        "a.jsonl.gz",
        CONTENT,
        r"^a\.jsonl\.gz is not compressed with gzip, as its name says; remove \.gz",
    ),
    "parquet in gzip": (
        "a.jsonl.gz",
        gzip.compress(b"PAR1...."),
        r"^a\.jsonl\.gz is a Parquet file, which its name does not say",
    ),
    "parquet by another name": ("a.json", made.as_parquet(ROWS), r"^a\.json is a Parquet file"),
    "arrow by another name": ("a.csv", b"ARROW1\0\0", r"^a\.csv is an Arrow file"),
    "excel by another name": ("a.csv", b"PK\x03\x04", r"^a\.csv is a zip archive or an Office"),
    "an old excel": ("a.xls", b"\xd0\xcf\x11\xe0", r"^a\.xls is an old Office document .*\.xlsx"),
    "a pdf": ("a.txt", b"%PDF-1.7\n", r"^a\.txt is a PDF; give its text as \.txt\."),
    "a page": (
        "a.parquet",
        b"\n <!DOCTYPE html><html>404",
        r"^a\.parquet is a page of the web \(HTML\), perhaps the error of a download; fetch",
    ),
    "a tar": ("a.jsonl", b"x" * 257 + b"ustar\0" + bytes(99), r"^a\.jsonl is a tar archive; unpac"),
    "no parquet": ("a.parquet", b"PAR1 a PAR1", r"^a\.parquet cannot be read as Parquet"),
    "no arrow": ("a.arrow", b"\xff\xff\xff\xff\x10\0\0\0", r"^a\.arrow cannot be read as Arrow"),
    "half an arrow": (
        "a.arrow",
        made.as_arrow(ROWS, is_stream=True)[:-9000],
        r"^a\.arrow cannot be read (as Arrow|after row \d+) \(",
    ),
    "an old feather": ("a.feather", b"FEA1....FEA1", r"^a\.feather is in the first version of Fe"),
    "no excel": ("a.xlsx", b"PK\x03\x04...", r"^a\.xlsx cannot be read as a file of Excel"),
    "a wrong row": (
        "a.csv",
        b"a;b\n1;2\n1;2;3\n",
        r"^Row 2 of a\.csv has 3 cells, but the header names 2 columns \(with semicolons between "
        r"the cells\); put texts with semicolons or line ends in double quotes\.",
    ),
    **{
        f"a pointer named {name}": (
            name,
            LFS,
            rf"^{name} is a Git LFS pointer and not the data; ru",
        )
        for name in ("a.jsonl", "a.parquet", "a.jsonl.gz", "a.csv.zst", "a.xlsx", "a.arrow", "a.md")
    },
}


@pytest.mark.parametrize("name", SENTENCES)
def test_what_cannot_be_read_is_one_sentence(tmp_path, name):
    filename, content, pattern = SENTENCES[name]
    path = write(tmp_path / filename, content)
    for streaming in (True, False):
        with pytest.raises(DataError, match=pattern) as caught:
            read(path, streaming)
        assert "\n" not in str(caught.value)


def test_a_pointer_in_a_folder_is_named(tmp_path):
    write(tmp_path / "set/a.jsonl", CONTENT)
    write(tmp_path / "set/b.parquet", LFS)
    with pytest.raises(DataError, match=r"^b\.parquet is a Git LFS pointer .*`git lfs pull`"):
        read(tmp_path / "set")


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_a_line_that_is_too_long_is_refused_with_its_number(tmp_path, monkeypatch, name):
    monkeypatch.setattr(bounded_lines, "LONGEST_LINE", 1 << 21)
    monkeypatch.setattr(bounded_lines, "_CHUNK", 1 << 10)
    content = b'{"text": 1}\n{"text": "' + b"x" * (1 << 22) + b'"}\n'
    path = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    sentence, _ = refused(path)
    assert sentence.startswith(f"Line 2 of {name} is longer than 2 MiB; divide it, or ")


PEAK = """
import sys
from pathlib import Path
import pyarrow  # its own memory is not that of a row
from engine.config.data_settings import DataConfig
from engine.errors import DataError
from engine.data.sources.open_source import open_source

def peak():
    # `ru_maxrss` would begin with what the process of the tests had when it started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

before = peak()
try:
    rows = sum(1 for _ in open_source(DataConfig(source=sys.argv[1])).read())
except DataError as error:
    rows = str(error)
print(peak() - before)
print(rows)
"""


def peak_of(path):
    """The bytes of memory that another process takes to read a file, and what it read."""
    command = [sys.executable, "-c", PEAK, str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peak, rows = shown.stdout.splitlines()
    return int(peak), rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.txt", "a.csv"])
def test_a_row_of_20_mb_takes_less_than_ten_times_its_size(tmp_path, name):
    text = "wörd 😀 line\n" * 1_200_000
    if name.startswith("a.json"):
        content = json.dumps([{"text": text}], ensure_ascii=False)
        content = content if name == "a.json" else content[1:-1] + "\n"
    elif name == "a.csv":
        content = f'text,more\n"{text}",1\n'
    else:
        content = text.replace("\n", " ")
    raw = content.encode()
    assert len(raw) > 18e6
    path = write(tmp_path / name, gzip.compress(raw, 1) if name.endswith(".gz") else raw)
    peak, rows = peak_of(path)
    assert rows == "1" or (name == "a.txt" and int(rows) >= 10)
    assert peak < 10 * len(raw)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
def test_gigabytes_of_zeros_are_not_read_into_memory(tmp_path, name):
    begin = b'[{"a": 1},\n' if name == "a.json" else b'{"a": 1}\n'
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(begin) + gzip.compress(bytes(64 << 20), 9) * 32)
    else:
        path.write_bytes(begin)
        os.truncate(path, 8 << 30)  # takes no room on the disk
    with never_stuck(computing=20):
        peak, sentence = peak_of(path)
    assert "zero bytes" in sentence and sentence.startswith(name)
    assert peak < 100 << 20


def test_a_bomb_ends_at_the_longest_line(tmp_path):
    """Two gigabytes of one letter, in two megabytes."""
    piece = gzip.compress(b"x" * (64 << 20), 9)
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "') + piece * 32)
    peak, sentence = peak_of(path)
    assert sentence.startswith("Line 1 of a.jsonl.gz is longer than 64 MiB; ")
    assert peak < 400 << 20


# ---------------------------------------------------------------------- what is no file


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.jsonl"))
        for name, kind in (("pipe.jsonl", "a pipe"), ("socket.jsonl", "a socket")):
            with pytest.raises(DataError, match=rf"{name} is {kind} and no file; give a file"):
                read(tmp_path / name)
    with pytest.raises(DataError, match=r"^/dev/zero is a device and no file; give a file"):
        read("/dev/zero")
    with pytest.raises(DataError, match=r"pipe\.jsonl is a pipe and no file"):
        read(tmp_path)


def test_an_error_of_the_disk_is_one_sentence():
    with pytest.raises(DataError, match=r"^mem cannot be read .*\(Input/output error\); check"):
        read("/proc/self/mem")


@pytest.mark.parametrize("source", ["/proc", "/", "~root", "/proc/self", "~nobody-of-this-name"])
def test_no_folder_is_searched_for_long(source):
    with never_stuck(computing=10), pytest.raises(DataError) as caught:
        read(source)
    assert "\n" not in str(caught.value)


def test_a_folder_with_a_link_to_itself_is_read_once(tmp_path):
    write(tmp_path / "set/deep/a.jsonl", '{"a": 1}\n')
    write(tmp_path / "other/b.jsonl", '{"a": 2}\n')
    write(tmp_path / "set/~$a.xlsx", b"a lock of Excel")
    (tmp_path / "set/again").symlink_to(tmp_path / "set")
    (tmp_path / "set/a_link").symlink_to(tmp_path / "set/deep")
    (tmp_path / "set/linked").symlink_to(tmp_path / "other")
    (tmp_path / "set/left").symlink_to(tmp_path / "set/right")
    (tmp_path / "set/right").symlink_to(tmp_path / "set/left")
    source = open_source(DataConfig(source=str(tmp_path / "set")))
    assert [member.name for member in source.members] == ["a.jsonl", "b.jsonl"]
    assert source.total == 2


@pytest.mark.parametrize("target", ["gone.jsonl", "circle.jsonl"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, target):
    write(tmp_path / "a.jsonl", '{"a": 1}\n')
    (tmp_path / "circle.jsonl").symlink_to(tmp_path / target)
    with pytest.raises(DataError, match=r"/circle\.jsonl cannot be read \(.*\); mend or remove"):
        read(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read every file")
@pytest.mark.parametrize("part", ["set", "set/deep", "set/deep/a.jsonl"])
def test_what_may_not_be_read_is_named(tmp_path, part):
    write(tmp_path / "set/deep/a.jsonl", '{"a": 1}\n')
    (tmp_path / part).chmod(0)
    try:
        with pytest.raises(
            DataError, match=r"cannot be read \(Permission denied\); check its perm"
        ):
            read(tmp_path / "set")
    finally:
        (tmp_path / part).chmod(0o755)


def test_a_folder_of_too_many_files_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "MOST_ENTRIES", 20)
    for number in range(21):
        write(tmp_path / f"{number}/a.log", b"")
    with pytest.raises(DataError, match=r" holds more than 20 files and folders; name a folder wi"):
        read(tmp_path)
    monkeypatch.setattr(search, "MOST_ENTRIES", 100)
    monkeypatch.setattr(search, "MOST_SECONDS", 0.0)
    with pytest.raises(DataError, match=r" could not be searched in 0 seconds; name a folder with"):
        read(tmp_path)


def test_memory_that_runs_out_is_one_sentence(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "' + b"x" * (60 << 20) + b'"}\n')
    code = PEAK.replace("try:", "resource.setrlimit(resource.RLIMIT_AS, (room(),) * 2)\ntry:", 1)
    room = (
        "import resource\n"
        "def room():\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    return used + (90 << 20)\n"
    )
    command = [sys.executable, "-c", room + code, str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    sentence = shown.stdout.splitlines()[1]
    assert re.match(
        r"a\.jsonl cannot be read after .*, because the memory is too small; ", sentence
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a"}\n{broken}\n\x00\x00\n'),
        ("a.txt.bz2", COMPRESS[".bz2"](b"Rivers run.\n" * 9)[:-9]),
        ("a.csv.gz", COMPRESS[".gz"](b"text\nRivers\n")[:-9]),
    ],
    # A compressed file holds the time, so its bytes must not be a test's name.
    ids=["damaged line", "cut bz2", "cut gz"],
)
def test_counting_the_rows_of_a_run_tells_what_a_preview_tells(tmp_path, name, content):
    path = write(tmp_path / name, content)
    assert refused(path)[0] == refused(path, streaming=False)[0]
