"""A data set larger than the memory a process may have streams through it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIDE = 128
IMAGE = 3 * SIDE * SIDE
TOTAL = 6 << 30
COUNT = TOTAL // IMAGE
MARKED = 401  # every so many images one that is not black
ALLOWED = 512 << 20  # what the process may take on top of what the imports took
BOUND = 96 << 20  # what it may really take: far less than the images it has seen, as floats

SCRIPT = """
import json, resource, sys
from dataclasses import asdict
from pathlib import Path

import torch
from vicinal.data.cache import decode_cached
from vicinal.data.domains import LabelledImages, SourceDomain
from vicinal.data.episodes import Episodes, from_all
from vicinal.data.files import ImageFile
from vicinal.data.images import Decoding
from vicinal.data.pixels import Pixels
from vicinal.data.streams import StreamSpec, make_stream

folder, allowed, side, marked = Path(sys.argv[1]), *map(int, sys.argv[2:])
torch.set_num_threads(1)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))

def refused(make):
    try:
        make()
    except (RuntimeError, MemoryError):
        return True
    return False

decoded = decode_cached([], Decoding(side, 3), folder)
images = decoded.images
count = len(images)
resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + allowed,) * 2)
whole = [refused(images.clone), refused(lambda: images[torch.arange(count)])]

before, most, seen, wrong = status("RssAnon"), 0, 0, 0
labels = torch.arange(count) % 7

def look(x, numbers):
    global most, seen, wrong
    most, seen = max(most, status("RssAnon")), seen + len(x)
    expected = torch.where(numbers % marked == 0, numbers % 251, 0)
    wrong += int(((x[:, 0, 0, 0] * 255).round().long() != expected).sum())

halves = torch.arange(count).chunk(2)
views = [Pixels(images, half) for half in halves]
stream = make_stream(StreamSpec("mixed", 64), views, [labels[half] for half in halves], 0)
for start, x in zip(range(0, 2048, 64), stream.batches("cpu")):
    look(x, stream.order[start : start + 64])
streamed = seen

parts = [LabelledImages(view, half) for view, half in zip(views, halves)]  # labels are numbers, to compare
sources = [SourceDomain(str(k), part, part) for k, part in enumerate(parts)]
episodes = Episodes(sources, from_all, 32, None, torch.device("cpu"))
for episode in episodes.starting_at(torch.Generator().manual_seed(0).get_state(), 20):
    for batch in episode.batches:
        look(batch.x, batch.y)
print(json.dumps({"bytes": images.nbytes, "whole": whole, "streamed": streamed, "seen": seen,
                  "wrong": wrong, "grown": most - before}))
"""


def make_entry(cache: Path) -> None:
    """Write an entry of several GB as holes with a few marks, as if it had been decoded from files."""
    from vicinal.data import cache as module
    from vicinal.data.images import Decoding

    # Found by the key of no files: nothing is there to be decoded, whatever the entry says it holds.
    stamp = module._stamp([], Decoding(SIDE, 3))
    entry = cache / "large"
    (cache / "known").mkdir(parents=True)
    entry.mkdir()
    with (entry / "images.u8").open("wb") as out:
        out.truncate(COUNT * IMAGE)
        for number in range(0, COUNT, MARKED):
            out.seek(number * IMAGE)
            out.write(bytes([number % 251]))
    written = (entry / "images.u8").stat().st_mtime_ns
    meta = {"shape": [COUNT, 3, SIDE, SIDE], "bad": [], "crc32": 0}
    (entry / "meta.json").write_text(json.dumps({**meta, "written": written}))
    (cache / "known" / f"{stamp}.json").write_text(json.dumps({"key": "large"}))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured with Linux's /proc")
def test_a_data_set_larger_than_memory_streams_in_bounded_memory(tmp_path: Path) -> None:
    make_entry(tmp_path)
    if (tmp_path / "large" / "images.u8").stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no holes: the file would really take several GB")
    words = [tmp_path, ALLOWED, SIDE, MARKED]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        # Large blocks go back to the system when they are freed, so that what is held can be measured.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["bytes"] == COUNT * IMAGE > 10 * ALLOWED
    assert found["whole"] == [True, True]  # all of it at once is more than the process may have
    assert found["streamed"] == 2048
    assert found["seen"] == 2048 + 20 * 64
    assert found["wrong"] == 0
    assert found["grown"] < BOUND, found
