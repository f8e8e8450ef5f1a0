import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vicinal.data.pickles import load_plain_pickle
from vicinal.errors import DataError

HELD: dict[str, Any] = {
    "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "labels": [1, 2, 3],
    "text": "déjà",
    "raw": b"\x00\xff",
    "nested": ({"a": None}, [True, 2.5]),
}


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_in_plain_containers(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(HELD, protocol=protocol))
    found = load_plain_pickle(path)
    assert found.keys() == HELD.keys()
    np.testing.assert_array_equal(found["data"], HELD["data"])
    assert found["data"].dtype == np.uint8
    assert {key: found[key] for key in list(HELD)[1:]} == {key: HELD[key] for key in list(HELD)[1:]}


def test_arrays_under_the_module_name_of_older_numpy(tmp_path: Path) -> None:
    content = pickle.dumps(HELD["data"], protocol=2)
    older = content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert any(
        argument == "numpy.core.multiarray _reconstruct" for _, argument, _ in pickletools.genops(older)
    )
    (tmp_path / "batch").write_bytes(older)
    np.testing.assert_array_equal(load_plain_pickle(tmp_path / "batch"), HELD["data"])


class Touch:
    """Pickles as a call that would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pickle_that_would_run_something_is_refused_and_nothing_runs(tmp_path: Path, wrapped: bool) -> None:
    made, path = tmp_path / "made", tmp_path / "batch"
    held = {"data": Touch(made), "array": np.array([Touch(made)], dtype=object)} if wrapped else Touch(made)
    content = pickle.dumps(held, protocol=2)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"batch: cannot be read as a pickle \(it names"):
        load_plain_pickle(path)
    assert not made.exists()
    pickle.loads(content)  # it would have
    assert made.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n(S'x'\ntR.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
    ],
)
def test_names_past_arrays_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(DataError, match="it names"):
        load_plain_pickle(tmp_path / "batch")


@pytest.mark.parametrize("content", [b"", b"not a pickle\nat all", pickle.dumps(HELD, protocol=2)[:-20]])
def test_damage_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(DataError, match="get it anew") as error:
        load_plain_pickle(tmp_path / "batch")
    assert "\n" not in str(error.value)
