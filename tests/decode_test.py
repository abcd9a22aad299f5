"""Generation: the cached loop is the full pass, row by row, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import decode, folding, model
from taperjax.decode import Sampling
from taperjax.errors import UserError
from tests import folding_test

B, L, V = folding_test.B, folding_test.L, folding_test.V
CONTEXT = 16  # one bucket: every prompt and cache of the tests is this long
PROMPTS = [[3, 17, 5, 30, 2], [8], [11, 0, 26]]

# One model of each family; the layers of the second are stacked.
CONFIGS = {
  "rms": folding_test.make_config(
    num_layers=2, num_heads=6, num_kv_heads=2, final_norm="norm", rotary_dim=2
  ),
  "layer": folding_test.make_config(
    num_layers=2, norm="layer", positions="learned", scan_layers=True,
    mlp="gelu_tanh", biases=("q", "v", "up", "down"),
  ),
}
C = np.asarray(folding_test.random_c())[:5]
SEED = 5  # of parameters whose greedy texts are varied


@functools.cache
def tiny(name):
  """(params, config, c) of a tapered model."""
  config = CONFIGS[name]
  return folding_test.random_params(config, seed=SEED), config, C


@functools.cache
def baseline(name):
  config = CONFIGS[name].replace(internal_norm="norm", final_norm="norm")
  return folding_test.random_params(config, seed=SEED), config, None


@functools.cache
def folded(name):
  params, config, c = tiny(name)
  return (*folding.fold(params, c, config), None)


MODELS = {
  "gate 1": (tiny, 1.0),
  "gate 0": (tiny, 0.0),
  "gate 0.5": (tiny, 0.5),
  "baseline": (baseline, 0.0),
  "folded": (folded, 0.0),
}
# A baseline and gate 1 are the same plain norm: once is enough, with "rms".
TABLE = pytest.mark.parametrize(
  ("family", "kind"),
  [("rms", kind) for kind in MODELS]
  + [("layer", kind) for kind in ("gate 0", "gate 0.5", "folded")],
)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
  """Compiling is the cost here: half of it goes without the last passes."""
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", False)


@functools.partial(jax.jit, static_argnames=("config", "fixed"))
def full_pass(params, config, tokens_BL, gate, c, fixed):
  gate = gate if fixed is None else fixed
  variables = {"params": params}
  return model.Transformer(config).apply(
    variables, tokens_BL, gate=gate, c=c
  )[0]


@functools.partial(jax.jit, static_argnames=("config", "fixed"))
def one_step(params, config, token_B1, place_B1, cache, gate, c, fixed):
  logits, aux = model.Transformer(config).apply(
    {"params": params},
    token_B1,
    gate=gate if fixed is None else fixed,
    c=c,
    cache=cache,
    position_BL=place_B1,
  )
  return logits, aux["cache"]


def arguments(family, kind):
  """(params, config, gate, c, fixed) of a model with its layers unstacked."""
  make, gate = MODELS[kind]
  params, config, c = make(family)
  fixed = None if gate == 0.5 else gate
  if kind == "baseline":
    fixed = 1.0
  params, config = model.unstack_layers(params, config)
  return params, config, jnp.float32(gate), c, fixed


def full_logits(params, config, text, gate, c, fixed):
  """Logits (L, V) of one text; the padding behind it is not seen."""
  tokens_BL = np.zeros((1, CONTEXT), np.int32)
  tokens_BL[0, : len(text)] = text
  logits = full_pass(params, config, tokens_BL, gate, c, fixed)
  return np.asarray(logits)[0, : len(text)]


@TABLE
def test_cached_decoding_is_the_full_pass_at_every_position(family, kind):
  """One token at a time, from an empty cache and behind a padded prefill."""
  params, config, gate, c, fixed = arguments(family, kind)
  tokens_BL = folding_test.random_tokens()[:, :L]
  expected = np.stack([
    full_logits(params, config, text, gate, c, fixed) for text in tokens_BL
  ])
  assert expected.std() > 0.3
  # The same sums over a cache with empty slots: some roundings apart.
  bound = 1e-5 * max(1.0, np.max(np.abs(expected)))
  decoder = decode._prepare(params, config, MODELS[kind][1], c)
  prefill = 3
  state = decoder.start(
    tokens_BL[:, :prefill].tolist(), [False] * B, CONTEXT
  )
  empty = model.init_cache(config, B, CONTEXT)
  for start, cache in ((0, empty), (prefill - 1, state.cache)):
    for place in range(start, L):
      logits, cache = one_step(
        params,
        config,
        tokens_BL[:, place : place + 1],
        np.full((B, 1), place, np.int32),
        cache,
        gate,
        c,
        fixed,
      )
      error = np.max(np.abs(np.asarray(logits)[:, 0] - expected[:, place]))
      assert error <= bound, (start, place)


def greedy_by_full_passes(params, config, prompt, steps, gate, c, fixed):
  """argmax of a full pass for each token."""
  text = list(prompt)
  for _ in range(steps):
    logits = full_logits(params, config, text, gate, c, fixed)
    text.append(int(np.argmax(logits[-1])))
  return text[len(prompt) :]


@TABLE
def test_greedy_text_of_unequal_prompts_is_the_argmax_of_full_passes(
  family, kind
):
  """Every row equals its prompt alone, whatever is beside it."""
  arrays = arguments(family, kind)
  make, gate = MODELS[kind]
  params, config, c = make(family)
  found = decode.generate(params, config, PROMPTS, max_new=9, gate=gate, c=c)
  expected = [
    greedy_by_full_passes(*arrays[:2], prompt, 9, *arrays[2:])
    for prompt in PROMPTS
  ]
  assert found == expected
  assert len({tuple(ids) for ids in found}) > 1


@pytest.mark.parametrize(
  "sampling", [Sampling(), Sampling(0.9), Sampling(1.1, top_k=7, top_p=0.9)]
)
def test_a_row_beside_others_equals_it_alone(sampling):
  params, config, c = tiny("rms")
  common = {"max_new": 9, "c": c, "sampling": sampling, "seed": 5}
  together = decode.generate(params, config, PROMPTS, **common)
  for row, prompt in enumerate(PROMPTS):
    alone = decode.generate(
      params, config, [prompt], first_row=row, **common
    )
    assert alone == [together[row]]


def test_seed_row_and_position_each_change_what_is_drawn():
  """Equal prompts in one batch must not give equal stories."""
  params, config, c = tiny("rms")
  common = {"max_new": 12, "c": c, "sampling": Sampling(1.5)}
  run = lambda **extra: decode.generate(
    params, config, [[8], [8], [8]], **common, **extra
  )
  first = run(seed=5)
  assert first == run(seed=5)
  assert len({tuple(ids) for ids in first}) == 3
  assert first != run(seed=6)
  # Continuing a text draws what going on would have drawn.
  prompts = [[8, *ids[:4]] for ids in first]
  rest = decode.generate(
    params, config, prompts, seed=5, **{**common, "max_new": 8}
  )
  assert rest == [ids[4:] for ids in first]


def test_keys_follow_the_position_in_the_text_not_in_the_window():
  """All tokens equally likely: what is drawn depends on the keys alone.

  So a window must draw the same as a context that holds the whole text, and
  neither may repeat itself.
  """
  params, config, c = tiny("rms")
  flat = {**params, "embed": {"embedding": params["embed"]["embedding"] * 0}}
  run = lambda config: decode.generate(
    flat, config, PROMPTS, max_new=45, c=c, sampling=Sampling(1.0), window=True
  )
  found = run(config)
  assert found == run(config.replace(context_len=64))
  assert all(len(set(ids)) > 15 for ids in found)


def reference_distribution(logits, temperature, top_k, top_p):
  """Probabilities after the filters, in float64 with plain loops."""
  weight = np.exp((logits - logits.max()) / temperature)
  order = np.argsort(-logits, kind="stable")
  if top_k:
    order = order[:top_k]
  p = weight[order] / weight[order].sum()
  kept, total = [], 0.0
  for share, token in zip(p, order, strict=True):
    if total >= top_p:
      break
    kept.append(token)
    total += share
  out = np.zeros(len(logits))
  out[kept] = weight[kept] / weight[kept].sum()
  return out


DRAWS = 4000


@functools.partial(jax.jit, static_argnames="kind")
def draw_many(logits_V, sampling, kind):
  keys = jax.random.split(jax.random.key(3), DRAWS)
  logits_BV = jnp.broadcast_to(logits_V[None, :], (DRAWS, V))
  return decode.sample(logits_BV, keys, sampling, kind)


@pytest.mark.parametrize(
  "sampling",
  [
    Sampling(0.7),
    Sampling(1.3, top_k=4),
    Sampling(0.8, top_p=0.75),
    Sampling(1.2, top_k=9, top_p=0.6),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=1e-6),
    Sampling(1e-6),
    Sampling(1.0, top_k=1000),
  ],
  ids=str,
)
def test_samples_follow_the_filtered_distribution(sampling):
  """Support exactly, frequencies to five standard deviations."""
  logits = np.random.default_rng(7).normal(size=V).astype(np.float32) * 1.5
  logits[9] = logits[4]  # a tie
  expected = reference_distribution(
    logits.astype(np.float64),
    sampling.temperature,
    sampling.top_k,
    sampling.top_p,
  )
  arrays = decode._Draw(
    None, None, None, *map(np.float32, (
      sampling.temperature, sampling.top_k, sampling.top_p
    )), None,
  )
  tokens = np.asarray(draw_many(logits, arrays, sampling.kind))
  assert tokens.dtype == np.int32
  counts = np.bincount(tokens, minlength=V)
  assert not counts[expected == 0].any()
  likely = expected > 5e-3  # seen at least once but for a chance of 2e-9
  assert counts[likely].all()
  deviation = np.sqrt(DRAWS * expected * (1 - expected))
  assert np.all(np.abs(counts - DRAWS * expected) <= 5 * deviation + 1)


def test_greedy_takes_the_smallest_id_of_a_tie():
  logits_BV = jnp.asarray([[0.0, 2.0, 1.0, 2.0]])
  assert decode.sample(logits_BV, None, None, "greedy").tolist() == [1]
  top1 = decode._Draw(None, None, None, 1.0, 1, 1.0, None)
  keys = jax.random.split(jax.random.key(0), 1)
  assert decode.sample(logits_BV, keys, top1, "filtered").tolist() == [1]


@pytest.mark.parametrize("size", [37, 36, 34])  # 1, 6 and 2 blocks
def test_greedy_is_argmax_of_every_row(size):
  """Ties and infinities included; a NaN gives some id that there is."""
  rng = np.random.default_rng(0)
  logits_BV = rng.integers(-3, 4, (200, size)).astype(np.float32)  # many ties
  for row in range(90):
    places = rng.integers(0, size, 1 + row % 3)
    logits_BV[row, places] = (np.inf, -np.inf, np.nan)[row // 30]
  logits_BV[-1], logits_BV[-2, :-1] = -np.inf, -np.inf
  found = decode.sample(jnp.asarray(logits_BV), None, None, "greedy")
  assert found.dtype == jnp.int32
  wanted = np.argmax(logits_BV, axis=-1)
  finite = ~np.isnan(logits_BV).any(axis=-1)
  assert finite.sum() == 170
  np.testing.assert_array_equal(np.asarray(found)[finite], wanted[finite])
  assert np.all((found >= 0) & (found < size))


def test_a_sampled_token_is_that_of_jax_random_categorical():
  rng = np.random.default_rng(0)
  logits_BV = jnp.asarray(3 * rng.normal(size=(200, 36)), jnp.float32)
  keys_B = jax.random.split(jax.random.key(0), 200)
  found_B = decode.sample(logits_BV, keys_B, Sampling(1.0), "plain")
  wanted_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV)
  np.testing.assert_array_equal(found_B, wanted_B)
  assert found_B.dtype == jnp.int32


def test_a_stop_token_ends_its_row_alone_and_is_left_out():
  params, config, c = tiny("rms")
  whole = decode.generate(params, config, PROMPTS, max_new=9, c=c)
  # A token that some rows meet in their middle and some never.
  stop = next(
    token for ids in whole for token in ids
    if all(token not in i[:1] for i in whole)
    and not all(token in i for i in whole)
  )
  cut = lambda ids: ids[: ids.index(stop)] if stop in ids else ids
  for stop_ids in ((stop,), (stop, stop)):
    found = decode.generate(
      params, config, PROMPTS, max_new=9, c=c, stop_ids=stop_ids
    )
    assert found == [cut(ids) for ids in whole]
  first = tuple(ids[0] for ids in whole)
  found = decode.generate(
    params, config, PROMPTS, max_new=9, c=c, stop_ids=first
  )
  assert found == [[], [], []]


def test_the_loop_ends_when_every_row_has_stopped():
  params, config, c = tiny("rms")
  whole = decode.generate(params, config, PROMPTS[1:2], max_new=9, c=c)[0]
  decoder = decode._prepare(params, config, 0.0, c)
  state = decoder.start(PROMPTS[1:2], [False], CONTEXT)
  stop = whole[2]
  draw = greedy_draw(1, stop=stop)
  state = decoder.extend(state, draw, 9, "greedy", CONTEXT)
  assert int(state.count) == whole.index(stop) + 1 < 9


def greedy_draw(rows, stop=-1):
  zeros = np.zeros(rows, np.int32)
  return decode._Draw(
    jax.random.key(0), zeros, zeros, np.float32(0), np.int32(0), np.float32(1),
    np.array([stop], np.int32),
  )


def test_the_cache_is_donated_from_block_to_block():
  params, config, c = tiny("rms")
  decoder = decode._prepare(params, config, 0.0, c)
  state = decoder.start(PROMPTS, [False] * 3, CONTEXT)
  after = decoder.extend(state, greedy_draw(3), 2, "greedy", CONTEXT)
  assert all(x.is_deleted() for x in jax.tree.leaves(state.cache))
  assert not any(x.is_deleted() for x in jax.tree.leaves(after))
  assert not any(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_cache_has_the_compute_dtype(family):
  """bfloat16 halves the cache; B x M x G x K twice for each layer."""
  params, config, c = tiny(family)
  config = config.replace(compute_dtype="bfloat16")
  decoder = decode._prepare(params, config, 0.0, c)
  abstract = functools.partial(
    decode._start, config=decoder.config, fixed=0.0, size=CONTEXT
  )
  state = jax.eval_shape(
    abstract, decoder.params, decoder.gate, decoder.c,
    np.zeros((B, L), np.int32), np.full(B, L, np.int32), np.zeros(B, bool),
  )
  leaves = jax.tree.leaves(state.cache)
  assert {x.dtype for x in leaves} == {jnp.dtype("bfloat16")}
  size = B * CONTEXT * config.num_kv_heads * config.head_dim
  assert sum(x.size for x in leaves) == 2 * config.num_layers * size


def test_a_second_call_of_a_bucket_compiles_nothing():
  """Other lengths, ids, seeds, temperatures, stops and gates are arguments."""
  params, config, c = tiny("rms")
  config = config.replace(context_len=256)

  def run(prompts, max_new, gate, heat, k, p, seed, stop):
    decode.generate(
      params, config, prompts, max_new=max_new, gate=gate, c=c,
      sampling=Sampling(heat, k, p), seed=seed, stop_ids=(stop,),
    )
    return decode._whole._cache_size()

  first = run([[1, 2], [3]], 5, 0.5, 0.9, 3, 0.9, 0, 7)
  assert run([[4], [5] * 20], 30, 0.25, 1.4, 0, 0.5, 9, 8) == first
  # A longer text needs a larger cache: one more.
  assert run([[1, 2], [3]], 96, 0.5, 0.9, 3, 0.9, 0, 7) == first + 1


def test_prompts_are_padded_to_32_and_within_the_cache():
  lengths = [1, 32, 33, 65]
  padded = [decode._padded_length([[0] * n, [0]], 96) for n in lengths]
  assert padded == [32, 32, 64, 96]
  assert decode._padded_length([[0] * 40], 50) == 50


def test_a_cache_has_a_multiple_of_64_slots_behind_the_prompt():
  """So the padded prompt and 64 new tokens are one loop, and no second one."""
  config = tiny("rms")[1].replace(context_len=250)
  sizes = [(32, 64), (32, 66), (5, 3), (40, 64), (200, 50), (1, 1)]
  found = [decode._slots(longest, steps, config) for longest, steps in sizes]
  assert found == [96, 160, 96, 128, 250, 96]
  assert decode._lengths(32, 96) == [96]


def test_what_a_step_reads_grows_with_the_text():
  assert decode._lengths(64, 64) == [64]
  assert decode._lengths(64, 512) == [128, 192, 320, 512]
  assert decode._lengths(128, 250) == [192, 250]
  params, config, c = tiny("rms")
  config = config.replace(context_len=192)
  decoder = decode._prepare(params, config, 0.0, c)
  state = decoder.start(PROMPTS, [False] * 3, 192)
  state = decoder.extend(state, greedy_draw(3), 130, "greedy", 128)
  assert int(state.count) == 128 - 5 + 1  # the longest prompt has 5 tokens
  state = decoder.extend(state, greedy_draw(3), 130, "greedy", 192)
  assert int(state.count) == 130


@functools.cache
def long_text(family, kind):
  """Prompts of unequal lengths continued through three lengths of the cache."""
  make, gate = MODELS[kind]
  params, config, c = make(family)
  config = config.replace(context_len=LONG)
  if config.positions == "learned":
    rng = np.random.default_rng(0)
    shape = (LONG, config.embed_dim)
    table = jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)
    params = {**params, "position_embed": {"embedding": table}}
  found = decode.generate(params, config, PROMPTS, max_new=210, gate=gate, c=c)
  return params, config, c, found


LONG = 256  # slots: 96, then 192, then 224


@pytest.mark.parametrize(
  ("family", "kind"), [("rms", "gate 0"), ("layer", "folded")]
)
def test_a_text_that_outgrows_the_cache_is_the_argmax_of_a_full_pass(
  family, kind
):
  params, config, c, found = long_text(family, kind)
  *_, gate, c, fixed = arguments(family, kind)
  params, config = model.unstack_layers(params, config)
  for prompt, ids in zip(PROMPTS, found, strict=True):
    assert len(ids) == 210
    tokens_BL = np.zeros((1, LONG), np.int32)
    text = prompt + ids
    tokens_BL[0, : len(text)] = text
    logits_LV = np.asarray(
      full_pass(params, config, tokens_BL, gate, c, fixed)
    )[0, len(prompt) - 1 : len(text) - 1]
    # Rounding may choose between two that are as good as equal.
    lost_L = np.max(logits_LV, axis=1) - logits_LV[np.arange(210), ids]
    assert np.max(lost_L) <= 1e-5 * max(1.0, np.max(np.abs(logits_LV)))


def test_a_stream_that_outgrows_the_cache_gives_the_same_ids():
  """Blocks of 50 end before, in and after the steps at which it grows."""
  params, config, c, found = long_text("rms", "gate 0")
  parts = list(
    decode.generate_stream(
      params, config, PROMPTS[0], max_new=210, gate=0.0, c=c, block=50
    )
  )
  assert sum(parts, []) == found[0]
  assert list(map(len, parts)) == [50, 50, 50, 50, 10]


@pytest.mark.parametrize("family", CONFIGS)
def test_gates_of_any_kind_are_one_gate(family):
  """The gate comes from a train state as an array, which 0 and 1 may be."""
  params, config, c = tiny(family)
  run = lambda gate: decode.generate(
    params, config, PROMPTS, max_new=9, gate=gate, c=c
  )
  for gate in (0.0, 1.0):
    size = decode._whole._cache_size()
    assert run(gate) == run(jnp.float32(gate)) == run(int(gate))
    assert decode._whole._cache_size() <= size + 1
  assert run(0.0) != run(1.0)


def windows_by_hand(params, config, prompt, steps, gate, c, fixed):
  """The documented window: full passes over what is in view."""
  context = config.context_len
  text, start = list(prompt), 0
  for _ in range(steps):
    if len(text) - start >= context:
      start = len(text) - context // 2
    logits = full_logits(params, config, text[start:], gate, c, fixed)
    text.append(int(np.argmax(logits[-1])))
  return text[len(prompt) :]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_window_goes_past_the_context(family):
  """Each row slides at its own time; one prompt is longer than the context."""
  arrays = arguments(family, "gate 0")
  params, config, c = tiny(family)
  long = np.random.default_rng(3).integers(0, V, 21).tolist()
  prompts = [*PROMPTS, long]
  found = decode.generate(
    params, config, prompts, max_new=45, c=c, window=True
  )
  expected = [
    windows_by_hand(*arrays[:2], prompt, 45, *arrays[2:]) for prompt in prompts
  ]
  assert found == expected
  assert 3 * config.context_len > 45 > 2 * config.context_len


def test_a_window_that_is_not_needed_changes_nothing():
  params, config, c = tiny("rms")
  run = lambda window: decode.generate(
    params, config, PROMPTS, max_new=11, c=c, window=window
  )
  assert run(True) == run(False)


STREAM_CASES = {
  "greedy": {},
  "sampled": {"sampling": Sampling(0.9, top_k=9, top_p=0.9), "seed": 3},
  "window": {"window": True, "max_new": 45, "sampling": Sampling(0.9)},
  "first_row": {"sampling": Sampling(0.9), "first_row": 2},
}


@pytest.mark.parametrize("name", STREAM_CASES)
def test_a_stream_gives_the_ids_of_generate_in_blocks(name):
  params, config, c = tiny("rms")
  extra = {"max_new": 10, "c": c, **STREAM_CASES[name]}
  whole = decode.generate(params, config, PROMPTS[:1], **extra)[0]
  parts = list(
    decode.generate_stream(params, config, PROMPTS[0], block=4, **extra)
  )
  assert sum(parts, []) == whole and len(whole) == extra["max_new"]
  assert max(map(len, parts)) == 4 and len(parts[0]) == 4
  stop = whole[5]
  parts = list(
    decode.generate_stream(
      params, config, PROMPTS[0], block=4, stop_ids=(stop,), **extra
    )
  )
  assert sum(parts, []) == whole[: whole.index(stop)]


def test_tokens_per_second_is_a_rate(monkeypatch):
  """Against a clock that ticks one second a call: rows x tokens a second."""
  params, config, c = tiny("rms")
  ticks = iter(range(1000))
  monkeypatch.setattr(decode.time, "perf_counter", lambda: float(next(ticks)))
  rate = decode.tokens_per_second(
    params, config, gate=0.0, c=c, batch_size=3, prompt_len=4, new_tokens=7,
    repeats=2,
  )
  assert rate == 21.0
  assert next(ticks) == 6  # a warm-up and two repeats, two readings each


SAMPLING_ERRORS = [
  ((-0.5,), r"temperature=-0.5 must be 0 \(greedy\) or at least 1e-06"),
  ((float("nan"),), "temperature=nan must be 0"),
  ((float("inf"),), "temperature=inf must be 0"),
  ((1e-30,), "temperature=1e-30 must be 0"),
  ((1.0, -1), "top_k=-1 must be a whole number, not below 0; 0 keeps all"),
  ((1.0, 2.5), "top_k=2.5 must be a whole number"),
  ((1.0, 0, 0.0), "top_p=0.0 must be above 0 and at most 1; 1.0 keeps all"),
  ((1.0, 0, 1.5), "top_p=1.5 must be above 0"),
  ((1.0, 0, float("nan")), "top_p=nan must be above 0"),
  ((0.0, 5), "top_k=5 has no effect with temperature=0"),
  ((0.0, 0, 0.9), "top_p=0.9 has no effect with temperature=0"),
]


@pytest.mark.parametrize(("values", "message"), SAMPLING_ERRORS)
def test_impossible_sampling_is_named(values, message):
  with pytest.raises(UserError, match=message):
    Sampling(*values)


GENERATE_ERRORS = [
  ({"prompts": []}, "no prompt; give at least one, .* the end-of-text token"),
  ({"prompts": [[1], []]}, "prompt 1 is empty; start .* the end-of-text token"),
  ({"prompts": [[1, 31]]}, "prompt 0 holds token 31, but vocab_size=31; use"),
  ({"prompts": [[1], [-1]]}, "prompt 1 holds token -1, but vocab_size=31"),
  (
    {"prompts": [[1], [2] * 9], "max_new": 8},
    "prompt 1 of 9 tokens and max_new=8 exceed context_len=16; .* --window",
  ),
  ({"max_new": 0}, "max_new=0 must be at least 1, for example 100"),
  ({"seed": -1}, r"seed=-1 must lie between 0 and 2\^31 - 1, for example 0"),
  ({"seed": 2**31}, "seed=2147483648 must lie"),
  ({"first_row": -1}, "first_row=-1 must not be below 0; use 0 for the"),
  ({"stop_ids": (31,)}, "stop id 31 is not a token, vocab_size=31"),
  ({"gate": 1.5}, "gate=1.5 must be between 0 and 1, for example 0"),
  ({"gate": float("nan")}, "gate=nan must be between 0 and 1"),
  ({"c": None}, "gate=0 needs the calibrated factors c, .* or gate=1"),
  ({"c": 0 * C}, "c=0 at block_0.attn_norm is not .* generate at gate=1"),
]


@pytest.mark.parametrize(("changes", "message"), GENERATE_ERRORS)
def test_impossible_requests_are_named_before_anything_runs(changes, message):
  params, config, c = tiny("rms")
  fields = {"prompts": [[1]], "max_new": 4, "c": c, **changes}
  prompts = fields.pop("prompts")
  with pytest.raises(UserError, match=message) as caught:
    decode.generate(params, config, prompts, **fields)
  assert "\n" not in str(caught.value)
  if len(prompts) == 1:  # a stream says it at the call, not at the first block
    with pytest.raises(UserError, match=message):
      decode.generate_stream(params, config, prompts[0], **fields)


def test_an_uncalibrated_model_generates_at_gate_one():
  params, config, _ = tiny("rms")
  run = lambda c: decode.generate(
    params, config, PROMPTS, max_new=9, gate=1.0, c=c
  )
  assert run(None) == run(0 * C)


def test_the_last_errors_of_window_and_block():
  params, config, c = tiny("rms")
  short = config.replace(context_len=1)
  with pytest.raises(UserError, match="context_len=1 is too short .*; use a"):
    decode.generate(params, short, [[1]], max_new=4, c=c, window=True)
  with pytest.raises(UserError, match="block=0 must be at least 1"):
    decode.generate_stream(params, config, [1], max_new=4, c=c, block=0)
