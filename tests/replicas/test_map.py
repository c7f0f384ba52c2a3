"""`map` runs a function of one replica on all rows; `lift` an Optax transformation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import replicas

REPLICAS = 4
# A float32 product of eight terms, vectorised in another way.
RTOL = 1e-6
DRAW = np.random.default_rng(0)
PARAMS = {
    "w": DRAW.normal(size=(REPLICAS, 8, 3)).astype(np.float32),
    "b": DRAW.normal(size=(REPLICAS, 3)).astype(np.float32),
}
X = DRAW.normal(size=(REPLICAS, 5, 8)).astype(np.float32)
MESHES = {
    "mesh": lambda: replicas.make_mesh(REPLICAS),
    "inner": lambda: replicas.make_mesh(REPLICAS, {"fsdp": 2}),
    "simulated": lambda: replicas.simulated(REPLICAS),
}
on_each_mesh = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
SMALL = replicas.simulated(2)


def loss_fn(params, x, scale=1.0):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return scale * jnp.mean(hidden**2)


def in_jit(function):
    """A program inside of the function's own, which has constants of its own."""
    return lambda *arguments: jax.jit(function)(*arguments) + 0


def row(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


@on_each_mesh
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_equal_those_of_a_list_of_replicas(mesh, wrap):
    of_one = jax.value_and_grad(loss_fn)
    found = wrap(replicas.map(of_one, mesh()))(PARAMS, X, scale=3.0)
    expected = [of_one(row(PARAMS, i), X[i], 3.0) for i in range(REPLICAS)]
    expected = jax.tree.map(lambda *x: np.stack(x), *expected)
    chex.assert_trees_all_close(found, expected, rtol=RTOL, atol=RTOL)


def test_one_replica_is_the_function_itself():
    assert replicas.map(loss_fn, None) is loss_fn


@on_each_mesh
def test_keyword_arguments_and_closed_over_arrays_are_common(mesh):
    table = jnp.arange(3.0)
    add = lambda x, common: x + table + common
    common = jnp.array([0.5, 1.0, 2.0])
    found = replicas.map(add, mesh())(jnp.zeros((REPLICAS, 3)), common=common)
    one = table + common
    np.testing.assert_allclose(found, np.stack([one] * REPLICAS), rtol=RTOL)


@on_each_mesh
def test_keys_are_rows_and_each_replica_has_its_own(mesh):
    keys = jax.random.split(jax.random.key(2), REPLICAS)
    draw = lambda key: (jax.random.uniform(key, (6,)), jax.random.fold_in(key, 1))
    numbers, new = jax.jit(replicas.map(draw, mesh()))(keys)
    expected = np.stack([jax.random.uniform(key, (6,)) for key in keys])
    np.testing.assert_allclose(numbers, expected, rtol=RTOL)
    assert new.shape == (REPLICAS,)
    assert (new[2] == jax.random.fold_in(keys[2], 1)).all()
    assert len({tuple(x) for x in np.asarray(numbers).tolist()}) == REPLICAS


@on_each_mesh
def test_a_replica_may_ask_for_its_number(mesh):
    number = lambda x: x + lax.axis_index(replicas.AXIS)
    found = replicas.map(number, mesh())(jnp.zeros(REPLICAS, jnp.int32))
    assert found.tolist() == [*range(REPLICAS)]


def test_results_are_rows_that_stay_sharded_inside_a_replica():
    mesh = MESHES["inner"]()
    place = NamedSharding(mesh, P("replica", None, "fsdp"))
    x = jax.device_put(np.ones((REPLICAS, 3, 4), np.float32), place)
    found = jax.jit(replicas.map(lambda x: (2 * x, 1.5), mesh))(x)
    assert found[0].sharding.is_equivalent_to(place, 3)
    assert found[1].tolist() == [1.5] * REPLICAS


def closed_over(params, x):
    return replicas.map(lambda p: loss_fn(p, x[0]), SMALL)(params)


def nested(params, x):
    inner = jax.jit(lambda p: loss_fn(p, x[0]))
    return replicas.map(
        lambda p: lax.scan(lambda c, _: (c, inner(p)), 0, None, 2), SMALL
    )(params)


@pytest.mark.parametrize("step", [closed_over, nested])
def test_traced_values_that_are_no_arguments_are_refused(step):
    params, x = jax.tree.map(lambda x: x[:2], (PARAMS, X))
    with pytest.raises(ValueError, match=r"are not its arguments.*\[.*by keyword"):
        jax.jit(step)(params, x)


def test_rows_by_keyword_are_refused_where_they_lie_on_devices():
    mesh = replicas.make_mesh(REPLICAS)
    labels = replicas.split({"y": jnp.ones(REPLICAS)}, mesh)
    with pytest.raises(ValueError, match=r"'batch' has a row for each.*by position"):
        replicas.map(lambda batch: batch["y"], mesh)(batch=labels)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@on_each_mesh
def test_a_key_is_split_for_the_replicas(mesh, make_key):
    """By keyword all replicas would draw the same numbers."""
    draw = replicas.map(lambda x, key: x * jax.random.uniform(key), mesh())
    ones, key = jnp.ones(REPLICAS), make_key(0)
    with pytest.raises(ValueError, match=r"jax\.random\.split\(key, replicas\)"):
        draw(ones, key)
    with pytest.warns(UserWarning, match="'key' has a random key"):
        draw(ones, key=key)
    closed = replicas.map(lambda x: x * jax.random.uniform(key), mesh())
    with pytest.warns(UserWarning, match="uses a random key that"):
        closed(ones)
    assert len({*draw(ones, jax.random.split(key, REPLICAS)).tolist()}) == REPLICAS


@on_each_mesh
def test_a_key_may_be_folded_with_the_number_of_the_replica(mesh):
    def draw(x, key):
        key = jax.random.fold_in(key, jax.lax.axis_index(replicas.AXIS))
        return x * jax.random.uniform(key)

    key = jax.random.key(0)
    with pytest.warns(UserWarning, match="has a random key"):
        drawn = replicas.map(draw, mesh())(jnp.ones(REPLICAS), key=key)
    fold = lambda i: jax.random.uniform(jax.random.fold_in(key, i))
    np.testing.assert_array_equal(drawn, [fold(i) for i in range(REPLICAS)])


GLOBAL_KEY, GLOBAL_NUMBERS = jax.random.key(1), jax.random.PRNGKey(1)
BATCH = np.arange(4.0, dtype=np.float32).reshape(2, 2)


class Held:
    """An object whose bound method is mapped."""

    def __init__(self, held):
        self.held = held

    def draw(self, x):
        return x * jax.random.uniform(self.held)

    def loss(self, w):
        return jnp.sum(w * self.held)


def default_key(x, key=GLOBAL_KEY):
    return x * jax.random.uniform(key)


# Each replica draws the same numbers.
WITH_A_KEY = {
    "global key": lambda x: x * jax.random.uniform(GLOBAL_KEY),
    "global numbers": lambda x: x * jax.random.uniform(GLOBAL_NUMBERS),
    "global key of a step": lambda x, step=3: (
        x * jax.random.uniform(jax.random.fold_in(GLOBAL_KEY, step))
    ),
    "default": default_key,
    "bound method": Held(GLOBAL_KEY).draw,
    "inner jit": lambda x: jax.jit(lambda y: y * jax.random.uniform(GLOBAL_KEY))(x),
    "scan": lambda x: lax.scan(
        lambda c, _: (c * jax.random.uniform(GLOBAL_KEY), ()), x, None, 2
    )[0],
}


@pytest.mark.parametrize("name", WITH_A_KEY)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_key_that_is_no_argument_is_warned_of(name, wrap):
    run = wrap(replicas.map(WITH_A_KEY[name], SMALL))
    with pytest.warns(UserWarning, match="uses a random key that is not its argument"):
        drawn = run(jnp.ones(2))
    assert drawn[0] == drawn[1]


def test_a_global_key_may_be_folded_with_the_number_of_the_replica():
    def draw(x):
        key = jax.random.fold_in(GLOBAL_KEY, lax.axis_index(replicas.AXIS))
        return x * jax.random.uniform(key)

    drawn = replicas.map(draw, SMALL)(jnp.ones(2))
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("array", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.grad, in_jit])
def test_rows_that_an_object_holds_are_warned_of(array, wrap):
    run = replicas.map(wrap(Held(array(BATCH)).loss), SMALL)
    with pytest.warns(UserWarning, match=r"shape \(2, 2\) that is not its argument"):
        run(jnp.ones(2))


def test_small_tables_are_common():
    """Vectors of a function's own, and matrices beside other tables."""
    table = np.ones((3, 4), np.float32)

    def use(w):
        weights, matrix = jnp.array([0.2, 0.8]), jnp.array([[1.0, 2.0], [3.0, 4.0]])
        return w * jnp.sum(weights) * jnp.sum(matrix) * jnp.sum(table)

    assert replicas.map(use, SMALL)(jnp.ones(2)).shape == (2,)


def test_rows_on_devices_that_an_inner_jit_captures_are_refused():
    mesh = replicas.make_mesh(2)
    batch = replicas.split(np.ones((4, 3), np.float32), mesh)
    inner = jax.jit(lambda w: jnp.sum(w) * jnp.sum(batch))
    with pytest.raises(ValueError, match="arrays that are not its arguments"):
        replicas.map(inner, mesh)(replicas.replicate(jnp.ones(3), mesh))


@pytest.mark.parametrize("dtype", ["bf16", None])
def test_a_function_may_close_over_what_is_no_array(dtype):
    class Config:
        shape = (2,)

    config = Config()
    if dtype:
        config.dtype = dtype
    run = replicas.map(lambda x: x * len(config.shape), SMALL)
    assert run(jnp.ones(2)).tolist() == [1, 1]


def test_one_replica_may_hold_a_key():
    key = jax.random.key(0)
    run = replicas.map(lambda x: x * jax.random.uniform(key), replicas.simulated(1))
    assert run(jnp.ones(1)).shape == (1,)


def test_a_mean_over_an_axis_of_pmap_is_explained():
    mean = replicas.map(lambda x: jax.lax.pmean(x, "batch"), SMALL)
    with pytest.raises(ValueError, match=r"an axis 'batch', which.*drop the pmean"):
        mean(jnp.ones(2))


@on_each_mesh
def test_what_looks_like_rows_by_keyword_is_warned_of(mesh):
    """Under jit nobody knows, and labels [R, n] would broadcast in silence."""
    mesh = mesh()
    step = jax.jit(lambda x, y: replicas.map(lambda x, y: x[None] - y, mesh)(x, y=y))
    with pytest.warns(UserWarning, match=r"'y' has shape \(4, 3\).*by position"):
        step(jnp.ones((REPLICAS, 3)), jnp.ones((REPLICAS, 3)))


TABLE = np.ones((3, 4), np.float32)


def test_what_looks_like_captured_rows_on_one_device_is_warned_of():
    """A tree with other arrays in it, such as of constants, is common."""
    constants = {"slopes": jnp.ones(2), "scale": jnp.ones(3)}
    replicas.map(lambda w: w * constants["scale"][0], SMALL)(jnp.ones(2))
    batch = jnp.arange(4.0).reshape(2, 2)
    of_batch = lambda batch, w: jnp.sum(w * batch)
    held = functools.partial(of_batch, batch)
    beside_a_table = lambda w: of_batch(batch, w) * jnp.sum(TABLE)
    for use in (lambda w: of_batch(batch, w), held, jax.grad(held), beside_a_table):
        use = replicas.map(use, SMALL)
        with pytest.warns(UserWarning, match=r"shape \(2, 2\).*pass it as an argum"):
            use(jnp.ones(2))


class Counter(nnx.Module):
    def __init__(self):
        self.n = nnx.Variable(jnp.zeros(2))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_module_that_is_changed_and_not_returned_is_warned_of(wrap):
    """Each replica's is a new object."""

    def count(module, x):
        module.n[...] += x
        return x

    def counted(module, x):
        return count(module, x), nnx.state(module)

    run = lambda f: wrap(replicas.map(f, SMALL))(Counter(), jnp.ones(2))
    with pytest.warns(UserWarning, match=r"in place.*return.*nnx\.state"):
        run(count)
    assert run(counted)[1]["n"][...].tolist() == [1.0, 1.0]


def test_a_dict_may_be_changed_in_place():
    """As anywhere under jit, what is not returned is not kept."""

    def loss(w, batch):
        batch["x"] = batch["x"] / 2
        return jnp.sum(w * batch["x"]), batch

    run = replicas.map(jax.value_and_grad(loss, has_aux=True), SMALL)
    (_, batch), _ = run(jnp.ones((2, 3)), {"x": jnp.ones((2, 3))})
    assert batch["x"].tolist() == [[0.5] * 3] * 2


def test_a_function_may_close_over_a_mesh():
    mesh = replicas.make_mesh(2)
    use = replicas.map(lambda w: w * mesh.size, mesh)
    assert use(jnp.ones(2)).tolist() == [2.0, 2.0]


def test_a_tree_with_other_arrays_by_keyword_is_common():
    """Frozen parameters with as many layers as there are replicas."""
    base = {"layers": jnp.ones((2, 3)), "head": jnp.ones(3)}
    use = replicas.map(lambda x, base: x + base["layers"][0] + base["head"], SMALL)
    assert use(jnp.ones((2, 3)), base=base).shape == (2, 3)


def test_one_replica_may_be_given_an_axis_of_one_by_keyword():
    use = replicas.map(lambda x, scale: x * scale[0], replicas.simulated(1))
    assert use(jnp.ones((1, 3)), scale=jnp.ones((1, 3))).shape == (1, 3)


@on_each_mesh
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_differentiating_from_outside_is_refused(mesh, wrap):
    """Of a mean over the replicas gradients are too small, and Muon hides it."""
    mesh = mesh()
    mapped = wrap(replicas.map(loss_fn, mesh))
    outside = lambda params, x: jnp.mean(mapped(params, x))
    with pytest.raises(ValueError, match=r"would divide every gradient.*map\(jax.grad"):
        jax.grad(outside)(PARAMS, X)


def test_what_is_not_differentiated_may_be_mapped_inside():
    """Such as a metric beside the loss, of what has no gradient."""
    double = replicas.map(lambda x: 2 * x, SMALL)
    gradient = jax.grad(lambda p, x: jnp.sum(p * jax.lax.stop_gradient(double(x))))
    assert gradient(jnp.ones(2), jnp.ones(2)).tolist() == [2.0, 2.0]


def test_traced_parameters_that_are_no_arguments_are_refused():
    """As where a loss takes its parameters from the enclosing step."""

    def step(params, x):
        return replicas.map(lambda x: loss_fn(row(params, 0), x), SMALL)(x)

    with pytest.raises(ValueError, match="uses arrays that are not its"):
        jax.jit(step)(PARAMS, X[:2])


def test_rows_that_are_no_arguments_are_refused_outside_of_jit():
    mesh = replicas.make_mesh(REPLICAS)
    batch = replicas.split(jnp.ones((2 * REPLICAS, 3)), mesh)
    params = replicas.replicate(jnp.ones(3), mesh)
    run = replicas.map(jax.grad(lambda p: jnp.sum(batch) * jnp.sum(p)), mesh)
    with pytest.raises(ValueError, match="uses arrays that are not its"):
        run(params)


@pytest.mark.parametrize("value", [np.zeros((3, 2)), np.zeros(()), 1.0], ids=str)
def test_arguments_without_a_row_for_each_replica_are_refused(value):
    add = replicas.map(lambda x, y: x + y["a"], SMALL)
    with pytest.raises(ValueError, match=r"Argument 1\['a'\] has shape .* of 2 repl"):
        add(np.zeros((2, 2)), {"a": value})


def in_scan(f):
    return lambda x: lax.scan(lambda carry, _: (f(carry), ()), x, None, length=2)[0]


def in_cond(f):
    return lambda x: lax.cond(jnp.sum(x) > 0, f, lambda x: x, x)


def in_custom_vjp(f):
    of_one = jax.custom_vjp(f)
    of_one.defvjp(lambda x: (f(x), ()), lambda _, g: (g,))
    return of_one


def in_backward(f):
    """Only where it is differentiated."""
    of_one = jax.custom_vjp(lambda x: 2 * x)
    of_one.defvjp(lambda x: (2 * x, ()), lambda _, g: (f(g),))
    return jax.grad(lambda x: jnp.sum(of_one(x)))


COLLECTIVES = {
    "pmean": lambda x: lax.pmean(x, "replica"),
    "psum": lambda x: lax.psum(x, ("replica",)),
    "pmax": lambda x: lax.pmax(x, "replica"),
    "all_gather": lambda x: lax.all_gather(x, "replica").sum(0),
    "ppermute": lambda x: lax.ppermute(x, "replica", [(0, 1)]),
    "psum_scatter": lambda x: lax.psum_scatter(x, "replica", tiled=True),
}
WRAPPERS = (in_scan, in_cond, in_custom_vjp, in_backward, jax.jit, jax.checkpoint)


@pytest.mark.parametrize("wrap", [lambda f: f, *WRAPPERS])
@pytest.mark.parametrize("mesh", [MESHES["mesh"], MESHES["simulated"]])
def test_collectives_are_refused_however_deep(wrap, mesh):
    function = replicas.map(wrap(COLLECTIVES["pmean"]), mesh())
    with pytest.raises(ValueError, match=r"calls .* over 'replica'.*drop the pmean"):
        jax.jit(function)(jnp.ones((REPLICAS, 2)))


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_refused(name):
    function = replicas.map(COLLECTIVES[name], MESHES["mesh"]())
    with pytest.raises(ValueError, match="over 'replica'"):
        function(jnp.ones((REPLICAS, REPLICAS)))


def test_a_mean_over_another_axis_is_allowed():
    mean = jax.vmap(lambda x: lax.pmean(x, "models"), axis_name="models")
    found = replicas.map(mean, SMALL)(jnp.arange(4.0).reshape(2, 2))
    assert found.tolist() == [[0.5, 0.5], [2.5, 2.5]]


@pytest.mark.parametrize("make", [replicas.map, replicas.lift])
def test_what_is_no_mesh_is_refused(make):
    with pytest.raises(TypeError, match=r"mesh must be what replicas\.make_mesh"):
        make(optax.identity(), 8)


@on_each_mesh
def test_a_lifted_transformation_sees_one_replica(mesh):
    mesh = mesh()
    clip = replicas.lift(optax.clip_by_global_norm(1.0), mesh)
    gradients = jax.tree.map(lambda x: (x.T * np.arange(1, 5)).T, PARAMS)
    found, _ = jax.jit(clip.update)(gradients, clip.init(gradients))
    norms = [float(optax.tree.norm(row(found, i))) for i in range(REPLICAS)]
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


def test_a_lifted_state_has_rows():
    adam = replicas.lift(optax.adam(0.1), SMALL)
    params = jax.tree.map(lambda x: x[:2], PARAMS)
    state = adam.init(params)
    assert state[0].count.shape == (2,)
    updates, state = adam.update(params, state, params)
    assert state[0].count.tolist() == [1, 1]
    chex.assert_trees_all_equal_shapes(updates, params)


def test_a_lifted_transformation_may_have_injected_hyperparameters():
    make = lambda rate: replicas.lift(optax.scale(rate), SMALL)
    tx = optax.inject_hyperparams(make)(rate=optax.linear_schedule(1.0, 0.0, 2))
    rows, found = jnp.ones((2, 3)), []
    state = tx.init(rows)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(rows, state)
        found.append(float(updates[1, 2]))
    assert found == [1.0, 0.5]


def test_a_python_number_among_rows_is_refused_with_the_remedy():
    """Such as the rate of an Equinox dropout."""
    with pytest.raises(ValueError, match=r"\['p'\].*is no array.*eqx\.partition"):
        replicas.map(lambda model: model["w"], SMALL)({"w": jnp.ones(2), "p": 0.1})


def test_an_optimizer_of_rows_is_not_lifted():
    """Each replica would train alone, and audit would find no fault."""
    tx = replicas.lift(optax.chain(cd.local_muon(0.1)), SMALL)
    with pytest.raises(ValueError, match=r"are of rows already.*Pass mesh="):
        tx.init({"kernel": jnp.ones((2, 3, 3))})


def test_extra_arguments_that_are_rows_are_named():
    """Each replica's own loss, and a factor that all share."""

    def update(updates, state, params=None, *, value, factor):
        return updates * value * factor, state

    of_one = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = replicas.lift(of_one, SMALL, rows=["value"])
    given = {"value": jnp.array([1.0, 3.0]), "factor": 2.0}
    updates, _ = tx.update(jnp.ones((2, 2)), tx.init(jnp.ones((2, 2))), **given)
    assert updates.tolist() == [[2, 2], [6, 6]]
    with pytest.raises(ValueError, match="a row for each of 2 replicas"):
        tx.update(jnp.ones((2, 2)), (), **given | {"value": 1.0})
