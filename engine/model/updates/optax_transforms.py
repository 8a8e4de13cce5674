"""Row-local optax transforms as update rules of tables in a user's step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.errors import UsageError, UsageTypeError
from penstock.model.frames import Float32
from penstock.model.updates.rule import Array, UpdateRule

# The probe of a transform: rows of different sizes, updated a few times together and alone. No axis of another array
# is likely to have these lengths.
ROWS, DIM, STEPS = 6, 5, 3
SCALES = (1e-3, 1.0, 1e6)
# States of transforms of optax whose update of a row arrives in a later step, in which the row may have no lookup.
POSTPONING = ("MultiStepsState", "ApplyEvery")


@contextmanager
def own_promotions() -> Iterator[None]:
    """Trace with JAX's ordinary promotions of ranks and types, whatever the caller has set for other programs."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@dataclass(frozen=True, eq=False)
class OptaxRule:
    """The update of rows by an optax transform; ``from_optax`` creates it.

    Attributes
    ----------
    transform : optax.GradientTransformation
        The transform.
    starts : tuple of float
        Initial values of the slots, which are the parts of its state that have a row's shape.
    numbers : tuple
        The other parts at the start, each one number, such as a count of steps.
    is_slot : tuple of bool
        Of every leaf of its state, in order.
    """

    transform: Any
    starts: tuple[float, ...]
    numbers: tuple[Any, ...]
    is_slot: tuple[bool, ...]

    @property
    def num_slots(self) -> int:
        return len(self.starts)

    def at(self, numbers: tuple[Array, ...], dim: int) -> tuple[UpdateRule, tuple[Array, ...]]:
        """Return the rule of one step, and the numbers of the next.

        Parameters
        ----------
        numbers : tuple of array
            At this step.
        dim : int
            Of the table.

        Returns
        -------
        rule : UpdateRule
            Of this step.
        numbers : tuple of array
            Of the next step.
        """
        import jax
        import jax.numpy as jnp

        structure = jax.tree.structure(jax.eval_shape(self.transform.init, jnp.zeros((1, dim))))

        def step(g: Array, w: Array, *slots: Array) -> tuple[Array, ...]:
            parts = {True: iter(slots), False: iter(numbers)}
            state = jax.tree.unflatten(structure, [next(parts[is_slot]) for is_slot in self.is_slot])
            updates, state = self.transform.update(g, state, w)
            return (w + updates, *_of_kind(self.is_slot, state, True), *_of_kind(self.is_slot, state, False))

        row = jnp.zeros((1, dim), jnp.float32)
        with own_promotions():
            following = step(row, row, *(jnp.full_like(row, start) for start in self.starts))[1 + self.num_slots :]

        def program(g: Array, w: Array, *slots: Array) -> tuple[Array, ...]:
            return step(g, w, *slots)[: 1 + self.num_slots]

        return UpdateRule("user_defined_program", self.num_slots, program=program), following


def from_optax(transform: Any) -> OptaxRule:
    """Return the update rule of an optax transform, for ``penstock.bridge.apply`` and ``EmbeddingTables``.

    Parameters
    ----------
    transform : optax.GradientTransformation
        It contains its learning rate.

    Returns
    -------
    OptaxRule

    Raises
    ------
    UsageTypeError
        If ``transform`` is no optax.GradientTransformation.
    UsageError
        If the update of a row depends on other rows, as with ``optax.clip_by_global_norm`` or ``apply_if_finite``, if
        it is postponed to another step, as with ``optax.MultiSteps``, or if a slot does not start as a constant.

    Notes
    -----
    Only rows with a lookup are updated: the moments of other rows do not decay, and weight decay does not reach them.
    State of a row's shape is a slot; single numbers, such as a count of steps, belong to the table and advance with
    each step.

    A few rows are updated together and alone to find out whether they depend on each other, so a dependency that shows
    only beyond gradients of 1e-5 to 1e8 is not noticed.

    Examples
    --------
    >>> import optax
    >>> import penstock as ps
    >>> ps.updates.from_optax(optax.adam(0.1)).num_slots
    2
    """
    if not callable(getattr(transform, "init", None)) or not callable(getattr(transform, "update", None)):
        got = type(transform).__name__
        raise UsageTypeError(f"from_optax: expected an optax.GradientTransformation, got {got}")
    rng = np.random.default_rng(0)
    try:
        with own_promotions():
            rule = _classified(transform, rng.standard_normal((ROWS, DIM)).astype(np.float32))
            depends = any(_depends_on_other_rows(transform, rule.is_slot, scale, rng) for scale in SCALES)
            depends = depends or _depends_on_finite_rows(transform, rule.is_slot)
    except UsageError:
        raise
    except Exception as error:  # a transform may raise any type
        reason = str(error).partition("\n")[0]
        raise UsageError(f"from_optax: the transform fails for a table: {type(error).__name__}: {reason}") from error
    if depends:
        raise UsageError(
            "from_optax: the update of a row depends on other rows, as with clip_by_global_norm; use a transform that "
            "treats each row alone"
        )
    return rule


def _classified(transform: Any, weights: Float32) -> OptaxRule:
    """Return the rule, from the transform's state at the start. Raises UsageError for state that no table can keep."""
    import jax

    starts, numbers, is_slot = [], [], []
    state = transform.init(jax.numpy.asarray(weights))
    for node in jax.tree.leaves(state, is_leaf=lambda node: type(node).__name__ in POSTPONING):
        if type(node).__name__ in POSTPONING:
            raise UsageError(
                f"from_optax: the transform keeps gradients for a later step ({type(node).__name__}), and a row is "
                "updated only in the steps that look it up; use larger batches"
            )
    leaves, _ = jax.tree.flatten(jax.tree.map(np.asarray, state))
    for leaf in leaves:
        is_slot.append(leaf.shape == weights.shape)
        if leaf.shape == ():
            numbers.append(leaf)
        elif leaf.shape != weights.shape or leaf.dtype != np.float32:
            got = f"{leaf.dtype} {list(leaf.shape)} for weights {list(weights.shape)}"
            raise UsageError(f"from_optax: expected state of the shape of the weights or single numbers, got {got}")
        elif (leaf != leaf.flat[0]).any():
            raise UsageError(
                "from_optax: expected state that starts as a constant, got one that depends on the weights"
            )
        else:
            starts.append(float(leaf.flat[0]))
    return OptaxRule(transform, tuple(starts), tuple(numbers), tuple(is_slot))


def _depends_on_other_rows(transform: Any, is_slot: tuple[bool, ...], scale: float, rng: np.random.Generator) -> bool:
    shape = (STEPS, ROWS, DIM)
    gradients = rng.standard_normal(shape) * scale * np.logspace(-2, 2, ROWS)[:, None]
    weights = rng.standard_normal((ROWS, DIM))
    together = list(_stepped(transform, is_slot, weights, gradients))
    alone = [
        list(_stepped(transform, is_slot, weights[row : row + 1], gradients[:, row : row + 1])) for row in range(ROWS)
    ]
    for whole, *rows in zip(together, *alone, strict=True):
        joined = np.concatenate(rows) if whole.ndim else np.asarray(rows)
        if not np.allclose(whole, joined, rtol=1e-4, atol=1e-6 * np.abs(joined).max(initial=0), equal_nan=True):
            return True
    return False


def depends_on_num_rows(transform: Any, num_rows: int, dim: int) -> bool:
    """Return whether a transform is another program for a whole table than for one row, as with a mask by shape."""
    return _program(transform, num_rows, dim) != _program(transform, 1, dim)


def _program(transform: Any, num_rows: int, dim: int) -> str:
    """Return the text of a transform's program, without the lengths of axes and its line breaks."""
    import jax

    def step(g: Array, w: Array) -> Any:
        return transform.update(g, transform.init(w), w)

    rows = jax.ShapeDtypeStruct((num_rows, dim), np.float32)
    with own_promotions():
        text = str(jax.make_jaxpr(step)(rows, rows))
    return re.sub(r"(?<=[\[(, ])\d+(?=[,\])])|0x[0-9a-f]+|\s+", "", text)


def _depends_on_finite_rows(transform: Any, is_slot: tuple[bool, ...]) -> bool:
    """Return whether an infinite gradient of the first row changes the update of another one."""
    import jax

    weights = np.ones((2, DIM))
    gradients = np.stack([weights * np.inf, weights])[None, :, 0]
    num_arrays = 1 + sum(is_slot)
    with jax.debug_nans(False), jax.debug_infs(False):
        together = list(_stepped(transform, is_slot, weights, gradients))[:num_arrays]
        alone = list(_stepped(transform, is_slot, weights[1:], gradients[:, 1:]))[:num_arrays]
    return not all(
        np.allclose(whole[1:], row, rtol=1e-4, atol=1e-6) for whole, row in zip(together, alone, strict=True)
    )


def _stepped(transform: Any, is_slot: tuple[bool, ...], weights: Any, gradients: Any) -> Iterator[npt.NDArray[Any]]:
    """Yield the weights, slots and numbers after some steps."""
    import jax.numpy as jnp

    w = jnp.asarray(weights, jnp.float32)
    state = transform.init(w)
    for g in gradients:
        updates, state = transform.update(jnp.asarray(g, jnp.float32), state, w)
        w = w + updates
    yield from map(np.asarray, (w, *_of_kind(is_slot, state, True), *_of_kind(is_slot, state, False)))


def _of_kind(is_slot: tuple[bool, ...], state: Any, slots: bool) -> list[Array]:
    import jax

    return [leaf for leaf, leaf_is_slot in zip(jax.tree.leaves(state), is_slot, strict=True) if leaf_is_slot == slots]
