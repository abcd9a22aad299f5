"""Text generation: prefill, then a loop on the device over a static KV cache.

Axes: B rows, P padded prompt length, M cache length, V vocabulary. A slot of
the cache is a position, and a query sees the slots up to its own, so prompts
padded on the right need no mask: what padding wrote is overwritten before it
is seen, and each row decodes as it would alone.

A call is one compiled program, `_whole`: `_start` fills the cache, `_extend`
generates up to a step that is an argument; a stream calls the two apart. They
are cached by their static shapes (rows, P in multiples of 32, M - P of 64),
the configuration and the branch of the gate, so a second call of the same
bucket compiles nothing. A step reads the filled part of the cache and little
more, see `_lengths`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from taperjax import int8, model, packing
from taperjax.config import ModelConfig, site_names
from taperjax.errors import UserError

BUCKET = 64  # slots behind the prompt are rounded up to a multiple of it
PROMPT_BUCKET = 32  # prompts are: the prefill computes their padding too
GROWTH = 1.5  # of what a step reads, but for the last; each is compiled apart
MIN_TEMPERATURE = 1e-6  # below, logits / temperature leaves float32


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How the next token is chosen.

  Attributes:
    temperature: 0 takes the most likely token (greedy); otherwise the logits
      are divided by it.
    top_k: only the k most likely tokens, exactly k of them; 0 for all.
    top_p: of those, the fewest most likely whose probabilities (after
      temperature and top_k) reach p; 1.0 for all.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    heat = self.temperature
    if not math.isfinite(heat) or heat < 0 or 0 < heat < MIN_TEMPERATURE:
      raise UserError(
        f"temperature={heat} must be 0 (greedy) or at least {MIN_TEMPERATURE}; "
        "for example 0.8"
      )
    if self.top_k < 0 or self.top_k != int(self.top_k):
      raise UserError(
        f"top_k={self.top_k} must be a whole number, not below 0; 0 keeps all "
        "tokens"
      )
    if not 0 < self.top_p <= 1:
      raise UserError(
        f"top_p={self.top_p} must be above 0 and at most 1; 1.0 keeps all "
        "tokens"
      )
    for name, off in (("top_k", 0), ("top_p", 1)):
      if heat == 0 and getattr(self, name) != off:
        raise UserError(
          f"{name}={getattr(self, name)} has no effect with temperature=0 "
          f"(greedy); raise temperature, or leave {name} at {off}"
        )

  @property
  def kind(self) -> str:
    """The code path: what it does not need is not compiled."""
    if self.temperature == 0:
      return "greedy"
    return "filtered" if self.top_k or self.top_p < 1 else "plain"


@flax.struct.dataclass
class _State:
  """What the loop carries; donated from call to call.

  Attributes:
    cache: keys and values of all positions before `position_B`.
    token_B, position_B: the last token, not yet in the cache, and its place.
    out_BM: generated tokens; column i is generation step i.
    count: steps done. kept_B: tokens before a stop. done_B: has stopped.
  """

  cache: model.Cache
  token_B: jax.Array
  position_B: jax.Array
  out_BM: jax.Array
  count: jax.Array
  kept_B: jax.Array
  done_B: jax.Array


@flax.struct.dataclass
class _Draw:
  """Arguments of sampling, all traced.

  Attributes:
    key: from the seed. row_B: index of each row in its keys.
    offset_B: tokens of the text before the row's slot 0 (see `window`).
    stop_S: ids that end a row; -1 where there is none.
  """

  key: jax.Array
  row_B: jax.Array
  offset_B: jax.Array
  temperature: jax.Array
  top_k: jax.Array
  top_p: jax.Array
  stop_S: jax.Array


def sample(
  logits_BV: jax.Array, keys_B: jax.Array, sampling: Any, kind: str
) -> jax.Array:
  """The next token of each row, int32.

  Args:
    logits_BV: float32.
    keys_B: one random key for each row; unused when greedy.
    sampling: temperature, top_k and top_p as attributes; arrays will do.
    kind: "greedy", "plain" or "filtered", see `Sampling.kind`.
  """
  if kind == "greedy":
    return _argmax(logits_BV)
  # The largest becomes 0, so a small temperature makes -inf, never inf.
  top_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  logits_BV = (logits_BV - top_B1) / sampling.temperature
  if kind == "plain":
    return _categorical(keys_B, logits_BV)
  size = logits_BV.shape[-1]
  ids_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
  # Stable: of equal logits the smaller id counts as more likely, as in argmax.
  falling_BV, ids_BV = jax.lax.sort(
    (-logits_BV, ids_BV), dimension=1, is_stable=True, num_keys=1
  )
  top_k = jnp.where(sampling.top_k > 0, sampling.top_k, size)
  kept_BV = jnp.arange(size)[None, :] < top_k
  sorted_BV = jnp.where(kept_BV, -falling_BV, -jnp.inf)
  p_BV = jax.nn.softmax(sorted_BV, axis=-1)
  before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
  # Rounding of the sum must not cut the tail when all of it is wanted.
  kept_BV = (before_BV < sampling.top_p) | (sampling.top_p >= 1)
  rank_B = _categorical(keys_B, jnp.where(kept_BV, sorted_BV, -jnp.inf))
  return jnp.take_along_axis(ids_BV, rank_B[:, None], axis=1)[:, 0]


def _categorical(keys_B, logits_BV):
  """The ids of jax.random.categorical, but for its slow argmax."""
  noise = lambda key: jax.random.gumbel(key, logits_BV.shape[1:])
  return _argmax(logits_BV + jax.vmap(noise)(keys_B))


def _argmax(logits_BV: jax.Array) -> jax.Array:
  """jnp.argmax by the largest of each block, then within the first best block.

  XLA makes vector code of a plain maximum, but not of the search for its place,
  nor of the reduction over pairs in jnp.argmax: so the search is among the C
  blocks, and the V / C logits of one. A row with a NaN gives some id.
  """
  batch, size = logits_BV.shape
  count = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
  logits_BCX = logits_BV.reshape(batch, count, -1)
  block_B = _first_top(jnp.max(logits_BCX, axis=-1))
  logits_BX = jnp.take_along_axis(
    logits_BCX, block_B[:, None, None], axis=1, mode="promise_in_bounds"
  )[:, 0]
  return block_B * (size // count) + _first_top(logits_BX)


def _first_top(x_BN):
  """Place of the largest, the first of equal ones."""
  top_B1 = jnp.max(x_BN, axis=-1, keepdims=True)
  ids_BN = jax.lax.broadcasted_iota(jnp.int32, x_BN.shape, 1)
  last = x_BN.shape[-1] - 1
  return jnp.min(jnp.where(x_BN == top_B1, ids_BN, last), axis=-1)


@functools.partial(jax.jit, static_argnames=("config", "fixed", "size"))
def _start(
  params, gate, c, tokens_BP, length_B, done_B, *, config, fixed, size
) -> _State:
  """Fills a cache of `size` slots from the padded prompts.

  The last prompt token is fed again by the first step of `_extend`, which
  writes the same keys and values: so the prefill needs no logits at all.
  """
  batch, padded = tokens_BP.shape
  _, aux = model.Transformer(config).apply(
    {"params": params},
    tokens_BP,
    gate=gate if fixed is None else fixed,
    c=c,
    cache=model.init_cache(config, batch, padded),
    output="hidden",
  )
  last_B1 = (length_B - 1)[:, None]
  return _State(
    cache=jax.tree.map(
      lambda x_BMGK: jnp.pad(
        x_BMGK, ((0, 0), (0, size - padded), (0, 0), (0, 0))
      ),
      aux["cache"],
    ),
    token_B=jnp.take_along_axis(tokens_BP, last_B1, axis=1)[:, 0],
    position_B=length_B - 1,
    out_BM=jnp.zeros((batch, size), jnp.int32),
    count=jnp.int32(0),
    kept_B=jnp.zeros((batch,), jnp.int32),
    done_B=done_B,
  )


def _lengths(padded: int, size: int) -> list[int]:
  """Slots that the steps read, one length after another, up to `size`.

  The first has a bucket behind the padded prompt, each of the next is at least
  GROWTH times the one before, and none exceeds `size`.
  """
  lengths = [min(padded + BUCKET, size)]
  while lengths[-1] < size:
    longer = _round_up(math.ceil(lengths[-1] * GROWTH))
    lengths.append(min(longer, size))
  return lengths


@functools.partial(
  jax.jit, static_argnames=("config", "fixed", "kind", "length"),
  donate_argnums=0,
)
def _extend(
  state: _State, params, gate, c, draw: _Draw, until, *, config, fixed, kind,
  length,
) -> _State:
  """Generates until step `until`, a full `length`, or the end of every row.

  The loop holds the first `length` slots of the cache alone. params are packed,
  but of a FakeLN run; packed, these slots are in another order within, see
  `packing.enter`.
  """
  gate = gate if fixed is None else fixed
  packed = packing.packs(config)

  def logits_of(state):
    if packed:
      return packing.step(
        params, config, state.token_B, state.position_B, state.cache,
        gate=gate, c=c,
      )
    logits_B1V, aux = model.Transformer(config).apply(
      {"params": params},
      state.token_B[:, None],
      gate=gate,
      c=c,
      cache=state.cache,
      position_BL=state.position_B[:, None],
    )
    return logits_B1V[:, 0], aux["cache"]

  def going(state):
    room = jnp.max(state.position_B) < length
    return room & (state.count < until) & ~jnp.all(state.done_B)

  def step(state):
    logits_BV, cache = logits_of(state)
    keys_B = None
    if kind != "greedy":
      keys_B = jax.vmap(
        lambda row, place: jax.random.fold_in(
          jax.random.fold_in(draw.key, row), place
        )
      )(draw.row_B, draw.offset_B + state.position_B + 1)
    token_B = sample(logits_BV, keys_B, draw, kind)
    stops_B = jnp.any(token_B[:, None] == draw.stop_S[None, :], axis=1)
    done_B = state.done_B | stops_B
    return _State(
      cache=cache,
      token_B=token_B,
      position_B=state.position_B + 1,
      out_BM=jax.lax.dynamic_update_slice(
        state.out_BM, token_B[:, None], (0, state.count)
      ),
      count=state.count + 1,
      kept_B=state.kept_B + ~done_B,
      done_B=done_B,
    )

  size = state.cache[0][0].shape[1]
  part = jax.tree.map(lambda x_BMGK: x_BMGK[:, :length], state.cache)
  if packed:
    part = packing.enter(part, state.position_B)
  state = jax.lax.while_loop(going, step, state.replace(cache=part))
  part = state.cache
  if packed:
    order = packing.order_of(config.head_dim, length)
    part = packing.leave(part, state.position_B, order)
  # Nothing is written behind `length` yet: zeros, not the old cache kept alive.
  rest = ((0, 0), (0, size - length), (0, 0), (0, 0))
  cache = jax.tree.map(lambda x_BMGK: jnp.pad(x_BMGK, rest), part)
  return state.replace(cache=cache)


@functools.partial(jax.jit, static_argnames=("config", "fixed", "kind", "size"))
def _whole(
  params, packed, gate, c, tokens_BP, length_B, done_B, draw: _Draw, until, *,
  config, fixed, kind, size,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Prefill and loop in one program; out_BM, kept_B and done_B of `_State`."""
  state = _start(
    params, gate, c, tokens_BP, length_B, done_B, config=config, fixed=fixed,
    size=size,
  )
  for length in _lengths(tokens_BP.shape[1], size):
    state = _extend(
      state, packed, gate, c, draw, until, config=config, fixed=fixed,
      kind=kind, length=length,
    )
  return state.out_BM, state.kept_B, state.done_B


@dataclasses.dataclass(frozen=True)
class _Decoder:
  """A model made ready: layers unstacked, the branch of its gate chosen."""

  params: dict
  packed: dict  # what the loop reads; of a FakeLN run the same
  config: ModelConfig
  gate: jax.Array
  c: jax.Array | None
  fixed: float | None  # gate when exactly 0 or 1: one branch is compiled

  def start(self, prompts, done, size) -> _State:
    return _start(
      self.params,
      self.gate,
      self.c,
      *_padded(prompts, done, size),
      config=self.config,
      fixed=self.fixed,
      size=size,
    )

  def extend(self, state, draw, until, kind, length) -> _State:
    return _extend(
      state,
      self.packed,
      self.gate,
      self.c,
      draw,
      np.int32(until),
      config=self.config,
      fixed=self.fixed,
      kind=kind,
      length=length,
    )

  def whole(self, prompts, done, draw, steps, kind, size):
    return _whole(
      self.params,
      self.packed,
      self.gate,
      self.c,
      *_padded(prompts, done, size),
      draw,
      np.int32(steps),
      config=self.config,
      fixed=self.fixed,
      kind=kind,
      size=size,
    )


def _padded(prompts, done, size) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """tokens_BP, length_B and done_B."""
  padded = _padded_length(prompts, size)
  tokens_BP = np.zeros((len(prompts), padded), np.int32)
  for row, prompt in enumerate(prompts):
    tokens_BP[row, : len(prompt)] = prompt
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  return tokens_BP, lengths, np.array(done, bool)


def _padded_length(prompts, size) -> int:
  return min(_round_up(max(map(len, prompts)), PROMPT_BUCKET), size)


def _round_up(length: int, bucket: int = BUCKET) -> int:
  return -(-length // bucket) * bucket


def _slots(longest: int, steps: int, config: ModelConfig) -> int:
  """Of the cache: the last new token is never in it."""
  padded = _round_up(longest, PROMPT_BUCKET)
  behind = max(1, longest + steps - 1 - padded)
  return min(padded + _round_up(behind), config.context_len)


def _prepare(
  params, config: ModelConfig, gate, c, weights: str = "float"
) -> _Decoder:
  """With int8 the prefill runs in floats, on the same rounded weights."""
  int8.check(weights, config)
  params, config = model.unstack_layers(params, config)
  gate, c, fixed = _branch(config, gate, c)
  params = jax.tree.map(jnp.asarray, params)
  if weights == "int8":
    params = int8.rounded(params, config)
  packed = params
  if packing.packs(config):
    packed = packing.pack(params, config, weights)
  return _Decoder(params, packed, config, gate, c, fixed)


def _branch(config: ModelConfig, gate, c):
  """(gate, c, fixed) of a decoder; `fixed` as in `_Decoder`."""
  if config.internal_norm == "fake":  # no gate: c tells what is cut
    return jnp.float32(1.0), jnp.asarray(c, jnp.float32), 1.0
  if not config.tapered_sites:
    return jnp.float32(1.0), None, 1.0
  gate = float(gate)
  if not 0 <= gate <= 1:
    raise UserError(
      f"gate={gate} must be between 0 and 1, for example 0 (tapered away)"
    )
  if gate == 1:
    return jnp.float32(1.0), None, 1.0
  names = site_names(config.num_layers)
  if c is None:
    raise UserError(
      f"gate={gate:.4g} needs the calibrated factors c, and there are none; "
      "pass the c of the checkpoint, or gate=1"
    )
  c = np.asarray(c, np.float32)
  for site in config.tapered_sites:
    if not (np.isfinite(c[site]) and c[site] > 0):
      raise UserError(
        f"c={c[site]:g} at {names[site]} is not a calibrated factor, which "
        f"gate={gate:.4g} needs; calibrate first, or generate at gate=1"
      )
  return jnp.float32(gate), jnp.asarray(c), 0.0 if gate == 0 else None


def _check(prompts, config, max_new, seed, stop_ids, first_row, window) -> None:
  """Every rule on the arguments; each message is one line."""
  if not prompts:
    raise UserError(
      "prompts=[] holds no prompt; give at least one, for an empty text the "
      "end-of-text token alone"
    )
  if max_new < 1:
    raise UserError(f"max_new={max_new} must be at least 1, for example 100")
  if not 0 <= seed < 2**31:
    raise UserError(
      f"seed={seed} must lie between 0 and 2^31 - 1, for example 0"
    )
  if first_row < 0:
    raise UserError(
      f"first_row={first_row} must not be below 0; use 0 for the first prompt"
    )
  vocab, context = config.vocab_size, config.context_len
  for row, prompt in enumerate(prompts):
    if not len(prompt):
      raise UserError(
        f"prompt {row} is empty; start an empty text with the end-of-text token"
      )
    for token in prompt:
      if not 0 <= token < vocab:
        raise UserError(
          f"prompt {row} holds token {token}, but vocab_size={vocab}; use the "
          "tokenizer that the model was trained with"
        )
    if len(prompt) + max_new > context and not window:
      raise UserError(
        f"prompt {row} of {len(prompt)} tokens and max_new={max_new} exceed "
        f"context_len={context}; lower max_new, shorten the prompt, or slide "
        "the context with --window"
      )
  if window and context < 2:
    raise UserError(
      f"context_len={context} is too short for --window, which needs 2; use a "
      "model with a longer context"
    )
  for token in stop_ids:
    if not 0 <= token < vocab:
      raise UserError(
        f"stop id {token} is not a token, vocab_size={vocab}; use the "
        "tokenizer that the model was trained with"
      )


def _blocks(
  decoder, prompts, max_new, sampling, seed, stop_ids, first_row, block
) -> Iterator[list[list[int]]]:
  """New tokens of every row, at most `block` steps at a time."""
  context = decoder.config.context_len
  texts = [[int(token) for token in prompt] for prompt in prompts]
  starts, done, left = [0] * len(texts), [False] * len(texts), max_new
  base = {
    "key": jax.random.key(seed),
    "row_B": first_row + np.arange(len(texts), dtype=np.int32),
    "temperature": np.float32(sampling.temperature),
    "top_k": np.int32(min(sampling.top_k, decoder.config.vocab_size)),
    "top_p": np.float32(sampling.top_p),
    "stop_S": np.array(sorted(stop_ids) or [-1], np.int32),
  }
  while left and not all(done):
    for row, text in enumerate(texts):
      if done[row]:
        starts[row] = len(text) - 1  # runs along, unread: as short as can be
      elif len(text) - starts[row] >= context:
        starts[row] = len(text) - context // 2
    parts = [text[start:] for text, start in zip(texts, starts, strict=True)]
    steps = min(left, context - max(map(len, parts)))
    draw = _Draw(offset_B=np.array(starts, np.int32), **base)
    seen = 0
    for found in _results(decoder, parts, done, draw, steps, sampling, block):
      out_BM, kept_B, done_B = jax.device_get(found)
      new = [
        ids[seen:kept].tolist()
        for ids, kept in zip(out_BM, kept_B, strict=True)
      ]
      for text, ids in zip(texts, new, strict=True):
        text += ids
      seen, done = seen + (block or steps), done_B.tolist()
      yield new
      if all(done):
        return
    left -= steps


def _results(
  decoder, prompts, done, draw, steps, sampling, block
) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
  """out_BM, kept_B and done_B of `_State` after each block."""
  longest = max(map(len, prompts))
  size = _slots(longest, steps, decoder.config)
  if block is None:
    yield decoder.whole(prompts, done, draw, steps, sampling.kind, size)
    return
  state = decoder.start(prompts, done, size)
  lengths = _lengths(_padded_length(prompts, size), size)
  for seen in range(0, steps, block):
    until = min(steps, seen + block)
    first, last = longest - 1 + seen, longest - 1 + until  # slots written
    for begin, length in itertools.pairwise([0, *lengths]):
      if first < length and begin < last:
        state = decoder.extend(state, draw, until, sampling.kind, length)
    yield state.out_BM, state.kept_B, state.done_B


def generate(
  params: dict,
  config: ModelConfig,
  prompts: Sequence[Sequence[int]],
  *,
  max_new: int,
  gate: float | jax.Array = 0.0,
  c: Any = None,
  sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
  seed: int = 0,
  stop_ids: tuple[int, ...] = (),
  window: bool = False,
  first_row: int = 0,
  weights: str = "float",
) -> list[list[int]]:
  """Continues every prompt by up to `max_new` tokens.

  The prefill and the whole loop run on the device; the host reads the result
  once. The loop ends early when all rows have stopped.

  The random key of a token is fold_in(fold_in(key(seed), row), position), the
  position counted in the whole text. So a row does not depend on its
  neighbours: row i alone, with `first_row=i`, is sampled as it is in a batch
  (to the rounding of the logits, which may differ between batch sizes).

  Args:
    params, config: any model: baseline, tapered or folded, scanned or not.
    prompts: token ids, rows of any lengths.
    max_new: tokens to generate for each row.
    gate: g of a tapered model; other models have none and ignore it. Exactly 0
      and 1 compile one branch, all values between share one program.
    c: calibrated factors by site; needed where the gate is below 1.
    sampling: greedy unless given.
    seed: of the sampling.
    stop_ids: tokens that end a row; they are not part of the result.
    window: goes past context_len. Whenever the text in view has grown to
      context_len tokens, its last context_len // 2 become a new prompt at
      positions from 0 (a longer prompt is cut so at the start), and generation
      goes on. Works alike for RoPE and learned positions.
    first_row: row index of the first prompt, for its random keys.
    weights: "float", or "int8" for matrices of 8 bits, see `int8`; all else
      stays in the compute dtype. Not for a FakeLN run.

  Returns:
    The continuations, without prompts and stop tokens.

  Raises:
    UserError: an argument out of its range, in one line.
  """
  _check(prompts, config, max_new, seed, stop_ids, first_row, window)
  decoder = _prepare(params, config, gate, c, weights)
  found = [[] for _ in prompts]
  for new in _blocks(
    decoder, prompts, max_new, sampling, seed, stop_ids, first_row, None
  ):
    for ids, more in zip(found, new, strict=True):
      ids += more
  return found


def generate_stream(
  params: dict,
  config: ModelConfig,
  prompt: Sequence[int],
  *,
  max_new: int,
  gate: float | jax.Array = 0.0,
  c: Any = None,
  sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
  seed: int = 0,
  stop_ids: tuple[int, ...] = (),
  window: bool = False,
  first_row: int = 0,
  weights: str = "float",
  block: int = 16,
) -> Iterator[list[int]]:
  """As `generate` for one prompt, handing out `block` tokens at a time.

  Prefill and blocks are programs of their own here, so the logits agree with
  those of `generate` to rounding, and the ids but for near ties. Arguments are
  checked at the call, before the first block is asked for.
  """
  prompts = [prompt]
  _check(prompts, config, max_new, seed, stop_ids, first_row, window)
  if block < 1:
    raise UserError(f"block={block} must be at least 1, for example 16")
  decoder = _prepare(params, config, gate, c, weights)
  blocks = _blocks(
    decoder, prompts, max_new, sampling, seed, stop_ids, first_row, block
  )
  return (new[0] for new in blocks if new[0])


@dataclasses.dataclass(frozen=True)
class GreedyTimer:
  """Greedy decoding of random prompts, ready to be timed again and again.

  No row stops early. `make` checks its arguments as `generate` does.
  """

  decoder: _Decoder
  prompts: list[list[int]]
  new_tokens: int

  @classmethod
  def make(
    cls, params, config: ModelConfig, *, gate, c, batch_size: int,
    prompt_len: int, new_tokens: int, weights: str = "float",
  ) -> GreedyTimer:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (batch_size, prompt_len))
    prompts = prompts.tolist()
    _check(prompts, config, new_tokens, 0, (), 0, False)
    decoder = _prepare(params, config, gate, c, weights)
    return cls(decoder, prompts, new_tokens)

  @property
  def batch_size(self) -> int:
    return len(self.prompts)

  @property
  def prompt_len(self) -> int:
    return len(self.prompts[0])

  @property
  def _size(self) -> int:
    return _slots(self.prompt_len, self.new_tokens, self.decoder.config)

  @property
  def _lengths(self) -> list[int]:
    return _lengths(_padded_length(self.prompts, self._size), self._size)

  def _state(self) -> _State:
    done = [False] * self.batch_size
    return self.decoder.start(self.prompts, done, self._size)

  def _draw(self) -> _Draw:
    zeros_B = np.zeros((self.batch_size,), np.int32)
    return _Draw(
      key=jax.random.key(0),
      row_B=zeros_B,
      offset_B=zeros_B,
      temperature=np.float32(0.0),
      top_k=np.int32(0),
      top_p=np.float32(1.0),
      stop_S=np.array([-1], np.int32),
    )

  def seconds(self) -> float:
    """Of the loop over all new tokens, without the prefill."""
    state, draw = jax.block_until_ready(self._state()), self._draw()
    begin = time.perf_counter()
    for length in self._lengths:
      state = self.decoder.extend(
        state, draw, self.new_tokens, "greedy", length
      )
    jax.block_until_ready(state)
    return time.perf_counter() - begin

  def ids(self) -> np.ndarray:
    """The new tokens of all rows, (B, new_tokens); one compiled call."""
    out_BM, *_ = self.decoder.whole(
      self.prompts, [False] * self.batch_size, self._draw(), self.new_tokens,
      "greedy", self._size,
    )
    return np.asarray(out_BM)[:, : self.new_tokens]

  def compiled_text(self) -> str:
    """The optimized program of the last loop, as HLO."""
    decoder, state = self.decoder, jax.eval_shape(self._state)
    lowered = _extend.lower(
      state, decoder.packed, decoder.gate, decoder.c, self._draw(),
      np.int32(self.new_tokens), config=decoder.config, fixed=decoder.fixed,
      kind="greedy", length=self._size,
    )
    return lowered.compile().as_text()


def tokens_per_second(
  params: dict,
  config: ModelConfig,
  *,
  gate: float | jax.Array = 0.0,
  c: Any = None,
  batch_size: int,
  prompt_len: int,
  new_tokens: int,
  repeats: int,
) -> float:
  """Greedy decode speed with a KV cache: generated tokens of all rows a second.

  The median over `repeats` runs after one warm-up; compilation and prefill are
  not timed, and no row stops early.
  """
  timer = GreedyTimer.make(
    params, config, gate=gate, c=c, batch_size=batch_size,
    prompt_len=prompt_len, new_tokens=new_tokens,
  )
  seconds = [timer.seconds() for _ in range(repeats + 1)]
  return batch_size * new_tokens / statistics.median(seconds[1:])
