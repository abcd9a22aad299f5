"""The mesh and its rules: what is covered, what is split, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as Spec

from taperjax import loop, sharding, state
from taperjax.config import VARIANTS, MeshConfig
from taperjax.errors import UserError
from tests import tiny

GPT2 = {
  "norm": "layer", "model__positions": "learned", "model__mlp": "gelu_tanh",
  "model__biases": ("q", "k", "v", "o", "up", "down"),
}


def abstract_mesh(**sizes):
  """A mesh without devices."""
  shape = tuple(sizes.get(name, 1) for name in sharding.AXES)
  return AbstractMesh(shape, sharding.AXES, (AxisType.Auto,) * 4)


@pytest.mark.parametrize("changes", [
  *({"variant": name} for name in VARIANTS),
  {**GPT2, "variant": "all"},
  {"model__tied": False, "model__biases": ("gate", "head")},
  {"model__scan_layers": True},
  {"seeds": (0, 1), "model__scan_layers": True},
], ids=str)
def test_exactly_one_rule_covers_every_leaf_of_a_state(changes):
  """Optimizer state and statistics too; else training refuses to start."""
  config = tiny.config(**changes)
  mesh = abstract_mesh(seed=len(config.seeds), fsdp=2, tensor=2)
  found = state.shardings(config, mesh)
  leaves = jax.tree.leaves(state.abstract(config))
  assert len(jax.tree.leaves(found)) == len(leaves) > 20
  many = len(config.seeds) > 1
  for leaf, where in zip(leaves, jax.tree.leaves(found), strict=True):
    where.shard_shape(leaf.shape)  # raises where it does not split evenly
    assert not many or where.spec[0] == "seed"


def test_matrices_are_split_and_small_leaves_are_whole():
  """With layers in one tree, and moments as their parameters."""
  config = tiny.config(model__scan_layers=True)
  mesh = abstract_mesh(fsdp=2, tensor=2)
  found = state.shardings(config, mesh)
  kernels = found.params["blocks"]["attn"]
  assert kernels["q"]["kernel"].spec == Spec(None, "fsdp", "tensor", None)
  assert kernels["o"]["kernel"].spec == Spec(None, "tensor", None, "fsdp")
  adam = found.opt_state[1]
  assert adam.mu == adam.nu == found.params
  for leaf in jax.tree.leaves((found.taper, found.step, adam.count)):
    assert not any(leaf.spec)
  shapes = state.abstract(config)
  held = sum(
    np.prod(where.shard_shape(leaf.shape))
    for leaf, where in zip(
      jax.tree.leaves(shapes), jax.tree.leaves(found), strict=True
    )
  )
  total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert held < 0.32 * total  # a quarter, and the gains


@pytest.mark.parametrize("rules, count", [
  (tuple(rule for rule in sharding.RULES if rule[0] != "mlp/up/kernel"), 0),
  ((*sharding.RULES, ("kernel", Spec(None, None))), 2),
])
def test_training_refuses_a_leaf_that_no_rule_or_two_rules_cover(
  monkeypatch, rules, count
):
  """Silence would leave it whole on every device."""
  monkeypatch.setattr(sharding, "RULES", rules)
  match = f"^parameter .*/kernel is covered by {count} .* rules; .*mend RULES"
  with pytest.raises(UserError, match=match):
    state.shardings(tiny.config(), abstract_mesh(fsdp=2))


@pytest.mark.parametrize("changes, match", [
  ({"mesh__data": 2}, "data.*=2 does not divide batch_size / micro.*=3, "),
  (
    {"mesh__fsdp": 2, "batch_size": 4, "micro_batches": 4},
    "=2 does not divide batch_size / micro_batches=1, ",
  ),
  (
    {"mesh__data": 2, "batch_size": 4},
    "=2 does not divide eval.batch_size=3, which it splits; use a divisor of 3",
  ),
  ({"mesh__tensor": 4}, "mesh.tensor=4 does not divide model.num_heads=2, "),
  (
    {"mesh__tensor": 2, "model__num_kv_heads": 1},
    "mesh.tensor=2 does not divide model.num_kv_heads=1, ",
  ),
  (
    {"mesh__tensor": 2, "model__mlp_dim": 21},
    "mesh.tensor=2 does not divide model.mlp_dim=21, ",
  ),
  (
    {"mesh__fsdp": 3, "model__embed_dim": 8},
    "fsdp . mesh.tensor=3 does not divide model.embed_dim=8, ",
  ),
  ({"mesh__seed": 2}, "mesh.seed=2 does not divide the number of seeds=1, "),
  ({"mesh__data": 0}, "mesh.data=0 must be above 0, for example 1"),
])
def test_axes_that_split_nothing_evenly_are_refused(changes, match):
  """Before any array is made."""
  with pytest.raises(UserError, match=match):
    tiny.config(**changes)


def test_the_axes_must_multiply_to_the_number_of_devices():
  """A forgotten device would idle for a week."""
  match = (
    "mesh.data=2, mesh.fsdp=2, mesh.tensor=1 make 4 devices, but there are 1; "
    "they must multiply to that number: set for example mesh.data=1 "
  )
  with pytest.raises(UserError, match=match):
    sharding.make_mesh(MeshConfig(data=2, fsdp=2))


def test_one_device_has_no_mesh_and_no_trace_of_it_in_a_program():
  """The programs are those of a package without a mesh."""
  assert sharding.make_mesh(MeshConfig(), jax.devices()) is None
  x = np.ones((4, 3), np.float32)

  def through(x):
    x = sharding.whole(sharding.split_rows(x))
    return sharding.by_part(lambda x: x * 2, x, join=None)

  assert str(jax.make_jaxpr(through)(x)) == str(
    jax.make_jaxpr(lambda x: x * 2)(x)
  )
  parts = sharding.deal(x, 2)
  np.testing.assert_array_equal(parts, x.reshape(2, 2, 3))


def test_a_run_may_go_on_with_another_mesh():
  """A checkpoint opens on any number of devices."""
  config = tiny.config()
  before = loop.config_lib.to_dict(config)
  other = dataclasses.replace(config, mesh=MeshConfig(data=3))
  assert loop.different_fields(other, before) == []
  del before["mesh"]  # of a run saved before there was one
  assert loop.different_fields(other, before) == []


@pytest.mark.parametrize("arguments, match", [
  ((None, 2, None), "--processes=2 with --coordinator=None: it goes with the"),
  (("auto", None, 0), "--process=0 with --coordinator=auto: it goes with the"),
  (("a:1", 2, None), "--coordinator=a:1 needs --process; give --processes=N "),
  (("a:1", 2, 2), "--process=2 must be from 0 to --processes - 1 = 1; "),
  (("a", 2, 0), "--coordinator=a must be HOST:PORT, for example 127.0.0.1:"),
])
def test_processes_that_cannot_meet_are_refused(arguments, match):
  """Before a process waits minutes for one that never comes."""
  with pytest.raises(UserError, match=match):
    sharding.connect(*arguments)


def test_a_process_alone_connects_to_nobody():
  assert sharding.connect(None, None, None) is None
  assert jax.process_count() == 1


def test_micro_batches_take_rows_of_every_device():
  """Else a micro-batch would lie on one device, and the others wait."""
  x = np.arange(8)
  with jax.sharding.use_abstract_mesh(abstract_mesh(data=2)):
    found = jax.eval_shape(lambda x: sharding.deal(x, 2), x)
  assert found.shape == (2, 4)
  np.testing.assert_array_equal(sharding.deal(x, 2), x.reshape(2, 4))
