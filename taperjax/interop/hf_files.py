"""Hugging Face folders: config.json and safetensors, read and written.

Nothing here knows a model: names and shapes of tensors are for the reader of
each architecture. Pickles are never opened.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from taperjax.errors import UserError
from taperjax.interop import bare

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Buffers of old GPT-2 files, which the layout skips after a look at them.
MASK = r"\.attn\.(masked_)?bias$"
HEAD = "lm_head.weight"
# Fields of config.json without effect on the logits of a language model:
# dropout, which is off outside training, precision, bookkeeping, generation,
# how the sums are cut, other heads.
_NO_EFFECT = re.compile(
  r"(resid|embd|attn)_pdrop|(attention|hidden|classifier)_dropout"
  r"|reorder_and_upcast_attn|(torch_)?dtype|initializer_range|pretraining_tp"
  r"|_?attn_implementation|_attn_implementation_autoset|use_cache"
  r"|gradient_checkpointing|architectures|transformers_version"
  r"|_name_or_path|_commit_hash|unsloth_\w+|is_llama_config"
  r"|transformers\.js_config|(bos|eos|pad|unk|sep|cls|decoder_start)_token_id"
  r"|tokenizer_class|prefix|task_specific_params|summary_\w+|id2label"
  r"|label2id|num_labels|problem_type|finetuning_task|output_past"
  r"|output_hidden_states|output_attentions|return_dict|torchscript"
  r"|use_bfloat16|is_decoder|chunk_size_feed_forward|do_sample|num_beams"
  r"|temperature|top_[kp]|max_length|min_length|repetition_penalty"
  r"|(encoder_)?no_repeat_ngram_size|length_penalty|early_stopping"
  r"|num_return_sequences|num_beam_groups|diversity_penalty|typical_p"
  r"|return_dict_in_generate|output_scores|remove_invalid_values"
  r"|tf_legacy_loss|tie_encoder_decoder|_num_labels|predict_special_tokens"
)
# As safetensors names them, and as config.json does.
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_folder(
  folder: str | os.PathLike[str],
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
  """Reads a local folder; one file or shards.

  Returns:
    config.json as a dict; the tensors by name, float32, exactly as stored; and
    the sha256 of every file that was read, by file name.

  Raises:
    UserError: a file is missing, damaged or outside the folder; a tensor of
      another dtype, or with a number that is not finite; weights in a pickle.
  """
  folder = pathlib.Path(folder)
  hf_config = read_json(folder / CONFIG)
  names = [CONFIG]
  tensors: dict[str, np.ndarray] = {}
  if (folder / INDEX).exists():
    names.append(INDEX)
  for name, wanted in _shards(folder).items():
    names.append(name)
    for tensor, value in _read_tensors(folder / name, wanted):
      if tensor in tensors:
        raise UserError(
          f"{folder / name}: tensor {tensor!r} is in another file too; keep it "
          "in one"
        )
      tensors[tensor] = value
  return hf_config, tensors, {name: sha256(folder / name) for name in names}


def stored_dtype(folder: str | os.PathLike[str]) -> str:
  """The dtype of the stored tensors; several are joined by "+"."""
  folder = pathlib.Path(folder)
  found = set()
  for name in _shards(folder):
    with _open(folder / name) as file:
      names = file.keys()
      found |= {file.get_slice(tensor).get_dtype() for tensor in names}
  return "+".join(DTYPES.get(kind, kind) for kind in sorted(found))


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object of a JSON file.

  Raises:
    UserError: no such file, or no JSON object in it; a name given twice.
  """
  check_regular(path)
  try:
    value = json.loads(path.read_bytes(), object_pairs_hook=_once)
  except OSError as error:
    raise UserError(
      f"{path} cannot be read ({error.strerror}); give a folder with it"
    ) from error
  except (ValueError, RecursionError) as error:
    raise UserError(
      f"{path} is no JSON ({error}); fetch the file again"
    ) from error
  if not isinstance(value, dict):
    raise UserError(f"{path} holds no JSON object; fetch the file again")
  return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """An object of JSON; readers differ in which of two equal names counts."""
  found = dict(pairs)
  if len(found) < len(pairs):
    [(twice, _)] = collections.Counter(n for n, _ in pairs).most_common(1)
    raise ValueError(f"{twice!r} is there twice")
  return found


def check_regular(path: pathlib.Path) -> None:
  """Raises where reading a device or a pipe would not end."""
  if path.exists() and not (path.is_file() or path.is_dir()):
    raise UserError(
      f"{path} is neither a file nor a folder; put the file itself there"
    )


def check_fields(
  fields: Mapping[str, Any], used: Collection[str], fixed: Mapping[str, bool]
) -> None:
  """Every field of config.json is used, or known to do nothing.

  Args:
    used: names that the reader honours.
    fixed: flags that must have one value, which is also that of a missing one.

  Raises:
    UserError: another field with a value in it, or another value of a flag.
  """
  for name, value in fields.items():
    empty = value is None or value == {} or value == []
    known = name in used or name in fixed or _NO_EFFECT.fullmatch(name)
    if not (known or empty):
      raise UserError(
        f"config.json: {name}={value!r} is not understood; if it has no effect "
        "on the logits, remove it"
      )
  for name, good in fixed.items():
    if fields.get(name, good) is not good:
      raise UserError(
        f"config.json: {name}={fields[name]!r} is not supported; only {good} is"
      )


def whole(fields: Mapping[str, Any], name: str) -> int:
  """A size in config.json.

  Raises:
    UserError: it is missing, or none.
  """
  value = fields.get(name)
  if type(value) is not int or not 0 < value < 2**31:
    raise UserError(
      f"{name}={value!r} in config.json must be a whole number above 0 and "
      "below 2^31; mend config.json"
    )
  return value


def number(
  fields: Mapping[str, Any],
  name: str,
  default: float | None = None,
  least: float = 0.0,
) -> float:
  """A number in config.json that float32 holds.

  Raises:
    UserError: it is missing without a default, or none, or below `least`.
  """
  value = fields.get(name, default)
  if (
    type(value) not in (int, float)
    or not max(least, 2**-126) <= value < 2**127
  ):
    rule = f"of {least:g} or more" if least else "above 0"
    raise UserError(
      f"{name}={value!r} in config.json must be a finite number {rule} that "
      "float32 holds; mend config.json"
    )
  return float(value)


def sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _shards(folder: pathlib.Path) -> dict[str, set[str] | None]:
  """File name -> the tensors that the index sees in it; None without index."""
  single, index = folder / WEIGHTS, folder / INDEX
  if single.exists() and index.exists():
    raise UserError(
      f"{folder} holds both {WEIGHTS} and {INDEX}; remove the one that is not "
      "meant"
    )
  if single.exists():
    return {WEIGHTS: None}
  if not index.exists():
    raise UserError(_no_weights(folder))
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise UserError(f"{index} has no weight_map; fetch the file again")
  shards: dict[str, set[str] | None] = {}
  for tensor, name in weight_map.items():
    if not isinstance(name, str) or pathlib.PurePath(name).name != name:
      raise UserError(
        f"{index}: tensor {tensor!r} is said to lie in {name!r}, which is no "
        "file name of this folder; fetch the file again"
      )
    if not name.endswith(".safetensors"):
      raise UserError(
        f"{index}: tensor {tensor!r} is said to lie in {name!r}, which is no "
        "safetensors file; convert the weights to safetensors"
      )
    if not os.path.isfile(folder / name):  # a name too long for one is none
      raise UserError(
        f"{index}: {name!r} does not exist in {folder}; fetch that file"
      )
    shards.setdefault(name, set()).add(tensor)
  return shards


def _no_weights(folder: pathlib.Path) -> str:
  try:
    there = sorted(path.name for path in folder.iterdir())
  except OSError as error:
    return f"{folder} cannot be read ({error.strerror}); give another folder"
  for name in there:
    if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")):
      return (
        f"{folder / name} holds pickled weights, which are never opened; "
        "convert them to safetensors"
      )
  return f"{folder} holds no {WEIGHTS}; give a folder with it"


def _open(path: pathlib.Path):
  """A safetensors file, its header checked by the library."""
  from safetensors import SafetensorError, safe_open

  check_regular(path)
  try:
    return safe_open(path, framework="numpy")
  except (SafetensorError, OSError, ValueError) as error:
    raise UserError(
      f"{path} is damaged or no safetensors file ({error}); fetch it again"
    ) from error


def _read_tensors(
  path: pathlib.Path, wanted: set[str] | None
) -> Iterator[tuple[str, np.ndarray]]:
  """(name, float32 array) of every tensor, which must be those wanted."""
  with _open(path) as file:
    names = sorted(file.keys())
    if wanted is not None:
      for name in sorted(wanted ^ set(names)):
        fault = "does not hold" if name in wanted else "holds"
        raise UserError(
          f"{path} {fault} tensor {name!r}, against {INDEX}; fetch both again"
        )
    for name in names:
      kind = file.get_slice(name).get_dtype()
      mask = kind in ("BOOL", "U8") and re.search(MASK, name)
      if kind not in DTYPES and not mask:
        raise UserError(
          f"{path}: tensor {name!r} has dtype {kind}; understood are "
          f"{', '.join(DTYPES)}: convert it to one of them"
        )
      value = np.ascontiguousarray(file.get_tensor(name).astype(np.float32))
      if not np.isfinite(value).all():
        raise UserError(
          f"{path}: tensor {name!r} holds numbers that are not finite; fetch "
          "the file again"
        )
      yield name, value


def write_folder(
  folder: str | os.PathLike[str],
  tensors: Mapping[str, np.ndarray],
  hf_config: Mapping[str, Any],
  dtype: str,
) -> None:
  """Writes model.safetensors and config.json, the weights cast once.

  Args:
    folder: made if it is not there.
    tensors: float32, by their names in the file.
    hf_config: written with `dtype` and, for older readers, `torch_dtype`.
    dtype: "float32", "bfloat16" or "float16".

  Raises:
    UserError: a number leaves the dtype; a tied model with a head of its own,
      or an untied one without; a folder that cannot be written.
  """
  folder = pathlib.Path(folder)
  tied = hf_config.get("tie_word_embeddings")
  if tied is None:
    raise ValueError("hf_config must say whether tie_word_embeddings")
  if tied == (HEAD in tensors):
    fault = "present" if tied else "missing"
    raise UserError(
      f"tie_word_embeddings={tied} and {HEAD} is {fault}; change one of them"
    )
  cast = bare.cast(tensors, dtype)
  written = {**hf_config, "dtype": dtype, "torch_dtype": dtype}
  try:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(
      json.dumps(written, indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    bare.save(folder / WEIGHTS, cast, framework="pt")
  except OSError as error:
    raise UserError(
      f"{folder} cannot be written ({error.strerror}); choose a writable folder"
    ) from error
