"""Parts of a model as pure functions: Flax linen modules, nnx factories, or plain functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen, nnx
from flax.errors import ScopeParamShapeError

Tree = Any


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a model: how to make its parameters, and how to apply them.

    Plain functions come into a pipeline as one of these.

    Attributes:
      init: (key, *inputs) -> parameters, nested dicts with string keys. Inputs may be `jax.ShapeDtypeStruct`s.
      apply: (parameters, key, *inputs) -> outputs. The key is None in evaluation, else it seeds dropout. Parts made
        from Flax modules also take `method`, the name of the module's method to call instead of the module.
      split: dot paths of parameters that are cut along their first axis over the pipeline's devices, such as tables by
        vocabulary. `apply` then takes the keyword `axis`: None for whole parameters; or the name of the mesh axis, on
        every device of which it runs at once, with that device's rows of each such parameter (rows of zeros fill up
        the last shares) and otherwise equal arguments, and returns the same whole result on all. Its `jax.vjp` for one
        cotangent, the same on all, gives the gradient of that device's rows, and of everything else the whole gradient
        on all. Flax modules say it by a class attribute `split_parameters`, and take `axis` in their call; a linen
        module then asks for so many rows as `jax.lax.axis_size(axis)` devices leave it, rounded up.

    Raises:
      ValueError: `split` is a string, or `apply` does not take `axis` though something is split.
    """

    init: Callable[..., Tree]
    apply: Callable[..., Any]
    split: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_split("pj.Part", self.split, "apply", self.apply)


def as_part(module: Any, role: str) -> Part:
    """A model piece as a `Part`.

    Args:
      module: a linen module; an nnx factory, that is a class or any callable that takes the keyword `rngs` and returns
        an `nnx.Module`; or a `Part`.
      role: "embed", "block" or "head", for messages.

    Raises:
      ValueError: it is none of these, or holds state other than parameters and random streams.
    """
    if isinstance(module, Part):
        return module
    if isinstance(module, linen.Module):
        return Part(
            init=functools.partial(_linen_init, module, role),
            apply=functools.partial(_linen_apply, module),
            split=_split(module, role),
        )
    if isinstance(module, type) and issubclass(module, linen.Module):
        raise ValueError(f"{role}: {module.__name__} is a linen class; pass an instance of it.")
    if isinstance(module, nnx.Module) or not callable(module):
        raise ValueError(
            f"{role}: pass a linen module, a pj.Part of functions, or a callable that takes `rngs` and makes an nnx "
            f"module (a class or functools.partial), not {type(module).__name__}."
        )
    return _nnx_part(module, role)


def _linen_init(module: linen.Module, role: str, key: jax.Array, *inputs: Any) -> Tree:
    arrays = [jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), value) for value in inputs]
    params, dropout = jax.random.split(key)
    variables = module.init({"params": params, "dropout": dropout}, *arrays, **_deterministic(module, None, True))  # type: ignore[arg-type]
    extra = sorted(set(variables) - {"params"})
    if extra:
        raise ValueError(
            f"{role}: {type(module).__name__} keeps {', '.join(extra)} besides its parameters; a pipelined part must "
            "be a function of parameters and inputs, so take that state out (LayerNorm in place of BatchNorm, say)."
        )
    return linen.meta.unbox(variables.get("params", {}))


def _split(module: Any, role: str) -> tuple[str, ...]:
    paths = getattr(module, "split_parameters", ())
    if paths:
        _check_split(f"{role}: {type(module).__name__}", paths, "__call__", module.__call__)
    return tuple(paths)


def _check_split(who: str, paths: Any, name: str, function: Callable[..., Any]) -> None:
    if isinstance(paths, str):
        raise ValueError(f"{who} splits the string {paths!r}; name parameters in a tuple, as in ({paths!r},).")
    if paths and not _takes(function, "axis"):
        raise ValueError(
            f"{who} splits {', '.join(paths)} over devices, but its {name} does not take the keyword `axis`, which "
            "names them; add it (None means whole parameters), or split nothing."
        )


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(item.kind is item.VAR_KEYWORD for item in parameters.values())


def _linen_apply(
    module: linen.Module, params: Tree, key: Any, *inputs: Any, method: str | None = None, **axis: str | None
) -> Any:
    rngs = None if key is None else {"dropout": key}
    extra = _deterministic(module, method, key is None)
    try:
        return module.apply({"params": params}, *inputs, rngs=rngs, method=method, **extra, **axis)  # type: ignore[arg-type]
    except ScopeParamShapeError as error:
        if axis.get("axis") is None:
            raise
        raise ValueError(
            f"{type(module).__name__} asks for whole parameters though `axis` is given; let it ask for "
            f"-(-rows // jax.lax.axis_size(axis)) rows of those that it splits. flax says: {error}"
        ) from error


def _deterministic(module: linen.Module, method: str | None, value: bool) -> dict[str, bool]:
    takes = inspect.signature(getattr(module, method or "__call__")).parameters
    return {"deterministic": value} if "deterministic" in takes else {}


def _nnx_part(factory: Callable[..., nnx.Module], role: str) -> Part:
    def make(key: jax.Array) -> nnx.Module:
        params, dropout = jax.random.split(key)
        # The first is for streams of any other name, which nnx gives to whoever asks.
        return factory(rngs=nnx.Rngs(jax.random.fold_in(key, 2), params=params, dropout=dropout))

    try:
        abstract = nnx.eval_shape(lambda: make(jax.random.key(0)))
    except TypeError as error:
        if "unexpected keyword argument 'rngs'" not in str(error):
            raise
        raise ValueError(
            f"{role}: {factory!r} does not take the keyword `rngs`; wrap it, as in "
            "functools.partial(Block, config), so that pipejax can call it with rngs=nnx.Rngs(...)."
        ) from error
    if not isinstance(abstract, nnx.Module):
        raise ValueError(f"{role}: {factory!r} must return an nnx.Module when called with `rngs`.")
    graph, *states = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
    params, streams, rest = states
    extra = sorted({".".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)} | _arrays_made(abstract))
    if extra:
        raise ValueError(
            f"{role}: {type(abstract).__name__} keeps state besides its parameters ({', '.join(extra)}); a pipelined "
            "part must be a function of parameters and inputs, so take that state out (LayerNorm in place of "
            "BatchNorm, a constant computed in __call__)."
        )

    def init(key: jax.Array, *inputs: Any) -> Tree:
        del inputs  # an nnx module knows its shapes
        return _to_strings(nnx.to_pure_dict(nnx.state(make(key), nnx.Param)))

    def apply(values: Tree, key: Any, *inputs: Any, method: str | None = None, **axis: str | None) -> Any:
        state = _filled(params, _from_strings(nnx.to_pure_dict(params), values))
        module = nnx.merge(graph, state, _filled(streams, _seed(nnx.to_pure_dict(streams), key)))
        (module.eval if key is None else module.train)()
        return (getattr(module, method) if method else module)(*inputs, **axis)

    return Part(init=init, apply=apply, split=_split(abstract, role))


def _arrays_made(module: nnx.Module) -> set[str]:
    """Names of plain attributes that hold arrays made while tracing, which nnx takes for static values."""
    return {
        ".".join(map(str, (*path, name)))
        for path, node in nnx.iter_modules(module)
        for name, value in vars(node).items()
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    }


def _filled(abstract: Any, values: Tree) -> Any:
    """A copy of an abstract nnx state with values put in."""
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, values)
    return state


def _seed(streams: Tree, key: Any) -> Tree:
    """Values for random streams: each gets a key of its own, so that no two dropouts of a module are alike."""
    base = jax.random.key(0) if key is None else key
    leaves, tree = jax.tree.flatten(streams)
    values = [
        jax.random.fold_in(base, index)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jax.numpy.zeros(leaf.shape, leaf.dtype)
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, values)


def _to_strings(tree: Tree) -> Tree:
    """Nested dicts with the positions of nnx lists as string keys, as checkpoints and optimizers like them."""
    return {str(name): _to_strings(item) for name, item in tree.items()} if isinstance(tree, dict) else tree


def _from_strings(like: Tree, tree: Tree) -> Tree:
    return (
        {name: _from_strings(item, tree[str(name)]) for name, item in like.items()} if isinstance(like, dict) else tree
    )
