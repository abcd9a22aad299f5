"""Other people's model files, in and out."""

from __future__ import annotations

import os
import pathlib

from taperjax import saved
from taperjax.data.tokenizer import Tokenizer
from taperjax.errors import UserError


def read(
  source: str | os.PathLike[str],
  *,
  gain_offset: float = 0.0,
  context_len: int | None = None,
  tokenizer: str | os.PathLike[str] | None = None,
) -> saved.Model:
  """A model of another program; the format is recognised from the files.

  Args:
    source: a Hugging Face folder (Llama, Mistral, Qwen2 or GPT-2); a GGUF file
      or a folder with one; a llama2.c checkpoint or a folder with one.
    gain_offset: added to every gain, of a Hugging Face Llama layout only.
    context_len: a shorter context than the model's own.
    tokenizer: a file in place of the one beside the model.

  Raises:
    UserError: none of these, or a model that we cannot hold exactly.
  """
  kind, path = _recognise(pathlib.Path(source))
  if gain_offset and kind != "llama":
    raise UserError(
      f"gain_offset={gain_offset} has no effect with {path}, which is no Llama "
      "layout of Hugging Face; leave it out"
    )
  if kind == "llama2c":
    from taperjax.interop import llama2c

    model = llama2c.read(path, tokenizer=tokenizer, context_len=context_len)
    return _checked(model, path)
  if kind == "gguf":
    from taperjax.interop import gguf_files

    model = gguf_files.read(path, context_len=context_len)
  elif kind == "gpt2":
    from taperjax.interop import gpt2

    model = gpt2.read(path, context_len=context_len)
  else:
    from taperjax.interop import llama

    model = llama.read(
      path, gain_offset=gain_offset, context_len=context_len
    )
  if tokenizer is not None:
    from taperjax.data import tokenizer as tokenizer_lib

    found = tokenizer_lib.load_tokenizer(tokenizer)
    model = _with_tokenizer(model, found, pathlib.Path(tokenizer))
  elif kind != "gguf":
    from taperjax.interop import tokenizer_files

    found = tokenizer_files.from_hf_folder(path)
    model = _with_tokenizer(model, found, path / "tokenizer.json")
  return _checked(model, path)


def _with_tokenizer(
  model: saved.Model, tokenizer: Tokenizer | None, path: pathlib.Path
) -> saved.Model:
  """The model with its tokenizer, whose file is among those of the source."""
  from taperjax.interop import hf_files

  source = dict(model.meta["source"])
  if tokenizer is not None and path.is_file():
    source["files"] = {**source["files"], path.name: hf_files.sha256(path)}
  return model.replace(tokenizer=tokenizer, meta={"source": source})


REPOSITORY = r"[\w-][\w.-]*/[\w-][\w.-]*"  # owner/name on the hub


def fetch(name: str, folder: pathlib.Path) -> pathlib.Path:
  """Downloads a Hugging Face repository into a folder, weights as safetensors.

  Args:
    name: owner/name. folder: made if needed; the files come here, but the
      library may keep a cache of its own.

  Raises:
    UserError: the extra is not installed, no network, or no such repository.
  """
  try:
    import huggingface_hub
  except ImportError as error:
    raise UserError(
      f"{name} is no folder here, and huggingface_hub, which fetches "
      "repositories, is not installed; pip install 'taperjax[hub]', or give a "
      "folder"
    ) from error
  try:
    huggingface_hub.snapshot_download(
      name,
      local_dir=folder,
      allow_patterns=["*.json", "*.safetensors"],
      ignore_patterns=["*/*"],
    )
  except Exception as error:  # its own errors, those of requests, of the system
    raise UserError(
      f"{name} is no folder here, and cannot be fetched from the Hugging Face "
      f"hub ({type(error).__name__}); check the name and the network, or give "
      "a folder"
    ) from error
  return folder


def _checked(model: saved.Model, path: pathlib.Path) -> saved.Model:
  """The same, if every id of its tokenizer has an embedding."""
  tokenizer, size = model.tokenizer, model.config.vocab_size
  if tokenizer is not None and tokenizer.vocab_size > size:
    raise UserError(
      f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model in "
      f"{path} only {size:,}; give the tokenizer that belongs to it"
    )
  return model


def _recognise(source: pathlib.Path) -> tuple[str, pathlib.Path]:
  """(kind, folder or file) of "llama", "gpt2", "gguf" and "llama2c"."""
  if not source.exists():
    raise UserError(f"{source} does not exist; give a file or a folder")
  if source.is_file():
    return _recognise_file(source)
  if (source / "config.json").exists():
    from taperjax.interop import hf_files

    hf_config = hf_files.read_json(source / "config.json")
    if "model_type" not in hf_config:
      raise UserError(
        f"{source / 'config.json'} has no model_type, so it is not of Hugging "
        "Face (a run of taperjax needs no import); give another folder"
      )
    return "gpt2" if hf_config["model_type"] == "gpt2" else "llama", source
  found = sorted(source.glob("*.gguf"))
  if not found:
    from taperjax.interop import llama2c

    tokenizers = llama2c.tokenizers_in(source)
    found = [p for p in sorted(source.glob("*.bin")) if p not in tokenizers]
  if len(found) > 1:
    raise UserError(
      f"{source} holds several models, {', '.join(p.name for p in found)}; "
      "give one of these files"
    )
  if not found:
    raise UserError(
      f"{source} holds no model that is understood: neither config.json with "
      "safetensors, nor one .gguf, nor one llama2.c .bin; give another folder"
    )
  return _recognise_file(found[0])


def _recognise_file(path: pathlib.Path) -> tuple[str, pathlib.Path]:
  try:
    with path.open("rb") as file:
      magic = file.read(4)
  except OSError as error:
    raise UserError(
      f"{path} cannot be read ({error.strerror}); give a readable file"
    ) from error
  if magic == b"GGUF":
    return "gguf", path
  if path.suffix == ".bin":
    return "llama2c", path
  if path.suffix in (".safetensors", ".json"):
    raise UserError(
      f"{path} is one file of a Hugging Face folder; give the folder with "
      "config.json"
    )
  raise UserError(
    f"{path} is neither a GGUF file nor a llama2.c .bin; give one of these, or "
    "a Hugging Face folder with safetensors"
  )
