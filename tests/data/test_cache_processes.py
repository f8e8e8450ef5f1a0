"""One cache under several processes at once, and under one that is killed in the middle."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vicinal.data import cache as module
from vicinal.data.cache import Decoded, decode_cached
from vicinal.data.files import plain_file
from vicinal.data.images import Decoding, decode_image

HOW = Decoding(8, 3)
COUNT = 40

# Imports once; then for each line {"jobs": [...]} it forks a process for each job, lets all start at once and
# answers with what each of them found. A job is slowed down so that they do meet.
NURSERY = """
import json, os, signal, sys, time
from hashlib import sha256
from pathlib import Path
from vicinal.data.cache import decode_cached
from vicinal.data.files import plain_file
from vicinal.data.images import Decoding

def work(job):
    counted = []
    def progress(done, total):
        counted.append(done)
        time.sleep(0.002)
        if done == job.get("dies_at"):
            os.kill(os.getpid(), signal.SIGKILL)
    files = [plain_file(Path(path)) for path in job["paths"]]
    try:
        found = decode_cached(files, Decoding(8, 3), Path(job["cache"]), progress=progress)
        return {"pixels": sha256(found.images.numpy().tobytes()).hexdigest(), "decoded": len(counted)}
    except Exception as error:
        return {"error": repr(error)}

for line in sys.stdin:
    gate, children = os.pipe(), []
    for job in json.loads(line)["jobs"]:
        answer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(gate[1])
            os.read(gate[0], 1)
            os.write(answer[1], json.dumps(work(job)).encode())
            os._exit(0)
        os.close(answer[1])
        children.append((child, answer[0]))
    os.close(gate[0]), os.close(gate[1])
    results = []
    for child, answer in children:
        status = os.waitpid(child, 0)[1]
        said = os.read(answer, 65536)
        os.close(answer)
        results.append(json.loads(said) if said else {"killed_by": os.WTERMSIG(status)})
    print(json.dumps(results), flush=True)
"""

Jobs = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def at_once() -> Iterator[Jobs]:
    """Return a runner of jobs, each in a process of its own, all at the same time."""
    process = subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def run(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
        process.stdin.write(json.dumps({"jobs": jobs}) + "\n")
        process.stdin.flush()
        answer: list[dict[str, Any]] = json.loads(process.stdout.readline())
        return answer

    yield run
    process.stdin.close()
    process.wait(timeout=30)
    process.stdout.close()


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    folder, rng = tmp_path / "pictures", np.random.default_rng(0)
    folder.mkdir()
    paths = [folder / f"{index}.png" for index in range(COUNT)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(path)
    return paths


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def expected(paths: list[Path]) -> str:
    images = torch.stack([decode_image(path, HOW.size, HOW.channels) for path in paths])
    return sha256(images.numpy().tobytes()).hexdigest()


def job(paths: list[Path], cache: Path, **more: Any) -> dict[str, Any]:
    return {"paths": [str(path) for path in paths], "cache": str(cache), **more}


def load(paths: list[Path], cache: Path, **options: Any) -> Decoded:
    return decode_cached([plain_file(path) for path in paths], HOW, cache, **options)


def copied(paths: list[Path], folder: Path) -> list[Path]:
    shutil.copytree(paths[0].parent, folder)
    return [folder / path.name for path in paths]


def the_entry(cache: Path) -> Path:
    (entry,) = (path for path in cache.iterdir() if path.name != "known")
    assert {path.name for path in entry.iterdir()} == {"images.u8", "meta.json"}
    assert not list(cache.rglob("*.part"))
    return entry


@pytest.mark.parametrize("count", [2, 4])
def test_processes_at_once_make_one_entry_together(
    at_once: Jobs, paths: list[Path], cache: Path, count: int
) -> None:
    results = at_once(*[job(paths, cache)] * count)
    assert [result.get("pixels", result) for result in results] == [expected(paths)] * count
    assert sorted(result["decoded"] for result in results) == [0] * (count - 1) + [COUNT]
    the_entry(cache)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_at_once_mend_a_damaged_entry(
    at_once: Jobs, paths: list[Path], cache: Path, count: int
) -> None:
    load(paths, cache)
    (the_entry(cache) / "images.u8").write_bytes(b"")
    results = at_once(*[job(paths, cache)] * count)
    assert [result.get("pixels", result) for result in results] == [expected(paths)] * count
    the_entry(cache)


def test_processes_with_copies_of_the_same_images_make_one_entry(
    at_once: Jobs, paths: list[Path], cache: Path, tmp_path: Path
) -> None:
    places = [paths, *(copied(paths, tmp_path / f"copy-{k}") for k in range(3))]
    results = at_once(*(job(place, cache) for place in places))
    assert [result.get("pixels", result) for result in results] == [expected(paths)] * 4
    the_entry(cache)


def test_a_copy_that_is_loaded_meanwhile_takes_nothing_away(
    paths: list[Path], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The twin looks for the entry before it is there and clears its place after it is: the worst moment.
    place, found, looked = copied(paths, tmp_path / "twin"), list[Decoded](), list[Path]()
    cleared, over = threading.Event(), threading.Event()
    twin = threading.Thread(target=lambda: found.append(load(place, cache)))
    replace_path, open_entry, write = Path.replace, module._open, module._write

    def replace(self: Path, target: Path) -> Path:
        done = replace_path(self, target)
        if Path(target).parent == cache and twin.ident is None:
            twin.start()
            cleared.wait(0.5)  # a twin that has to wait for this one never gets there
        return done

    def open_early(folder: Path) -> Decoded | None:
        if threading.current_thread() is twin and not looked:
            looked.append(folder)
            return None
        return open_entry(folder)

    def write_late(*args: Any) -> None:
        if threading.current_thread() is twin:
            cleared.set()
            over.wait(5)
        write(*args)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(module, "_open", open_early)
    monkeypatch.setattr(module, "_write", write_late)
    try:
        mine = load(paths, cache)
    finally:
        over.set()
        twin.join()
    assert looked
    assert torch.equal(mine.images, found[0].images)
    the_entry(cache)


@pytest.mark.parametrize("dies_at", [1, COUNT // 2, COUNT])
def test_a_process_that_is_killed_harms_nobody(
    at_once: Jobs, paths: list[Path], cache: Path, dies_at: int
) -> None:
    (killed,) = at_once(job(paths, cache, dies_at=dies_at))
    assert killed == {"killed_by": signal.SIGKILL}
    assert list(cache.glob("*.part"))  # it had no time to tidy up
    assert sha256(load(paths, cache).images.numpy().tobytes()).hexdigest() == expected(paths)
    the_entry(cache)


def test_those_who_wait_for_a_process_that_is_killed_do_its_work(
    at_once: Jobs, paths: list[Path], cache: Path
) -> None:
    dying = job(paths, cache, dies_at=5)
    results = at_once(dying, dying, job(paths, cache))
    # Whoever comes first is killed if it is one of the two; the last one always gets through.
    assert results[2].get("pixels", results[2]) == expected(paths)
    assert all(
        result in ({"killed_by": signal.SIGKILL}, {**results[2], "decoded": 0}) for result in results[:2]
    )
    the_entry(cache)


def test_images_stay_usable_while_others_make_them_anew(
    at_once: Jobs, paths: list[Path], cache: Path
) -> None:
    held = load(paths, cache).images
    before = held.clone()
    (the_entry(cache) / "meta.json").unlink()
    (result,) = at_once(job(paths, cache))
    assert result == {"pixels": expected(paths), "decoded": COUNT}
    assert torch.equal(held, before)
