"""Documents from files, and the faults that files have."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from taperjax.data import files, text
from taperjax.errors import UserError


def read(path, content: bytes) -> list[str]:
  path.write_bytes(content)
  return list(text.iter_documents(path))


@pytest.mark.parametrize(
  "content, documents",
  [
    ("one\n<|endoftext|>\ntwo\n<|endoftext|>\n", ["one", "two"]),
    ("one<|endoftext|>two", ["one", "two"]),
    ("one\r\n<|endoftext|>\r\n two \r\n", ["one", " two "]),
    ("  a\n\n\tb  \n", ["  a\n\n\tb  "]),
    ("\n<|endoftext|>\n\n<|endoftext|>x", ["x"]),
    ("\ufeffbom", ["bom"]),
    ("a <|endoftext> b", ["a <|endoftext> b"]),
  ],
)
def test_txt_documents_lie_between_separators(tmp_path, content, documents):
  """Only line breaks next to a separator go; all other blanks are text."""
  assert read(tmp_path / "a.txt", content.encode()) == documents


def test_separator_across_read_blocks_is_seen(tmp_path):
  """Files are read in blocks of 1 MiB; a cut may fall anywhere."""
  block = 1 << 20
  for cut in range(14):
    first = "é" * ((block - cut) // 2) + "y" * ((block - cut) % 2)
    content = f"{first}<|endoftext|>second"
    assert read(tmp_path / "a.txt", content.encode()) == [first, "second"]
  long = "z" * (3 * block + 5)  # a document of more than two blocks
  assert read(tmp_path / "a.txt", f"{long}<|endoftext|>b".encode()) == [
    long,
    "b",
  ]


def test_jsonl_and_parquet_texts_stay_as_they_are(tmp_path):
  texts = ["\none\n", "zwei ü", "<|endoftext|>"]
  lines = "\n\n".join(json.dumps({"text": t, "id": 1}) for t in texts)
  assert read(tmp_path / "a.jsonl", lines.encode()) == texts
  table = pyarrow.table({"id": [1, 2, 3, 4], "text": [*texts, None]})
  pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
  assert list(text.iter_documents(tmp_path / "a.parquet")) == texts


@pytest.mark.parametrize(
  "name, content, match",
  [
    ("a.csv", b"x", r"data=.*a\.csv is not a \.txt, \.jsonl or \.parquet"),
    ("a.txt", b"", r"data=.*a\.txt holds no documents"),
    ("a.txt", b"\n<|endoftext|>\n", "holds no documents"),
    ("a.txt", b"ab\0c", "not UTF-8 text: byte 0x00 at offset 2;"),
    (
      "a.txt",
      b"ab<|endoftext|>c\xff\0",
      "not UTF-8 text: byte 0xff at offset 16;",
    ),
    ("a.txt", "é".encode("latin1"), "byte 0xe9 at offset 0;"),
    ("a.jsonl", b'{"text": "a"}\n\xfe', "byte 0xfe at offset 14;"),
    ("a.jsonl", b'{"text": "a"}\n\n{"t": 1}', 'line 3 is not .* string "text"'),
    ("a.jsonl", b'{"text": 5}', "line 1 is not"),
    ("a.jsonl", b"[1]", "line 1 is not"),
    ("a.jsonl", b"{", "line 1 is not"),
    ("a.jsonl", b'{"text": "\\ud800"}', "line 1 is not"),
    ("a.jsonl", b"[" * 200_000, "line 1 is not"),
    ("a.parquet", b"PAR1 no", "cannot be read as parquet"),
    ("a.parquet", b"", "cannot be read as parquet"),
  ],
)
def test_bad_file_is_told_in_one_line(tmp_path, name, content, match):
  with pytest.raises(UserError, match=match) as info:
    read(tmp_path / name, content)
  assert "\n" not in str(info.value)


def test_missing_path_folder_and_column_are_told(tmp_path):
  with pytest.raises(UserError, match=r"no\.txt does not exist; give"):
    list(text.iter_documents(tmp_path / "no.txt"))
  (tmp_path / "d.txt").mkdir()
  with pytest.raises(UserError, match="is a folder with no text files"):
    text.file_source(tmp_path / "d.txt")
  table = pyarrow.table({"story": ["a"]})
  pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
  with pytest.raises(UserError, match='has not one column "text", but story'):
    list(text.iter_documents(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
  "values, kind",
  [([1, 2], "int64"), ([b"a"], "binary"), ([["a"]], "list<element: string>")],
)
def test_a_text_column_of_another_type_is_told(tmp_path, values, kind):
  """Numbers have no end-of-text, and a list of words no blanks."""
  path = tmp_path / "a.parquet"
  pyarrow.parquet.write_table(pyarrow.table({"text": values}), path)
  with pytest.raises(UserError, match=f'"text" of {kind}, not of strings; con'):
    list(text.iter_documents(path))


def test_offsets_of_texts_are_checked_before_they_are_followed(tmp_path):
  """pyarrow does not: it would read outside of the file."""
  lines = [f"story {i:04d}" for i in range(8)]
  table = pyarrow.table({"text": lines})
  path = tmp_path / "a.arrow"
  with pyarrow.ipc.new_stream(path, table.schema) as file:
    file.write_table(table)
  data = path.read_bytes()
  offset = (20).to_bytes(4, "little") + (30).to_bytes(4, "little")
  assert data.count(offset) == 1
  path.write_bytes(data.replace(offset, b"\xff\xff\xff\x7f" + offset[4:]))
  with pytest.raises(UserError, match="cannot be read as arrow .ArrowInvalid"):
    list(text.iter_documents(tmp_path))


@pytest.mark.parametrize("kind", ["large_string", "dictionary"])
def test_every_kind_of_string_column_is_text(tmp_path, kind):
  array = pyarrow.array(["one", "two", "one"], pyarrow.large_string())
  if kind == "dictionary":
    array = array.dictionary_encode()
  path = tmp_path / "a.parquet"
  pyarrow.parquet.write_table(pyarrow.table({"text": array}), path)
  assert list(text.iter_documents(path)) == ["one", "two", "one"]


def test_a_damaged_page_is_told(tmp_path):
  """The footer is intact, so that the fault comes with the first batch."""
  path = tmp_path / "a.parquet"
  table = pyarrow.table({"text": [f"story {i}" for i in range(2000)]})
  pyarrow.parquet.write_table(table, path, compression="gzip")
  raw = bytearray(path.read_bytes())
  raw[4:400] = bytes(396)
  path.write_bytes(raw)
  with pytest.raises(UserError, match="cannot be read as parquet .*; the file"):
    list(text.iter_documents(path))


def test_atomic_write_leaves_old_file_after_a_fault(tmp_path):
  """A half-written file must never be trusted by the next run."""
  path = tmp_path / "a.bin"
  path.write_bytes(b"old")
  with pytest.raises(RuntimeError), files.atomic_write(path) as file:
    file.write(b"half")
    raise RuntimeError
  assert path.read_bytes() == b"old"
  assert list(tmp_path.iterdir()) == [path]


def test_real_text_gives_all_its_stories(test_data):
  """The counts that the data's own notes give."""
  path = test_data / "tinystories" / "valid.txt"
  documents = list(text.iter_documents(path))
  assert len(documents) == 1221
  written = "".join(f"{d}\n<|endoftext|>\n" for d in documents)
  assert written.encode() == path.read_bytes()


def saved_dataset(folder, texts, rows=2):
  """A folder as `datasets` writes it with save_to_disk: arrow streams."""
  import pyarrow

  folder.mkdir()
  (folder / "state.json").write_text("{}")
  (folder / "dataset_info.json").write_text("{}")
  for i in range(0, len(texts), rows):
    table = pyarrow.table({"text": texts[i : i + rows], "n": [1] * rows})
    name = folder / f"data-{i:05}-of-00002.arrow"
    with pyarrow.ipc.new_stream(str(name), table.schema) as writer:
      writer.write_table(table)
  return folder


def test_a_saved_dataset_is_read_file_after_file(tmp_path):
  folder = saved_dataset(tmp_path / "set", ["a", "b\n", "c", "d"])
  assert list(text.iter_documents(folder)) == ["a", "b\n", "c", "d"]
  source = text.file_source(folder)
  assert [p.suffix for p in source.files] == [".arrow", ".arrow"]
  before = source.identity({})["source_sha256"]
  source.files[1].write_bytes(source.files[0].read_bytes())
  assert source.identity({})["source_sha256"] != before


def test_a_folder_of_text_files_is_read_in_the_order_of_names(tmp_path):
  for name in ("b", "a"):
    (tmp_path / f"{name}.txt").write_text(f"{name}1\n<|endoftext|>\n{name}2")
  (tmp_path / "README.md").write_text("no text of ours")
  assert list(text.iter_documents(tmp_path)) == ["a1", "a2", "b1", "b2"]


def test_folders_that_are_no_one_text_are_told_in_one_line(tmp_path):
  (tmp_path / "empty").mkdir()
  with pytest.raises(UserError, match="is a folder with no text files"):
    text.file_source(tmp_path / "empty")
  (tmp_path / "empty" / "a.txt").write_text("x")
  (tmp_path / "empty" / "b.jsonl").write_text("{}")
  with pytest.raises(UserError, match="files of .jsonl and .txt; give one"):
    text.file_source(tmp_path / "empty")
  splits = tmp_path / "splits"
  saved_dataset(tmp_path / "set", ["a", "b"]).rename(tmp_path / "train")
  splits.mkdir()
  (tmp_path / "train").rename(splits / "train")
  (splits / "dataset_dict.json").write_text("{}")
  with pytest.raises(UserError, match="holds the splits train; give one of"):
    text.file_source(splits)
  path = next((splits / "train").glob("*.arrow"))
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(UserError, match="cannot be read as arrow"):
    list(text.iter_documents(splits / "train"))
