"""TinyStories through TFDS, offline: the text files are written here."""

import hashlib
import http.server
import subprocess
import sys
import threading

import numpy as np
import pytest
import requests
import tensorflow_datasets as tfds

from taperjax import data
from taperjax.data import tinystories
from taperjax.errors import UserError

TRAIN = [f"Story {i}.\nIt has ü  and two lines." for i in range(30)]
VALID = ["A valid story.", "Another one."]


def write(path, documents):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(f"{d}\n<|endoftext|>\n" for d in documents))
  return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def official(tmp_path, monkeypatch):
  """Small files under the official names, as if fetched; their folder."""
  folder = tmp_path / "data" / "tinystories"
  names = {split: name for split, (name, _) in tinystories.FILES["v1"].items()}
  files = {
    split: (name, write(folder / name, documents))
    for (split, name), documents in zip(
      names.items(), (TRAIN, VALID), strict=True
    )
  }
  monkeypatch.setitem(tinystories.FILES, "v1", files)
  return folder


@pytest.fixture
def no_network(monkeypatch):
  calls = []

  def get(url, **kwargs):
    calls.append(url)
    raise requests.ConnectionError("no network")

  monkeypatch.setattr(requests, "get", get)
  return calls


class Server(http.server.BaseHTTPRequestHandler):
  """Serves `content`, from a range on; stops after `limit` bytes.

  `whole` ignores ranges, as a server may.
  """

  content, limit, ranges, whole = b"", None, [], False

  def do_GET(self):
    asked = self.headers.get("Range")
    Server.ranges.append(asked)
    ranged = asked and not Server.whole
    start = int(asked.split("=")[1].rstrip("-")) if ranged else 0
    body = Server.content[start:]
    self.send_response(200 if not ranged else 206 if body else 416)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body[: Server.limit])

  def log_message(self, *args):
    pass


@pytest.fixture
def server(monkeypatch):
  """A local server in place of the hub, with one file of 3 MB to serve."""
  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    Server.content = b"0123456789" * 300_000
    Server.limit, Server.ranges, Server.whole = None, [], False
    sha256 = hashlib.sha256(Server.content).hexdigest()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(
      tinystories, "URL", f"http://127.0.0.1:{httpd.server_port}/"
    )
    monkeypatch.setitem(
      tinystories.FILES, "v1", {"train": ("stories.txt", sha256)}
    )
    yield Server
    httpd.shutdown()
    thread.join()


def load(folder, **kwargs):
  settings = {
    "train": "tinystories",
    "valid": "tinystories",
    "tokenizer": "bytes",
    "vocab_size": 257,
    "seed": 0,
    "corpus_stories": 10,
    "log": print,
  }
  return data.load_data(folder=folder, **{**settings, **kwargs})


def test_builder_keeps_stories_and_order(official):
  """Hash order, TFDS's default, would make runs depend on its version."""
  builder = tinystories.TinyStories(
    config="v1", data_dir=official.parent / "d", file_format="array_record"
  )
  builder.download_and_prepare(
    download_config=tfds.download.DownloadConfig(manual_dir=official)
  )
  found = tinystories.tfds_documents(builder, "train")
  assert list(found) == TRAIN
  by_name = tinystories.tfds_documents(
    "tiny_stories/v1", "validation", official.parent / "d"
  )
  assert list(by_name) == VALID


def test_config_value_tinystories_gives_tokens(official, no_network):
  found = load(official.parent)
  text = found.tokenizer.decode(found.train.tokens[:])
  assert text == "".join(TRAIN)
  assert found.valid.meta["num_documents"] == len(VALID)
  assert found.train.meta["source"] == "tinystories-v1/train"
  (official / "TinyStories-train.txt").unlink()  # built: no longer needed
  assert load(official.parent).hashes == found.hashes
  assert no_network == []


def test_no_tensorflow_is_imported(tmp_path):
  code = (
    "import sys; from taperjax.data import tinystories;"
    "sys.exit(int('tensorflow' in sys.modules or 'torch' in sys.modules))"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_no_network_is_one_line_with_two_ways(tmp_path, no_network):
  """And it fails at once: one attempt, no retries."""
  with pytest.raises(UserError) as info:
    load(tmp_path)
  message = str(info.value)
  path = tmp_path / "tinystories" / "TinyStories-train.txt"
  assert "\n" not in message
  assert f"data={path} is missing and cannot be downloaded" in message
  assert f"{tinystories.URL}TinyStories-train.txt at {path} by hand" in message
  assert "or set data.train and data.valid to local files" in message
  assert len(no_network) == 1


def test_finished_download_is_never_fetched_again(server, tmp_path):
  (path,) = tinystories.fetch(tmp_path)
  assert path.read_bytes() == server.content
  assert tinystories.fetch(tmp_path) == [path]
  assert server.ranges == [None]
  assert list(tmp_path.iterdir()) == [path]


def test_broken_download_goes_on_where_it_stopped(server, tmp_path):
  """The training file has 1.9 GB; starting over would be cruel."""
  server.limit = 2_500_000
  with pytest.raises(UserError, match="is missing and cannot be downloaded"):
    tinystories.fetch(tmp_path)
  part = tmp_path / "stories.txt.part"
  kept = part.stat().st_size
  assert kept >= 1 << 20
  server.limit = None
  (path,) = tinystories.fetch(tmp_path)
  assert path.read_bytes() == server.content
  assert server.ranges == [None, f"bytes={kept}-"]
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("changed", [False, True])
def test_a_complete_part_is_checked_and_not_asked_for_again(
  server, tmp_path, changed
):
  """Killed before it got its name: the server has nothing behind it (416)."""
  part = tmp_path / "stories.txt.part"
  part.write_bytes(server.content[:-1] + b"?" if changed else server.content)
  if changed:
    with pytest.raises(UserError, match="with a wrong sha256 and dropped"):
      tinystories.fetch(tmp_path)
  (path,) = tinystories.fetch(tmp_path)
  assert path.read_bytes() == server.content
  assert server.ranges == ["bytes=3000000-", *[None] * changed]


def test_a_server_without_ranges_starts_over(server, tmp_path):
  """It answers 200 with the whole file, which must not follow the part."""
  server.whole = True
  (tmp_path / "stories.txt.part").write_bytes(server.content[:1000])
  (path,) = tinystories.fetch(tmp_path)
  assert path.read_bytes() == server.content
  assert server.ranges == ["bytes=1000-"]


def test_wrong_download_is_dropped(server, tmp_path):
  server.content = b"something else"
  with pytest.raises(UserError, match="with a wrong sha256 and dropped; try"):
    tinystories.fetch(tmp_path)
  assert list(tmp_path.iterdir()) == []


def test_other_file_under_the_official_name_is_kept_and_told(server, tmp_path):
  """It may be the user's own work: never overwritten."""
  (tmp_path / "stories.txt").write_text("mine")
  with pytest.raises(UserError, match="not the official file .sha256 differs"):
    tinystories.fetch(tmp_path)
  assert (tmp_path / "stories.txt").read_text() == "mine"
  assert server.ranges == []


class _Reviews(tfds.core.GeneratorBasedBuilder):
  """A data set whose one text feature has another name."""

  name = "reviews"
  VERSION = tfds.core.Version("1.0.0")
  features = {
    "review": tfds.features.Text(),
    "n": tfds.features.Scalar(np.int32),
  }

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.FeaturesDict(self.features),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager):
    return {"test": self._generate_examples()}

  def _generate_examples(self):
    for i in range(3):
      yield i, {key: f"r{i}" if key != "n" else i for key in self.features}


class _TwoTexts(_Reviews):
  name = "two_texts"
  features = {"a": tfds.features.Text(), "b": tfds.features.Text()}


@pytest.fixture
def tfds_folder(tmp_path):
  for cls in (_Reviews, _TwoTexts):
    cls(data_dir=tmp_path, file_format="array_record").download_and_prepare()
  return tmp_path


def test_any_prepared_tfds_text_can_be_a_source(tfds_folder):
  source = tinystories.tfds_source("tfds:reviews/test", tfds_folder)
  assert list(source.documents()) == ["r0", "r1", "r2"]
  assert source.name == "tfds:reviews/test"
  assert source.files
  assert all(path.is_file() for path in source.files)


@pytest.mark.parametrize(
  "spec, match",
  [
    ("tfds:reviews", "does not name a split; write tfds:NAME/SPLIT"),
    ("tfds:reviews/train", "has no split 'train'; use one of test"),
    ("tfds:no_such_set/train", "is not a data set of tensorflow-datasets"),
    ("tfds:tiny_stories/v2/train", "is not prepared in .*; run tfds.builder"),
    ("tfds:two_texts/test", 'has no feature "text" .* but a, b; export'),
  ],
)
def test_bad_tfds_name_is_told(tfds_folder, spec, match):
  with pytest.raises(UserError, match=match) as info:
    list(tinystories.tfds_source(spec, tfds_folder).documents())
  assert "\n" not in str(info.value)
