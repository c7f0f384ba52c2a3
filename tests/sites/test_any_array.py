"""Parameters of any library: they come back as what they were, with the same bits."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from obstore.store import MemoryStore
from site_runs import together

from curvadion_jax import compressors, sites
from curvadion_jax.sites import _arrays

STEPS, EVERY = 6, 2


class Tensor:
    """As PyTorch's: it shares memory by DLPack, without its gradient, on a device."""

    device = "cpu"

    def __init__(self, data, gradient=True):
        self.data, self.gradient = data, gradient

    def detach(self):
        return Tensor(self.data, gradient=False)

    def cpu(self):
        return self

    def to(self, device):
        assert device == self.device
        return self

    def __dlpack__(self, **options):
        if self.gradient:
            raise BufferError("Can't export tensors that require gradient")
        # Of an array of JAX, since NumPy's own export no bfloat16.
        return jnp.asarray(self.data).__dlpack__(**options)

    def __dlpack_device__(self):
        return jnp.asarray(self.data).__dlpack_device__()

    @property
    def dtype(self):
        return self.data.dtype

    def view(self, dtype):
        return Tensor(self.data.view(dtype), gradient=False)

    def __array_namespace__(self):
        made = lambda x: Tensor(np.from_dlpack(x).copy(), gradient=False)
        return SimpleNamespace(from_dlpack=made)


class Plain:
    """An array that says what it holds, and has nothing else."""

    def __init__(self, data):
        self.data = data

    def __array__(self, dtype=None, copy=None):
        return np.array(self.data, dtype)

    def __array_namespace__(self):
        return SimpleNamespace(asarray=Plain)


def torch_tensor(x):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy()).requires_grad_()


KINDS = {
    "jax": jnp.asarray,
    "numpy": np.array,
    "dlpack": Tensor,
    "array": Plain,
    "torch": torch_tensor,
}


def start(dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.asarray(rng.normal(size=shape), dtype)
    return {"w": draw(8, 16), "b": draw(16), "scale": draw()}


def run(store, name, make, dtype, **options):
    """Steps by numbers of the site's own. Returns the last parameters, as NumPy's."""
    outer = optax.sgd(1.0, momentum=0.5, nesterov=True)
    options |= {"every": EVERY, "max_lag": 0, "poll": 0.005, "outer": outer}
    with sites.Site(store, name, **options) as site:
        given = jax.tree.map(make, start(dtype))
        kinds = {key: type(x) for key, x in given.items()}
        params = site.start(given)
        for step in range(STEPS):
            by = dtype((step + 1) * len(name) / 8)
            host = {key: _arrays.to_numpy(x) for key, x in params.items()}
            before = {key: make(np.asarray(x + by)) for key, x in host.items()}
            params = site.sync(before)
            assert {key: type(x) for key, x in params.items()} == kinds
            if (step + 1) % EVERY:  # nothing has landed
                assert all(params[key] is before[key] for key in params)
        assert site.metrics.counted == STEPS // EVERY
        return {key: _arrays.to_numpy(x) for key, x in params.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", [x for x in KINDS if x != "jax"])
def test_a_site_beside_one_of_jax_has_its_bits(kind, dtype):
    """Of one run, in which both wait for each other."""
    store, form = MemoryStore(), compressors.quantize(4, block=8)
    options = {"quorum": 2, "compressor": form}
    make = KINDS[kind]
    make(np.zeros(1, dtype))  # skips here what is not installed
    found = together(
        {
            "jax": lambda: run(store, "oslo", jnp.asarray, dtype, **options),
            "other": lambda: run(store, "roma", make, dtype, **options),
        },
        seconds=30,
    )
    for key, x in found["jax"].items():
        assert found["other"][key].dtype == x.dtype == dtype
        assert found["other"][key].tobytes() == x.tobytes()
        assert np.abs(x - start(dtype)[key]).max() > 0


def test_a_loop_may_change_its_arrays_in_place():
    """A contribution under way holds a copy, and so does what comes back."""
    store, params = MemoryStore(), {"w": np.zeros(3, np.float32)}
    with sites.Site(store, "oslo", every=2, max_lag=0, poll=0.005) as site:
        params = site.start(params)
        for _ in range(6):
            params["w"] += 1
            params = site.sync(params)
            assert params["w"].flags.writeable
        anchor = site._worker.follower.outer.anchor[0]
        np.testing.assert_array_equal(anchor, 6.0)
        params["w"] += 1
        np.testing.assert_array_equal(anchor, 6.0)


REFUSED = [
    (np.zeros(2, int), r"\['x'\] is int64, and no floating-point array"),
    (3.0, r"\['x'\] is float, and no floating-point array"),
    ("w", r"\['x'\] is str, and no floating-point array"),
    (np.zeros(2), r"\['x'\] is float64, .*jax_enable_x64"),
]


@pytest.mark.parametrize(("x", "message"), REFUSED)
def test_what_cannot_be_trained_is_named(x, message):
    with sites.Site(MemoryStore(), "oslo") as site, pytest.raises(TypeError) as raised:
        site.start({"x": x})
    raised.match(message)


def test_an_array_of_a_library_without_a_way_back_is_refused():
    class OneWay:
        def __array__(self, dtype=None, copy=None):
            return np.zeros(2, np.float32)

        def __array_namespace__(self):
            return SimpleNamespace()

    with sites.Site(MemoryStore(), "oslo") as site:
        with pytest.raises(TypeError, match="is a OneWay, whose library makes nothing"):
            site.start({"x": OneWay()})


PROGRAM = """
import sys
import numpy as np
import curvadion_jax.sites
heavy = {"flax", "orbax", "torch", "obstore"} & sys.modules.keys()
assert not heavy, heavy
import jax
assert jax.config.jax_platforms is None
with curvadion_jax.sites.Site(sys.argv[1], "oslo") as site:
    site.start({"w": np.zeros(3, np.float32)})
assert jax.config.jax_platforms == "cpu"
"""


def test_a_program_without_jax_arrays_keeps_its_accelerators(tmp_path, monkeypatch):
    """And importing sites imports neither Flax nor Orbax."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_host_computes_what_sites_share_under_any_mesh(axis_type):
    """Sites with other devices have to find the same bits."""
    host, *others = jax.devices()
    mesh = Mesh(others[:2], ("fsdp",), axis_types=(axis_type,))
    seen = set()

    def update(updates, state, params=None):
        arrays = jax.tree.leaves(updates)
        seen.update(
            *(x.devices() for x in arrays if not isinstance(x, jax.core.Tracer))
        )
        return jax.tree.map(jnp.negative, updates), state

    outer = optax.GradientTransformation(lambda params: (), update)
    form = compressors.quantize(8)
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = {"w": jax.device_put(np.zeros((4, 8), np.float32), everywhere)}
    with (
        jax.set_mesh(mesh),
        sites.Site(
            MemoryStore(), "oslo", every=1, max_lag=0, outer=outer, compressor=form
        ) as site,
    ):
        params = site.start(params)
        params = site.sync(jax.tree.map(lambda x: x + 1, params))
        (encoder,) = (form.encoder for form in site._worker.follower.model._forms)
    assert seen == encoder.input_shardings[0][0].device_set == {host}
    np.testing.assert_array_equal(params["w"], 1.0)


def test_layers_that_share_a_parameter_share_it_afterwards():
    """JAX takes an nnx module for a tree, with two of a layer that is used twice."""

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(4, 4, rngs=rngs)
            self.second = self.first

    with sites.Site(MemoryStore(), "oslo", every=1, max_lag=0) as site:
        model = site.start(Tied(nnx.Rngs(0)))
        assert model.first is model.second
        model = site.leave(site.sync(model))
        assert model.first is model.second
