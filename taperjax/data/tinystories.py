"""TinyStories as a TFDS data set without TensorFlow, and its download.

TinyStories: Eldan and Li, 2023, arXiv:2305.07759; the text is under
CDLA-Sharing-1.0. Importing this module imports tensorflow-datasets.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import tensorflow_datasets as tfds

from taperjax.data import files, text
from taperjax.errors import UserError

URL = (
  "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
  "5485261731eaac25dd8e5ebbc3839d0a9870b185/"
)
# The official files by version and split: name and sha256.
FILES = {
  "v1": {
    "train": (
      "TinyStories-train.txt",
      "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f",
    ),
    "validation": (
      "TinyStories-valid.txt",
      "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4",
    ),
  },
  "v2": {
    "train": (
      "TinyStoriesV2-GPT4-train.txt",
      "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443",
    ),
    "validation": (
      "TinyStoriesV2-GPT4-valid.txt",
      "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d",
    ),
  },
}


class TinyStories(tfds.core.GeneratorBasedBuilder):
  """Stories in the order of the official files, one text feature each."""

  VERSION = tfds.core.Version("1.0.0")
  BUILDER_CONFIGS = [
    tfds.core.BuilderConfig(name=version, description=f"Official {version}.")
    for version in FILES
  ]
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    f"Put the files of a version, {FILES}, from {URL} into manual_dir."
  )

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Short stories in the words of a small child.",
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      homepage="https://huggingface.co/datasets/roneneldan/TinyStories",
      disable_shuffling=True,  # keep the order of the file
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    return {
      split: self._generate_examples(dl_manager.manual_dir / name)
      for split, (name, _) in FILES[self.builder_config.name].items()
    }

  def _generate_examples(self, path: os.PathLike):
    for index, document in enumerate(text.iter_documents(path)):
      yield index, {"text": document}


def fetch(folder: str | os.PathLike, version: str = "v1") -> list[pathlib.Path]:
  """Downloads the official files of a version; finished ones are kept.

  pooch checks the sha256 and shows progress, but drops a partial download:
  ours stays as `<name>.part`, and the next call goes on from its end. There
  are no retries: without a network this fails at once.

  Raises:
    UserError: no network, or a file whose sha256 is not the official one.
  """
  import pooch
  import requests

  folder = pathlib.Path(folder)
  paths = []
  for name, sha256 in FILES[version].values():
    path = folder / name
    paths.append(path)
    ways = (
      f"put {URL}{name} at {path} by hand, or set data.train and data.valid "
      "to local files"
    )
    if path.exists():
      if files.sha256_of_files([path]) != sha256:
        raise UserError(
          f"data={path} is not the official file (sha256 differs); delete it "
          "to fetch it again, or set data.train and data.valid to local files."
        )
      continue
    try:
      pooch.retrieve(
        URL + name,
        f"sha256:{sha256}",
        fname=name,
        path=folder,
        downloader=_Resume(folder / f"{name}.part"),
      )
    except requests.RequestException as error:
      raise UserError(
        f"data={path} is missing and cannot be downloaded "
        f"({type(error).__name__}); {ways}."
      ) from error
    except ValueError as error:  # pooch: the hash differs
      raise UserError(
        f"data={path} was downloaded with a wrong sha256 and dropped; try "
        f"again, or {ways}."
      ) from error
  return paths


class _Resume:
  """A pooch downloader that appends to a .part file, which outlives errors.

  A server that sends the whole file for a range starts it over; one that has
  nothing behind the range (416) leaves the .part to its hash.
  """

  def __init__(self, part: pathlib.Path):
    self.part = part

  def __call__(self, url: str, output_file: str, pooch_) -> None:
    import pooch
    import requests

    with self.part.open("ab") as file:
      start = file.tell()

      def start_over(response, **kwargs):
        if response.status_code == 200:
          file.truncate(0)

      headers = {"Accept-Encoding": "identity"}
      if start:
        headers["Range"] = f"bytes={start}-"
      download = pooch.HTTPDownloader(
        progressbar=True,
        chunk_size=1 << 20,
        headers=headers,
        timeout=(5, 60),
        hooks={"response": start_over},
      )
      try:
        download(url, file, pooch_)
      except requests.HTTPError as error:
        if not start or error.response.status_code != 416:
          raise
    os.replace(self.part, output_file)  # a wrong one is dropped by its hash


def source(folder: pathlib.Path, version: str, split: str) -> text.Source:
  """TinyStories through TFDS, fetched and built in `folder` on first use."""
  data_dir, manual_dir = folder / "tfds", folder / "tinystories"
  name = f"{TinyStories.name}/{version}/{TinyStories.VERSION}"
  if not (data_dir / name / "dataset_info.json").exists():
    fetch(manual_dir, version)
  builder = TinyStories(
    config=version, data_dir=data_dir, file_format="array_record"
  )
  if not builder.is_prepared():
    builder.download_and_prepare(
      download_config=tfds.download.DownloadConfig(manual_dir=manual_dir)
    )
  return _source(f"tinystories-{version}/{split}", builder, split)


def tfds_source(
  spec: str, data_dir: str | os.PathLike | None = None
) -> text.Source:
  """The source "tfds:NAME/SPLIT"; NAME may hold a config, as in TFDS."""
  name, _, split = spec.removeprefix("tfds:").rpartition("/")
  if not name or not split:
    raise UserError(
      f"data={spec} does not name a split; write tfds:NAME/SPLIT, for example "
      "tfds:lm1b/train."
    )
  return _source(spec, _builder(name, data_dir), split)


def tfds_documents(
  name_or_builder: str | tfds.core.DatasetBuilder,
  split: str,
  data_dir: str | os.PathLike | None = None,
) -> Iterator[str]:
  """Yields the texts of a prepared TFDS data set, in its order.

  The text is the feature "text", or else the only feature that is text.

  Raises:
    UserError: unknown, not prepared as array_record, no such split or text.
  """
  builder = name_or_builder
  if isinstance(builder, str):
    builder = _builder(builder, data_dir)
  _check_split(builder, split)
  feature = _text_feature(builder)
  records = builder.as_data_source(split)
  for start in range(0, len(records), 1024):
    group = range(start, min(start + 1024, len(records)))
    for record in records.__getitems__(list(group)):
      if document := record[feature].decode():
        yield document


def _builder(
  name: str, data_dir: str | os.PathLike | None
) -> tfds.core.DatasetBuilder:
  """A prepared builder; it is not downloaded here, that may take hours."""
  try:
    builder = tfds.builder(
      name, data_dir=data_dir, file_format="array_record", try_gcs=False
    )
  except (tfds.core.DatasetNotFoundError, ValueError, ImportError) as error:
    raise UserError(
      f"data=tfds:{name} is not a data set of tensorflow-datasets "
      f"({type(error).__name__}); check its name and config."
    ) from error
  if not builder.is_prepared():
    raise UserError(
      f"data=tfds:{name} is not prepared in {builder.data_path}; run "
      f"tfds.builder({name!r}, data_dir={data_dir and str(data_dir)!r}, "
      "file_format='array_record').download_and_prepare() once."
    )
  return builder


def _check_split(builder: tfds.core.DatasetBuilder, split: str) -> None:
  if split not in builder.info.splits:
    raise UserError(
      f"data=tfds:{builder.name} has no split {split!r}; use one of "
      f"{', '.join(builder.info.splits)}."
    )


def _text_feature(builder: tfds.core.DatasetBuilder) -> str:
  names = [
    name
    for name, feature in builder.info.features.items()
    if isinstance(feature, tfds.features.Text)
  ]
  if "text" in names:
    return "text"
  if len(names) != 1:
    raise UserError(
      f'data=tfds:{builder.name} has no feature "text" and not one text '
      f"feature, but {', '.join(builder.info.features)}; export its text to "
      "a .jsonl file."
    )
  return names[0]


def _source(
  name: str, builder: tfds.core.DatasetBuilder, split: str
) -> text.Source:
  _check_split(builder, split)
  shards = [pathlib.Path(p) for p in builder.info.splits[split].filepaths]
  return text.Source(
    name, tuple(shards), lambda: tfds_documents(builder, split)
  )
