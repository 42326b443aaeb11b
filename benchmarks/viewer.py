"""The viewer's page in Chromium: how long until it opens, and until the next step is shown, both cold from disk.

    python -m benchmarks.viewer [--trajectories 10000] [--steps 100] [--pixels 32] [--keep DIR]

Needs the extra web, playwright and a Chromium (`chromium` on the path, or OSTINATO_CHROMIUM).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from ostinato import Trajectory, TrajectoryReplayBuffer

_MAIN = "from ostinato.cli.main import main; main()"


def fill(path: Path, trajectories: int, steps: int, pixels: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (steps, 1, pixels, pixels, 3)
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    done = torch.zeros(steps, 1, 1, dtype=torch.bool)
    done[-1] = True
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=path, trajectory_format="safetensors") as buffer:
        for number in range(trajectories):
            pictures = noise.roll(number, 0)
            rollout = Trajectory(
                actions=torch.rand(steps, 1, 7, generator=generator),
                rewards=torch.rand(steps, 1, 1, generator=generator),
                dones=done,
                curr_obs={"main_images": pictures},
                next_obs={"main_images": pictures.roll(-1, 0)},
            )
            buffer.add_trajectories([rollout])


def forget(path: Path) -> None:
    """Drop the files from the page cache."""
    for file in path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def wait(page: Any, spot: str) -> None:
    page.locator(f"body[data-shown='{spot}']").wait_for(state="attached")


CLOCK = """spot => new Promise(done => {
  const start = performance.now();
  new MutationObserver((_, watcher) => {
    if (document.body.dataset.shown !== spot) return;
    watcher.disconnect();
    requestAnimationFrame(() => done(performance.now() - start));
  }).observe(document.body, {attributes: true});
  document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'KEY', bubbles: true}));
})"""


def turn(page: Any, key: str, spot: str) -> float:
    passed: float = page.locator("body").evaluate("(_, spot) => (" + CLOCK.replace("KEY", key) + ")(spot)", spot)
    return passed


def measure(path: Path, trajectories: int, steps: int) -> None:
    from playwright.sync_api import sync_playwright

    forget(path)
    started = time.perf_counter()
    command = [sys.executable, "-c", _MAIN, "view", str(path), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        print(f"server ready               {time.perf_counter() - started:8.2f} s (imports of torch included)")
        chromium = os.environ.get("OSTINATO_CHROMIUM") or shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        forget(path)
        before = time.perf_counter()
        page.goto(url)
        wait(page, "0/0/0")
        print(f"page open, first step shown{time.perf_counter() - before:8.2f} s")
        rss = psutil.Process(server.pid).memory_info().rss
        forget(path)
        page.wait_for_timeout(500)
        next_step = [turn(page, "ArrowRight", f"0/{step}/0") for step in range(1, 31)]
        jumps = [turn(page, "ArrowUp", f"{reel}/0/0") for reel in range(1, min(trajectories, 200))]
        ends = []
        for reel in range(min(trajectories, 200) - 1, min(trajectories, 200) - 31, -1):
            ends.append(turn(page, "ArrowLeft", f"{reel - 1}/{steps - 1}/0"))
            turn(page, "Home", f"{reel - 1}/0/0")
        for name, times in (("next step", next_step), ("next trajectory, cold", jumps), ("back over an end", ends)):
            low, high = np.percentile(times, (50, 99))
            print(f"{name:27}{low:8.0f} ms median, {high:.0f} ms p99, {max(times):.0f} ms most")
        page.locator("#count", has_text="of returns").or_(page.locator("#count")).wait_for()
        while "read" in page.locator("#count").inner_text():
            page.wait_for_timeout(200)
        print(f"all returns read           {time.perf_counter() - before:8.2f} s")
        grown = psutil.Process(server.pid).memory_info().rss - rss
        print(f"server's memory            {rss / 1e6:8.0f} MB after the first step, {grown / 1e6:+.0f} MB later")
        browser.close()
        server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--keep", type=Path, help="where the trajectories are made, or were made before")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = given.keep or Path(temporary) / "rollouts"
        if not path.exists():
            fill(path, given.trajectories, given.steps, given.pixels)
        size = sum(file.stat().st_size for file in path.iterdir())
        print(f"{given.trajectories:,} trajectories of {given.steps} steps, {size / 1e9:.1f} GB")
        measure(path, given.trajectories, given.steps)


if __name__ == "__main__":
    main()
