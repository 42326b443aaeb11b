"""The main job from end to end: train, evaluate, save, reopen, draw, look inside."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from ostinato import NStep, PrioritizedSampler
from ostinato.errors import CheckpointError
from ostinato.tools import inspect_checkpoint
from ostinato.viz import Bars
from tests.command import facts, run_here, run_process

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("gymnasium")
pytest.importorskip("rich")

from examples.demo.cartpole import DqnConfig, Report, TrainingState, save_and_reopen, train, training_figure


@pytest.fixture(scope="module")
def report() -> Report:
    """One short run, for all tests that only read it; its ring has wrapped."""
    return train(replace(DqnConfig().over(400), capacity=250, patience=0, evaluation_episodes=4))


def test_a_short_run_reports_what_it_did(report):
    assert report.steps == 400
    assert len(report.buffer) == 250
    assert report.updates == 2 * 91, "every round of 4 steps from the one that completes the warm-up"
    assert len(report.final_returns) == len(report.kept_returns) == 4
    assert 8 <= report.final_return <= 500
    assert len(report.episode_steps) == len(report.episode_returns)
    assert report.episode_steps[-1] == sum(report.episode_returns), "one point for each step"
    assert report.validation_steps[-1] == 400
    best = max(report.validation_returns)
    assert report.kept_step == max(
        step for step, value in zip(report.validation_steps, report.validation_returns, strict=True) if value == best
    )
    assert 0 < report.buffer_s < report.seconds


def test_the_same_seed_gives_the_same_run_and_leaves_global_state_alone(report):
    torch.manual_seed(123)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    again = train(report.config)
    assert again.episode_returns == report.episode_returns
    assert again.validation_returns == report.validation_returns
    assert (again.final_returns, again.kept_returns) == (report.final_returns, report.kept_returns)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_the_checkpoint_reopens_and_goes_on(report, tmp_path):
    reopened = save_and_reopen(report, tmp_path / "checkpoint")
    assert (reopened.rows, reopened.batches) == (250, 5)
    seen = inspect_checkpoint(tmp_path / "checkpoint")
    assert seen.nbytes <= reopened.nbytes
    assert (seen.rows, seen.rows_written, seen.exact_resume) == (250, 400, True)
    fields = {field.name: field for field in seen.fields}
    assert (fields["step"].minimum, fields["step"].maximum) == (150, 399)


def test_a_checkpoint_that_goes_on_differently_is_an_error(report, tmp_path):
    class Forgetful:
        """A buffer that draws once more after it was saved."""

        def dumps(self, path: Path) -> None:
            report.buffer.dumps(path)
            report.buffer.sample()

        def sample(self) -> object:
            return report.buffer.sample()

    with pytest.raises(CheckpointError, match=r"batch 0 after reopening .* differs"):
        save_and_reopen(replace(report, buffer=Forgetful()), tmp_path / "checkpoint")


def test_the_command_writes_everything(tmp_path):
    out = tmp_path / "out"
    done = run_process("demo", "--steps", "300", "--seed", "3", str(out))
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "report.json").read_text())
    assert (summary["config"]["seed"], summary["steps"] <= 300) == (3, True)
    for name in ("final", "kept"):
        returns = summary[f"{name}_returns"]
        told = f"mean return {summary[f'{name}_return']:.1f}, lowest {min(returns):.0f}, in"
        assert told in done.stdout or (name == "kept" and summary["kept_step"] == summary["steps"])
    assert "batches of both buffers are equal" in done.stdout
    assert (out / "demo.png").stat().st_size > 20_000
    assert run_here("inspect", str(out / "checkpoint")).returncode == 0
    again = run_here("demo", "--n-step", "3", "--prioritized", "--steps", "100", str(out), "--overwrite")
    assert again.returncode == 0, "a second run replaces the first"
    config = json.loads((out / "report.json").read_text())["config"]
    assert (config["n_step"], config["prioritized"]) == (3, True)
    assert facts(run_here("inspect", out / "checkpoint"))["priorities"].startswith("rows 100, ")
    assert run_here("demo", "--n-step", "0").returncode == 2


def test_a_prioritized_run_with_three_steps():
    told: list[TrainingState] = []
    config = replace(DqnConfig(prioritized=True, n_step=3).over(400), capacity=250, patience=0, evaluation_episodes=2)
    report = train(config, told.append)
    assert [now.step for now in told] == list(range(4, 401, 4))
    assert (told[-1].rows, told[-1].steps) == (250, 400)
    buffer, sampler = report.buffer, report.buffer.sampler
    assert isinstance(buffer.sample_unit, NStep)
    assert isinstance(sampler, PrioritizedSampler)
    assert len(set(sampler.priorities.tolist())) > 100, "rows have been learned from"
    assert sampler.beta == pytest.approx(1.0), "the weights correct fully at the end"
    assert buffer.stats().stale_updates == 0, "one thread: each update follows its draw"
    steps = buffer.sample()["steps_to_next_obs"]
    assert (steps == 3).float().mean() > 0.7, "most rows have three steps of their episode ahead"
    panel = training_figure(report).rows[1][2]
    assert isinstance(panel, Bars)
    assert sum(sum(stack.counts) for stack in panel.stacks) == 250


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("by_error", [False, True])
def test_full_runs_learn(by_error, n_step):
    """The promise: 400 or more within 3 minutes on two CPU cores, for at least 4 of 5 seeds."""
    reports = [train(DqnConfig(seed=seed, prioritized=by_error, n_step=n_step)) for seed in range(5)]
    learned = [report.kept_return >= 400 and report.seconds < 180 for report in reports]
    assert sum(learned) >= 4, [(report.kept_return, report.seconds) for report in reports]
