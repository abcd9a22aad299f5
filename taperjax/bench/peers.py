"""Greedy decoding beside other programs: same weights, prompts and lengths.

A time is that of a whole call, from prompts on the host to the new ids on the
host, the prefill in it; loading and compiling are not. The others have the
model with every norm live, as `baseline` has; `unfused` and `folded` are the
same blocks without.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from taperjax import decode, model as model_lib
from taperjax.bench import roofline, stats
from taperjax.config import ModelConfig
from taperjax.data.tokenizer import ByteTokenizer
from taperjax.errors import UserError
from taperjax.interop import gguf_files, gpt2, hf_files, llama, verify

PEERS = ("jax", "transformers", "transformers-static", "llama.cpp")

Call = Callable[[], np.ndarray]  # new ids, (rows, new)


def run(
  forms: dict[str, tuple[dict, ModelConfig, float, Any]],
  peers: Sequence[str],
  *,
  batches: Sequence[int],
  prompt: int,
  new: int,
  repeats: int,
  progress: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
  """One row for each batch size; float32, all in turn after a warm-up.

  Args:
    forms: from `bench.decode.make_forms`, `baseline` among them.
    peers: of `PEERS`.
    batches: rows. prompt, new: tokens. repeats: timed rounds.
    progress: told how many rounds are done, of rows x (repeats + 1).

  Returns:
    batch, prompt, new, repeats; `programs`: per form or peer its version,
    tokens_per_s, the median, ms {median, q1, q3} of a call, and same_ids, the
    share of its ids that are those of `baseline`; `ratios`: per `peer/form` as
    `stats.paired_ratio`, above 1 where the form is faster; `missing`: why a
    peer is not there.
  """
  rows = []
  for i, batch in enumerate(batches):
    timers = {
      name: decode.GreedyTimer.make(
        params, config, gate=gate, c=c, batch_size=batch, prompt_len=prompt,
        new_tokens=new,
      )
      for name, (params, config, gate, c) in forms.items()
    }
    tokens_BP = np.array(timers["baseline"].prompts, np.int32)
    calls: dict[str, Call] = {name: t.ids for name, t in timers.items()}
    versions = dict.fromkeys(calls, verify.version("jax"))
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
      for name in peers:
        try:
          call, version = stack.enter_context(
            _PEERS[name](forms["baseline"], tokens_BP, new)
          )
          call()
        except (verify.Missing, UserError, RuntimeError) as error:
          # Not installed, not for such a model, or a fault of its compiler.
          missing[name] = verify.one_line(error)
        else:
          calls[name], versions[name] = call, version
      found, seconds = {}, {name: [] for name in calls}
      for again in range(repeats + 1):
        for name, call in calls.items():
          begin = time.perf_counter()
          found[name] = call()
          if again:
            seconds[name].append(time.perf_counter() - begin)
        progress(i * (repeats + 1) + again + 1)
    rows.append({
      "batch": batch, "prompt": prompt, "new": new, "repeats": repeats,
      "programs": {
        name: {
          "version": versions[name],
          "tokens_per_s": batch * new / stats.spread(seconds[name])["median"],
          "ms": stats.spread([1e3 * x for x in seconds[name]]),
          "same_ids": float(np.mean(found[name] == found["baseline"])),
        }
        for name in calls
      },
      "ratios": {
        f"{peer}/{form}": stats.paired_ratio(seconds[peer], seconds[form])
        for peer in calls if peer not in forms
        for form in forms
      },
      "missing": missing,
    })
  return rows


@contextlib.contextmanager
def _plain_jax(form, tokens_BP, new) -> Iterator[tuple[Call, str]]:
  """What one writes first: the Flax model looped over a full-length cache."""
  params, config, gate, _ = form
  params, config = model_lib.unstack_layers(params, config)
  apply = lambda params, *args, **options: model_lib.Transformer(config).apply(
    {"params": params}, *args, gate=gate, c=None, **options
  )

  @jax.jit
  def generate(params, tokens_BP):
    rows, length = tokens_BP.shape
    cache = model_lib.init_cache(config, rows, config.context_len)
    logits_BLV, aux = apply(params, tokens_BP, cache=cache)
    token_B = jnp.argmax(logits_BLV[:, -1], axis=-1).astype(jnp.int32)
    out_BN = jnp.zeros((rows, new), jnp.int32).at[:, 0].set(token_B)

    def step(i, carry):
      token_B, cache, out_BN = carry
      place_B1 = jnp.full((rows, 1), length + i - 1)
      logits_B1V, aux = apply(
        params, token_B[:, None], cache=cache, position_BL=place_B1
      )
      token_B = jnp.argmax(logits_B1V[:, 0], axis=-1).astype(jnp.int32)
      out_BN = out_BN.at[:, i].set(token_B)
      return token_B, aux["cache"], out_BN

    carry = (token_B, aux["cache"], out_BN)
    return jax.lax.fori_loop(1, new, step, carry)[2]

  params = jax.device_put(params)
  yield lambda: np.asarray(generate(params, tokens_BP)), verify.version("jax")


@contextlib.contextmanager
def _transformers(
  form, tokens_BP, new, static: bool = False
) -> Iterator[tuple[Call, str]]:
  """`generate` of transformers; static: its fixed cache, and torch.compile."""
  params, config, *_ = form
  config = config.replace(internal_norm="norm", final_norm="norm")
  layout = llama if config.norm == "rms" else gpt2
  tensors, hf_config = layout.to_hf(params, config)
  options = {
    "max_new_tokens": new, "do_sample": False, "pad_token_id": 0,
    "eos_token_id": None,
  }
  if static:
    options["cache_implementation"] = "static"
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    hf_files.write_folder(folder, tensors, hf_config, "float32")
    with verify.hf_model(folder, remote_code=False) as (torch, network):
      device, versions = verify.torch_device(torch)
      network = network.to(device)
      if static:
        network.forward = torch.compile(network.forward, dynamic=False)
      tokens = torch.tensor(tokens_BP, dtype=torch.long, device=device)
      ones = torch.ones_like(tokens)

      def call():
        out = network.generate(tokens, attention_mask=ones, **options)
        return out[:, tokens.shape[1] :].cpu().numpy()

      yield call, versions


@contextlib.contextmanager
def _llama_cpp(form, tokens_BP, new) -> Iterator[tuple[Call, str]]:
  """llama.cpp on our GGUF file, a sequence for each row in one context."""
  with verify.needs("llama_cpp"):
    import llama_cpp as lib
  params, config, *_ = form
  params, config = model_lib.unstack_layers(params, config)
  config = config.replace(internal_norm="norm", final_norm="norm")
  rows, length = tokens_BP.shape
  threads = roofline.cores()
  lib.llama_backend_init()
  with contextlib.ExitStack() as stack:
    # It takes the warnings of llama.cpp for errors; what fails here is told.
    logger = logging.getLogger("llama-cpp-python")
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.CRITICAL)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    path = pathlib.Path(folder) / "model.gguf"
    # Only ids go in and come out: any vocabulary that fits will do.
    gguf_files.write(
      path, params, config, ByteTokenizer(), dtype="float32", name="peer"
    )
    network = lib.llama_model_load_from_file(
      bytes(path), lib.llama_model_default_params()
    )
    if not network:
      raise RuntimeError("llama.cpp does not load our GGUF file")
    stack.callback(lib.llama_model_free, network)
    options = lib.llama_context_default_params()
    options.n_ctx = rows * (length + new)
    options.n_batch, options.n_seq_max = rows * length, rows
    options.n_threads = options.n_threads_batch = threads
    options.type_k = options.type_v = lib.GGML_TYPE_F32  # as ours
    context = lib.llama_init_from_model(network, options)
    if not context:
      raise RuntimeError(f"llama.cpp makes no context of {rows} sequences")
    stack.callback(lib.llama_free, context)
    memory = lib.llama_get_memory(context)
    prompt, step = (_llama_batch(lib, rows, n, stack) for n in (length, 1))

    def next_B(batch, tokens_BL, first):
      """The most likely token of each row, behind tokens from place `first`."""
      batch.tokens_BL[...] = tokens_BL
      batch.places_BL[...] = first + np.arange(tokens_BL.shape[1])
      if (code := lib.llama_decode(context, batch.given)) != 0:
        raise RuntimeError(f"llama_decode fails with {code}")
      logits_BV = np.ctypeslib.as_array(
        lib.llama_get_logits(context), (rows, config.vocab_size)
      )
      return logits_BV.argmax(axis=-1)

    def call():
      lib.llama_memory_clear(memory, False)
      out_BN = np.empty((rows, new), np.int32)
      out_BN[:, 0] = next_B(prompt, tokens_BP, 0)
      for i in range(1, new):
        out_BN[:, i] = next_B(step, out_BN[:, i - 1 : i], length + i - 1)
      return out_BN

    yield call, f"{verify.version('llama-cpp-python')}, {threads} threads"


class _Batch(NamedTuple):
  """A llama_batch, and arrays that share its memory."""

  given: Any
  tokens_BL: np.ndarray
  places_BL: np.ndarray


def _llama_batch(lib, rows: int, length: int, stack) -> _Batch:
  """For `length` tokens of each row; logits are asked for behind the last."""
  given = lib.llama_batch_init(rows * length, 0, 1)
  stack.callback(lib.llama_batch_free, given)
  given.n_tokens = rows * length
  for i in range(rows * length):
    given.n_seq_id[i], given.seq_id[i][0] = 1, i // length
    given.logits[i] = (i + 1) % length == 0
  shared = lambda array: np.ctypeslib.as_array(array, (rows, length))
  return _Batch(given, shared(given.token), shared(given.pos))


_PEERS = {
  "jax": _plain_jax,
  "transformers": _transformers,
  "transformers-static": lambda *args: _transformers(*args, static=True),
  "llama.cpp": _llama_cpp,
}
