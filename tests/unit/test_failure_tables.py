"""Each row of the tables in `docs/failures.md` about killed processes and machines has tests, which exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_SHARED = "unit/buffers/test_shared_processes.py"
_SHARE = "unit/buffers/test_share.py"
_KILLS = "unit/trajectories/test_kills.py"
_DEATHS = "distributed/test_deaths.py"
_FAULTS = "distributed/test_sharded_faults.py"
_SHARDS = "distributed/test_sharded.py"
_LIMITS = "distributed/test_sharded_rate_limit.py"
_LIFE = "distributed/test_lifecycle.py"
_RAY = "distributed/test_ray_rate_limit.py"

TESTS: dict[str, dict[str, list[str]]] = {
    "A process that is killed": {
        "`dumps`": [
            "crash/test_kills.py::test_a_killed_save_leaves_the_old_state_or_the_new",
            "crash/test_kills.py::test_a_killed_first_save_leaves_nothing_that_loads",
        ],
        "training, with checkpoints": [
            "contracts/test_combinations.py::test_every_combination_keeps_its_law_and_resumes_or_is_refused"
        ],
        "training, with `LazyMemmapStorage`": [
            "unit/storages/test_memmap.py::test_a_flushed_storage_opens_again_with_its_rows",
            "unit/storages/test_memmap.py::test_files_of_a_run_that_never_flushed_are_not_taken_for_rows",
            "unit/storages/test_memmap.py::test_a_write_takes_back_what_was_flushed",
        ],
        "saving trajectories": [f"{_KILLS}::test_a_killed_saver_loses_nothing_that_was_reported"],
        "`ostinato merge --move`, `split --move`": [
            f"{_KILLS}::test_killed_moves_leave_each_trajectory_in_one_place_and_can_be_continued"
        ],
    },
    "Processes that share memory": {
        "a writer while it copies rows": [
            f"{_SHARED}::test_a_writer_that_dies_between_reserve_and_commit_costs_its_own_rows"
        ],
        "a writer or learner that holds the lock": [
            f"{_SHARED}::test_whoever_comes_after_a_death_in_the_lock_brings_all_in_order",
            f"{_SHARED}::test_kills_at_any_moment_leave_all_in_order",
        ],
        "a learner between `sample` and `update_priority`": [f"{_SHARED}::test_a_reader_that_dies_changes_nothing"],
        "a process that only samples, or the one that made the buffer": [
            f"{_SHARED}::test_a_reader_that_dies_changes_nothing",
            f"{_SHARED}::test_others_go_on_when_the_process_that_made_the_buffer_is_killed",
        ],
        "a process that allocates the memory for the first rows": [
            f"{_SHARE}::test_a_process_that_dies_while_it_allocates_blocks_nobody"
        ],
        "all processes": [
            f"{_SHARED}::test_nothing_is_left_when_all_are_killed",
            f"{_SHARE}::test_temporary_files_are_removed_by_their_owner_alone",
        ],
        "stopped (not killed) while it holds the lock": [
            f"{_SHARED}::test_a_lock_that_is_not_given_back_is_named",
            f"{_SHARE}::test_a_process_that_stops_while_it_allocates_is_reported",
        ],
    },
    "Programs that use the buffer": {
        "a writing worker": [
            f"{_RAY}::test_a_writer_killed_while_it_waits_or_writes_blocks_no_call",
            f"{_LIMITS}::test_a_killed_writer_blocks_no_other_call",
            f"{_LIMITS}::test_the_call_of_a_dead_writer_ends_at_a_full_queue",
        ],
        "a learner": [
            f"{_RAY}::test_killed_readers_lose_the_batches_requested_ahead",
            f"{_DEATHS}::test_a_killed_learner_costs_the_batches_on_their_way",
        ],
        "a client whose call the limiter has allowed, before it reached its shard": [
            f"{_DEATHS}::test_a_client_killed_between_the_limiter_and_its_shard_stays_counted"
        ],
        "the process that made the buffer": [f"{_LIFE}::test_buffers_of_another_program"],
        "`close()` of a handle, in any process": [
            f"{_LIFE}::test_buffers_of_another_program",
            f"{_FAULTS}::test_any_handle_closes_the_shards_without_waiting",
        ],
        "a process in the constructor of a detached buffer": [f"{_LIFE}::test_buffers_of_another_program"],
        "the actor of a `RayReplayBuffer`": [
            f"{_DEATHS}::test_the_rows_of_a_killed_ray_buffer_are_those_of_its_checkpoint"
        ],
    },
    "Shards": {
        "the actor or machine of a shard": [
            f"{_SHARDS}::test_a_killed_shard_is_left_out_and_returns_with_its_checkpoint",
            f"{_FAULTS}::test_an_unnoticed_restart_warns_and_changes_the_distribution_at_once",
        ],
        "all shards": [
            f"{_DEATHS}::test_shards_that_are_all_killed_return_with_their_checkpoints",
            f"{_SHARDS}::test_one_shard_resumes_without_waiting",
        ],
        "a shard whose checkpoint cannot be read": [
            f"{_FAULTS}::test_a_shard_that_cannot_return_is_left_out_with_a_warning"
        ],
        "the periodic checkpoint of a shard": [
            "distributed/test_save_failures.py::test_writes_raise_after_the_bound_until_a_save_succeeds",
            "distributed/test_save_failures.py::test_a_handle_warns_once_of_each_row_of_failures",
        ],
        "a shard during a checkpoint": [
            f"{_DEATHS}::test_a_shard_killed_during_a_checkpoint_returns_with_the_previous_one"
        ],
    },
    "Calls without an answer": {
        "an actor is stopped, or cannot be reached": [
            "distributed/test_stopped_actors.py::test_a_call_of_a_stopped_actor_ends",
            "distributed/test_stopped_actors.py::test_calls_leave_stopped_shards_out_or_raise",
        ],
        "a shard that does not answer for `shard_timeout_s`": [
            f"{_LIMITS}::test_a_write_skips_a_stopped_shard",
            f"{_DEATHS}::test_a_shard_that_is_silent_for_a_while_loses_nothing",
        ],
        "a shard or actor that works for long (`dumps`, `apply`)": [
            "distributed/test_stopped_actors.py::test_work_that_takes_long_goes_on"
        ],
        "the actor of a `rate_limiter`": [
            f"{_DEATHS}::test_a_restarted_limiter_counts_anew",
            f"{_LIMITS}::test_calls_time_out_while_the_limiter_is_stopped",
        ],
    },
    "Machines and the network": {
        "the network of a machine, for a short time": [
            f"{_DEATHS}::test_a_shard_that_is_silent_for_a_while_loses_nothing"
        ],
        "the network of a machine, for longer": [
            f"{_SHARDS}::test_a_killed_shard_is_left_out_and_returns_with_its_checkpoint",
            "distributed/test_save_failures.py::test_an_actor_that_was_replaced_does_not_save",
        ],
        "packets are lost or delayed": [f"{_DEATHS}::test_a_shard_that_is_slow_delays_calls_only"],
        "the object store of a machine is full": [f"{_DEATHS}::test_rows_that_cannot_be_sent_are_not_counted"],
        "the memory of a machine": [
            "distributed/test_fleet_schema.py::test_first_rows_that_cannot_be_stored_leave_the_schema_free",
            f"{_DEATHS}::test_shards_that_are_all_killed_return_with_their_checkpoints",
        ],
        "the whole cluster": [f"{_SHARDS}::test_one_shard_resumes_without_waiting"],
    },
}


def _rows(heading: str) -> list[str]:
    """Return the first cells of the table below a heading of the page."""
    text = (ROOT / "docs" / "failures.md").read_text()
    section = re.split(rf"\n##+ {heading}\n", text, maxsplit=1)[1]
    section = re.split(r"\n##+ ", section, maxsplit=1)[0]
    cells = re.findall(r"^\| (.+?) \|", section, flags=re.MULTILINE)
    return cells[1:]  # without the names of the columns


@pytest.mark.parametrize("heading", TESTS)
def test_each_row_has_tests_which_exist(heading):
    assert sorted(_rows(heading)) == sorted(TESTS[heading])
    for names in TESTS[heading].values():
        assert names
        for name in names:
            file, function = name.split("::")
            tree = ast.parse((ROOT / "tests" / file).read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
