"""The update equations by themselves: the order of the switches, what each must do exactly, NumPy against XLA."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.model.updates import UPDATES, Ops, UpdateRule, quantize, update
from penstock.rows.bridge.programs import _rounded

NUMPY = Ops(np)


def apply_once(rule, w, g, lr=0.5, slots=()):
    """One weight after one update."""
    return after(rule, w, g, lr, slots)[0]


def after(rule, w, g, lr=0.5, slots=()):
    """One weight and its slots after one update, in float32."""
    new, slots = update(NUMPY, rule, np.float32(lr), np.float32([g]), np.float32([w]), tuple(np.float32([slots]).T))
    return [float(new[0]), *(float(slot[0]) for slot in slots)]


# ---- the switches


def test_the_gradient_is_clipped_before_it_is_used():
    rule = UpdateRule("stochastic_gradient_descent", 0, gradient_min=-1.0, gradient_max=2.0)
    assert apply_once(rule, 0.0, 10.0) == -1.0
    assert apply_once(rule, 0.0, -10.0) == 0.5


def test_reversed_limits_give_the_upper_one():
    assert apply_once(UpdateRule("stochastic_gradient_descent", 0, weight_min=3.0, weight_max=-3.0), 0.0, 0.0) == -3.0


def test_the_weight_decays_before_the_update_and_is_clipped_after_it():
    rule = UpdateRule("stochastic_gradient_descent", 0, weight_decay=0.25, weight_max=1.0)
    assert apply_once(rule, 2.0, 2.0) == 0.5  # 2 - 0.25*2 - 0.5*2
    assert apply_once(rule, 4.0, 2.0) == 1.0  # 4 - 0.25*4 - 0.5*2 = 2, clipped


def test_decay_times_learning_rate():
    rule = UpdateRule("stochastic_gradient_descent", 0, weight_decay=0.25, decay_times_learning_rate=True)
    assert apply_once(rule, 2.0, 0.0, lr=0.5) == 2.0 - 0.125 * 2.0


def test_slots_are_never_clipped():
    rule = UpdateRule("momentum", 1, weight_min=-1.0, weight_max=1.0)
    assert after(rule, 0.0, 8.0, slots=[3.0]) == [-1.0, 8.0]


# ---- each optimizer in its exact points


def test_ftrl_without_l1_moves_the_weight_to_minus_z_over_q():
    rule = UpdateRule("ftrl", 2, (("lr_power", -0.5),))
    # a goes from 16 to 25, D = 5 - 4, q = 5/0.5
    assert after(rule, 2.0, 3.0, lr=0.5, slots=[16.0, 1.0]) == [0.0, 25.0, 0.0]  # z' = 1 + 3 - D*2/0.5
    assert after(rule, 1.0, 3.0, lr=0.5, slots=[16.0, 1.0]) == [float(np.float32(-2) / 10), 25.0, 2.0]


def test_ftrl_with_a_linear_slot_times_the_rate_works_at_a_rate_of_zero():
    rule = UpdateRule("ftrl", 2, (("lr_power", -0.5), ("l1", 0.25), ("multiply_linear_by_lr", True)))
    assert after(rule, 2.0, 3.0, lr=0.0, slots=[16.0, -10.0]) == [float(np.float32(12.0) / 5), 25.0, -12.0]


def test_ftrl_starts_from_a_zero_accumulator():
    rule = UpdateRule("ftrl", 2, (("lr_power", -0.5),))
    assert after(rule, 0.0, 2.0, lr=0.5, slots=[0.0, 0.0]) == [-0.5, 4.0, 2.0]
    # Nothing seen and nothing to see: the closed form is 0/0, the weight stays.
    assert after(rule, 3.0, 0.0, lr=0.5, slots=[0.0, 0.0]) == [3.0, 0.0, 0.0]


def test_ftrl_sets_a_weight_to_zero_that_l1_holds():
    rule = UpdateRule("ftrl", 2, (("lr_power", -0.5), ("l1", 5.0)))
    assert apply_once(rule, 0.0, 3.0, slots=[16.0, 1.0]) == 0.0


def test_adams_epsilon_inside_the_root_is_squared():
    hyper = (("beta1", 0.5), ("beta2", 0.5), ("epsilon", 3.0))
    # m' = 4, v' = 32/2 = 16
    assert apply_once(UpdateRule("adam", 2, hyper), 0.0, 4.0, 1.0, [4.0, 16.0]) == float(-np.float32(4) / np.float32(7))
    inside = UpdateRule("adam", 2, (*hyper, ("use_sum_inside_sqrt", True)))
    assert apply_once(inside, 0.0, 4.0, 1.0, [4.0, 16.0]) == float(-np.float32(4) / np.float32(5))


def test_lion_does_not_move_where_its_mean_is_zero():
    rule = UpdateRule("lion", 1, (("beta1", 0.5), ("beta2", 0.75)))
    assert after(rule, 1.0, -2.0, slots=[2.0]) == [1.0, 1.0]
    assert after(rule, 1.0, -2.5, slots=[2.0]) == [1.5, 0.875]


def test_centered_rms_prop_divides_by_epsilon_where_rounding_leaves_no_variance():
    rule = UpdateRule("centered_rms_prop", 3, (("rho", 0.5), ("epsilon", 0.25)))
    # ms' = 1/2, mg' = 1: no moments that gradients could leave, as rounding makes them
    assert after(rule, 0.0, 1.0, lr=0.5, slots=[0.0, 0.0, 1.0]) == [-1.0, 0.5, 1.0, 1.0]


def test_bounded_adagrad_divides_by_the_accumulator_of_before_or_after_and_bounds_the_step():
    first = ("update_accumulator_first", True)
    assert after(UpdateRule("bounded_adagrad", 1), 0.0, 3.0, 1.0, [16.0]) == [-0.75, 25.0]
    assert apply_once(UpdateRule("bounded_adagrad", 1, (first,)), 0.0, 3.0, 1.0, [16.0]) == float(-np.float32(3) / 5)
    capped = UpdateRule("bounded_adagrad", 1, (first, ("max_accumulator", 4.0)))
    assert after(capped, 0.0, 3.0, 1.0, [16.0]) == [-1.5, 4.0]
    bounded = UpdateRule("bounded_adagrad", 1, (("max_var_update", 0.5),))
    assert apply_once(bounded, 0.0, 3.0, 1.0, [16.0]) == -0.5
    assert apply_once(bounded, 0.0, -3.0, 1.0, [16.0]) == 0.5


def test_yogis_moment_moves_by_a_share_of_the_square_towards_it():
    hyper = (("beta2", 0.75), ("epsilon", 1.0))
    assert after(UpdateRule("proximal_yogi", 2, hyper), 0.0, 2.0, 0.0, [1.0, 0.0])[1] == 2.0
    assert after(UpdateRule("proximal_yogi", 2, hyper), 0.0, 2.0, 0.0, [9.0, 0.0])[1] == 8.0
    assert after(UpdateRule("proximal_yogi", 2, hyper), 0.0, 2.0, 0.0, [4.0, 0.0])[1] == 4.0
    assert after(UpdateRule("online_yogi", 2, hyper), 0.0, 2.0, 1.0, [9.0, 0.0])[1] == 8.0


def test_the_proximal_step_thresholds_and_shrinks_by_the_rate_of_the_element():
    hyper = (("l1", 1.0), ("l2", 2.0))
    # a' = 25, e = 1/5; p = 4 - 3/5; minus e*l1; over 1 + e*l2
    got = apply_once(UpdateRule("proximal_adagrad", 1, hyper), 4.0, 3.0, 1.0, [16.0])
    assert got == pytest.approx((4 - 0.6 - 0.2) / 1.4, rel=1e-6)
    assert apply_once(UpdateRule("proximal_adagrad", 1, hyper), 0.7, 3.0, 1.0, [16.0]) == 0.0


def test_the_frequency_estimator_averages_distances_and_jumps_over_outliers():
    hyper = (("tau", 0.25), ("max_delta", 100.0), ("outlier_threshold", 3.0))
    rule = UpdateRule("frequency_estimator", 1, hyper)
    assert after(rule, 10.0, 0.0, lr=38.0, slots=[10.0]) == [14.5, 38.0]  # 0.75*10 + 0.25*28
    assert after(rule, 10.0, 0.0, lr=40.0, slots=[10.0]) == [30.0, 40.0]  # 30 >= 3*10
    assert after(rule, 10.0, 0.0, lr=500.0, slots=[10.0]) == [100.0, 500.0]


def test_assign_takes_the_clipped_gradient():
    assert apply_once(UpdateRule("assign", 0, gradient_max=2.0), 7.0, 3.0) == 2.0


def test_row_wise_adagrad_adds_the_mean_square_of_the_row():
    w, g, a = np.zeros((1, 3), np.float32), np.float32([[3, 0, 6]]), np.ones((1, 1), np.float32)
    new, (a,) = update(NUMPY, UpdateRule("row_wise_adagrad", 1), np.float32(4), g, w, (a,))
    assert a.tolist() == [[16.0]]
    assert new.tolist() == [[-3.0, 0.0, -6.0]]


@pytest.mark.parametrize("algorithm", ["row_wise_adagrad", "torch_adagrad"])
def test_an_epsilon_is_added_to_the_root_of_the_sum(algorithm):
    hyper = (("epsilon", 2.0),)
    assert after(UpdateRule(algorithm, 1, hyper), 1.0, 3.0, 7.0, [16.0]) == [-2.0, 25.0]
    assert after(UpdateRule(algorithm, 1, hyper), 1.0, 0.0, 7.0, [0.0]) == [1.0, 0.0]


def test_partially_row_wise_adam_has_a_mean_of_the_row_and_corrects_both_moments():
    rule = UpdateRule("partial_row_wise_adam", 2, (("beta1", 0.5), ("beta2", 0.75), ("epsilon", 1.0)))
    rate = rule.rate_at(0.5, 0)
    assert rate == (0.5, 2.0, 2.0)  # 1/(1 - 0.5), 1/sqrt(1 - 0.75)
    assert rule.rate_at(0.5, 1)[1:] == (1 / 0.75, 1 / math.sqrt(1 - 0.75**2))
    g, zeros = np.float32([[3, 0, 6]]), np.zeros((1, 3), np.float32)
    new, (m, v) = update(NUMPY, rule, np.float32(rate), g, zeros, (zeros, zeros[:, :1]))
    assert (m.tolist(), v.tolist()) == ([[1.5, 0.0, 3.0]], [[3.75]])  # a quarter of 15, the mean of the squares
    divisor = np.sqrt(np.float32(3.75)) * np.float32(2) + np.float32(1)
    assert new.tolist() == (-np.float32([[1.5, 0.0, 3.0]]) / divisor).tolist()


def test_a_decay_by_the_rate_takes_the_learning_rate_of_corrected_moments():
    hyper = (("beta1", 0.5), ("beta2", 0.5), ("epsilon", 1.0))
    rule = UpdateRule("partial_row_wise_adam", 2, hyper, weight_decay=0.25, decay_times_learning_rate=True)
    zeros = np.zeros((1, 1), np.float32)
    new, _ = update(NUMPY, rule, np.float32(rule.rate_at(0.5, 0)), zeros, np.float32([[2.0]]), (zeros, zeros))
    assert new.tolist() == [[2.0 - 0.125 * 2.0]]


def test_a_program_without_slots_may_give_its_weights_bare():
    rule = UpdateRule("user_defined_program", 0, program=lambda g, w: w - 2 * g)
    assert apply_once(rule, 1.0, 3.0) == -5.0


def test_quantization_rounds_halves_up_and_clips():
    seen = quantize(NUMPY, np.float32([-9, -1, -0.5, -0.25, 0, 0.75, 9]), 5, -1.0, 1.0)
    assert seen.tolist() == [-1, -1, -0.5, 0, 0, 1, 1]
    assert seen.dtype == np.float32


# ---- NumPy against XLA on the CPU


def compiled(rules):
    """All rules in one program: (zero, lr, g, parts) → the new parts of each."""

    def run(zero, lr, g, parts):
        ops = Ops(jnp, partial(_rounded, zero))
        return [update(ops, rule, lr, g, parts[0], tuple(parts[1:])) for rule in rules]

    return jax.jit(run)


def compare(ulp, rules, dim, seed):
    """Every rule from the same random rows, for the steps of bench/experiments/ulp.py."""
    rng = np.random.default_rng(seed)
    run, parts = compiled(rules), ulp.start(rules[0], rng, dim)
    for lr, ids, g in ulp.frames(rules[0], rng, dim):
        rows = [part[ids] for part in parts]
        for rule, (weights, slots) in zip(rules, run(np.int32(0), lr, g, rows), strict=True):
            wanted, wanted_slots = update(NUMPY, rule, lr, g, rows[0], tuple(rows[1:]))
            for got, right, before in zip((weights, *slots), (wanted, *wanted_slots), rows, strict=True):
                assert got.dtype == right.dtype == np.float32
                assert got.shape == right.shape
                assert ulp.ulps(np.asarray(got), right, before) <= ulp.bound(rule), rule
                assert np.asarray(got).tobytes() == right.tobytes() or ulp.bound(rule), rule


@pytest.mark.sampled("adagrad", "proximal_adagrad", "rms_prop", "lion")
@pytest.mark.parametrize("algorithm", UPDATES)
def test_xla_gives_numpys_bits_for_every_parameter_and_switch(algorithm, ulp):
    compare(ulp, ulp.rules(algorithm, [ulp.SWITCHES[0], ulp.SWITCHES[-1]]), 17, 0)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 128])
@pytest.mark.parametrize("algorithm", ["row_wise_adagrad", "partial_row_wise_adam"])
def test_the_mean_over_a_row_has_numpys_bits_at_any_width(algorithm, dim, ulp):
    compare(ulp, ulp.rules(algorithm, [{}]), dim, 0)
