"""Which cases ``make test`` leaves to ``make evidence``: most combinations of parameters, and most random examples.

``make test`` is for the developer's edit loop: every behaviour, in few cases. ``make evidence`` runs the other cases,
and the random tests with all of their examples. .ci/run calls both.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

IS_EVIDENCE = os.environ.get("PENSTOCK_EVIDENCE") in ("1", "long")
# `make evidence EVIDENCE=long`: hundreds of random histories of operations and of kills, for which .ci/run has no time.
IS_LONG = os.environ.get("PENSTOCK_EVIDENCE") == "long"

# Test → the ids of the cases that ``make test`` runs. An empty list: none; the behaviour has another test.
SAMPLED = {
    "test_allocation.py::test_every_allocation_that_fails_is_a_memory_error_and_nothing_else": [],
    "test_bridge.py::test_an_update_never_moves_or_copies_a_table": ["3-host", "8-xla"],
    "test_bridge.py::test_an_update_of_every_row_moves_no_table_and_each_row_once": ["3-host", "3-xla"],
    "test_cached.py::test_a_cache_changes_no_bit_of_tables_and_deltas": [
        "host-1-one row-1",
        "host-8-a tenth-0",
        "xla-3-half-4",
        "pallas-3-half-4",
    ],
    "test_cached.py::test_passes_of_a_cached_table_give_the_hash_and_the_deltas_of_a_device": ["a tenth-4"],
    "test_cached.py::test_passes_of_other_variants_give_the_hash_and_the_deltas_of_a_device": ["half-16-2-xla"],
    "test_cached_moves.py::test_moves_copy_no_table_and_compile_nothing_once_warm": ["host", "xla"],
    "test_cli_signals.py::test_a_signal_in_the_first_two_seconds": ["1", "6", "9"],
    "test_delta_file.py::test_a_consumer_that_starts_again_gets_what_it_lacks_and_knows_what_it_has": [
        "3-{'per_steps': 4}",
        "6-{'per_steps': 4}",
        "6-{'per_rows': 100}",
    ],
    "test_directory_twin.py::test_a_third_of_a_million_operations_on_several_shards_equal_the_twin": [],
    "test_dynamic_devices.py::test_a_dynamic_table_runs_no_program_that_a_static_table_of_its_capacity_has_not": [
        "xla-plain-11-False"
    ],
    "test_dynamic_devices.py::test_a_run_continues_on_any_number_of_devices_with_frames_in_its_gate": ["xla-plain"],
    "test_dynamic_devices.py::test_all_devices_layouts_and_variants_give_the_bits_of_the_cpus_tables": ["sgd"],
    "test_dynamic_followers.py::test_a_reader_equals_the_table_at_each_of_1000_steps_and_accounts_for_every_key": [
        "lru"
    ],
    "test_dynamic_hash.py::test_a_run_that_resumes_after_every_frame_ends_like_the_unbroken_one": ["lfu"],
    "test_faults.py::test_a_replay_in_passes_that_ended_early_resumes_to_the_state_of_one_run": ["eio:240"],
    "test_faults.py::test_a_replay_with_rows_in_flight_that_ended_early_resumes_to_the_same_state": ["enospc:50"],
    "test_faults.py::test_a_run_ended_at_a_file_operation_resumes_to_the_same_state": [
        "1-kill",
        "9-kill-half",
        "20-short",
    ],
    "test_faults.py::test_a_run_killed_at_a_random_moment_resumes_to_the_same_state": ["1"],
    "test_files_of_runs.py::test_a_run_ended_at_any_file_operation_resumes_to_the_same_file": [
        "killed-deltas",
        "half a write-quarantine",
        "no space-quarantine in Arrow's file format",
    ],
    "test_functional_rules.py::test_a_transform_with_slots_and_a_count_updates_rows_as_it_updates_a_dense_table": [
        "1-plain",
        "2-tiled",
    ],
    "test_functional_tables.py::test_steps_are_the_engines_to_rounding": ["sum-1", "mean-2"],
    "test_functional_tables.py::test_steps_of_tables_whose_rows_share_lines_are_the_engines": [
        "optimizer0-1",
        "optimizer3-2",
    ],
    "test_functional_tables.py::test_the_same_mesh_gives_the_same_bits": ["2"],
    "test_jax_switches.py::test_tables_are_updated_as_without_a_switch": [
        "jax_disable_jit",
        "jax_numpy_dtype_promotion",
        "jax_numpy_rank_promotion",
        "jax_transfer_guard",
    ],
    "test_keras_optimizers.py::test_a_loop_of_the_user_trains_rows_or_says_what_its_loss_lacks": [
        "1024.0-True",
        "1024.0-False",
    ],
    "test_keras_optimizers.py::test_a_model_that_is_computed_again_in_the_backward_pass_trains_as_any_other": [],
    "test_keras_optimizers.py::test_a_model_with_a_mixed_policy_is_saved_and_continues": [],
    "test_keras_optimizers.py::test_a_policy_leaves_tables_in_float32_and_gives_activations_its_compute_dtype": [
        "mixed_float16-functional",
        "mixed_bfloat16-subclassed",
    ],
    "test_keras_optimizers.py::test_a_scaled_loss_moves_rows_by_the_gradients_of_the_loss": ["static", "dynamic"],
    "test_log_damage.py::test_every_flip_of_a_single_bit_is_an_error_or_changes_nothing": [],
    "test_meshes.py::test_frames_without_repeated_rows_give_the_bits_of_one_process_in_place": ["plain"],
    "test_meshes.py::test_sources_of_different_lengths_are_read_to_the_end_of_the_longest": ["2"],
    "test_meshes.py::test_tables_are_those_of_a_fold_per_process_and_then_over_processes": ["2-1"],
    "test_passes.py::test_any_number_of_passes_gives_one_hash_the_same_deltas_and_files": [
        "-2",
        "interval-2",
    ],
    "test_passes.py::test_more_passes_than_ids_leave_some_without_rows": ["MOD"],
    "test_placement.py::test_placement_changes_no_bit_of_tables_and_deltas": [
        "plain-swept-keyed-halved-1",
        "halved-plain-8",
    ],
    "test_placement.py::test_the_variant_of_the_devices_leaves_a_table_of_the_host_its_bits": ["xla"],
    "test_plan_cached.py::test_a_plan_foretells_the_moves_of_keys_that_come_and_go": ["True"],
    "test_plan_cached.py::test_a_plan_foretells_what_the_replay_moves": ["flags1"],
    "test_row_format.py::test_an_update_of_every_row_finds_the_rows_in_their_lines": ["False"],
    "test_row_format.py::test_copies_for_a_checkpoint_are_the_rows_of_every_part": ["row_wise_adagrad"],
    "test_row_format.py::test_packed_lines_hold_the_bits_of_rows_by_themselves": [
        "adagrad-32",
        "adam-3",
        "adam-200",
        "row_wise_adagrad-32",
        "stochastic_gradient_descent-32",
        "user_defined_program-3",
    ],
    "test_follow_table_changes.py::test_a_redis_follower_equals_tables_that_change_under_producers_and_kills": ["0"],
    "test_row_format.py::test_the_kernel_has_xlas_bits_and_no_race": [
        "lion-130",
        "stochastic_gradient_descent-128",
    ],
    "test_row_format.py::test_the_kernel_gives_the_same_bits_with_and_without_whole_tiles": ["24-1024-1-205"],
    "test_row_format.py::test_the_kernel_updates_tables_smaller_than_a_block_and_steps_without_rows": ["0", "600"],
    "test_serve_acknowledgements.py::test_counts_of_a_put_are_right_after_the_service_was_killed": ["3"],
    "test_shared_processes.py::test_a_writer_killed_at_any_moment_leaves_rows_that_are_right_or_refused": ["6"],
    "test_shared_processes.py::test_killed_readers_change_nothing_for_the_writer_and_the_others": ["6"],
    "test_shared_processes.py::test_no_row_that_other_processes_read_is_torn_or_of_two_steps": ["1.5"],
    "test_shares.py::test_rows_that_were_summed_before_they_were_sent_change_nothing": [
        "counted-3",
        "chance-5",
    ],
    "test_shares.py::test_shares_of_dynamic_tables_have_the_hash_of_one_engine": ["all-2", "frames-3"],
    "test_shares.py::test_the_deltas_of_all_shares_are_those_of_one_engine": [
        "MOD-1-2",
        "non-lazy-3-1",
        "dynamic-3-3",
    ],
    "test_sparsecore.py::test_the_kernel_has_xlas_bits_for_every_dim_that_fills_registers": [
        "24-adam",
        "32-row_wise_adagrad",
    ],
    "test_sparsecore.py::test_the_kernel_has_xlas_bits_for_every_rule": ["adagrad", "ftrl", "row_wise_adagrad"],
    "test_stacking.py::test_one_hash_on_any_devices_stacked_or_not": ["on-8-MOD-tiled", "off-3-MOD-tiled"],
    "test_stacking.py::test_a_checkpoint_says_nothing_of_stacks": ["on"],
    "test_whole_tiles.py::test_a_checkpoint_of_lines_without_whole_tiles_restores_to_tables_with_them": ["3"],
    "test_whole_tiles.py::test_lines_that_fill_the_last_tile_change_no_row": [
        "stochastic_gradient_descent-24-1024-1-205",
        "adam-40-1024-3-114",
    ],
    "test_shuffle_example.py::test_logs_that_are_shuffled_by_owner_make_the_state_of_one_process": ["static"],
}


def examples(number: int, sample: int, **options):
    """Return a decorator that sets the random examples of a test: ``number`` in ``make evidence``, else ``sample``.

    options : further settings of Hypothesis
    """

    def decorate(test):
        return more_as_evidence(settings(max_examples=number if IS_EVIDENCE else sample, **options)(test))

    return decorate


def more_as_evidence(test):
    """Mark a test that checks more if IS_EVIDENCE, so that ``make evidence`` runs it again."""
    return pytest.mark.evidence(test) if IS_EVIDENCE else test


def mark(items) -> None:
    """Mark the collected cases that only ``make evidence`` runs. Raises UsageError for an id that no case has."""
    collected = {}
    for item in items:
        path, _, name = item.nodeid.partition("::")
        function, _, case = name.partition("[")
        key = f"{path.rpartition('/')[2]}::{function}"
        if key in SAMPLED:
            collected.setdefault(key, {})[case.removesuffix("]")] = item
    for key, cases in collected.items():
        unknown = set(SAMPLED[key]) - cases.keys()
        if unknown and len(cases) > len(SAMPLED[key]):  # else the command line selects single cases
            raise pytest.UsageError(f"tests/support/evidence.py: {key} has no case {sorted(unknown)}")
        for case, item in cases.items():
            if case not in SAMPLED[key]:
                item.add_marker(pytest.mark.evidence)
