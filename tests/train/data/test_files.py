"""Files of rows: which are found, and where each row stands."""

import gzip
import json
import sys

import pytest

from train.data.files import find_files, read_rows

ROWS = [{"n": 1}, {"n": "\u2028 is no end of a line"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def test_directories_give_their_data_files_by_name(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.parquet", "README.md"):
        (tmp_path / name).touch()
    names = [str(f.relative_to(tmp_path)) for f in find_files([tmp_path / "b.jsonl", tmp_path])]
    assert names == ["b.jsonl", "a.jsonl.gz", "b.jsonl", "sub/c.parquet"]


def test_what_is_not_there_or_of_another_kind_is_refused(tmp_path):
    for name in ("owner/name", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"{name} .*hf download OWNER/NAME"):
            find_files([name])
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a\.csv'\] are not \.jsonl, \.jsonl\.gz, \.parquet; convert them"):
        find_files([tmp_path / "a.csv"])


def test_lines_and_packed_lines_are_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n" + LINES, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    a, b = find_files([tmp_path])
    assert list(read_rows([a, b])) == [(f"{f}:{n}", row) for f, n in ((a, 2), (b, 1)) for n, row in enumerate(ROWS, n)]


@pytest.mark.parametrize(("line", "says"), [("{", "is no JSON"), ("3", "is 3, expected a JSON object")])
def test_a_line_that_is_no_object_is_named(tmp_path, line, says):
    (tmp_path / "a.jsonl").write_text(LINES + line, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"a\.jsonl:3 {says}"):
        list(read_rows([tmp_path / "a.jsonl"]))


def test_parquet_rows_lack_what_is_null(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "calls": [{"a": 1}]}], "n": 1},
        {"n": 2},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert list(read_rows([path])) == [(f"{path}:{number}", row) for number, row in enumerate(rows, 1)]
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="is no whole Parquet file"):
        list(read_rows([path]))


def test_parquet_without_its_package_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="needs pyarrow: pip install pyarrow, or convert"):
        list(read_rows([tmp_path / "a.parquet"]))
