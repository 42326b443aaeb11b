"""Take the screenshots of docs/viewing.md and docs/doctor.md: output of `view`, `plot` and `doctor`, and the page in
Chromium.

The rollouts are those of an arm of two links that reaches for a ball, made here, also as a LeRobot dataset; the
checkpoint is one that `ostinato demo` saved.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw

from ostinato import Trajectory, TrajectoryReplayBuffer, export

HERE = Path(__file__).parent
MAIN = [sys.executable, "-c", "from ostinato.cli.main import main; main()"]
SIZE = 96
SHOULDER = np.array([48.0, 82.0])
LINKS = (30.0, 26.0)
LEROBOT = {
    "observation.images.scene": ("observation", "main_images"),
    "observation.images.wrist": ("observation", "wrist_images"),
    "observation.state": ("observation", "states"),
    "action": "action",
    "next.reward": ("next", "reward"),
}
SCALE = 3  # drawn larger and shrunk: smooth edges


def joints(angles: np.ndarray) -> list[np.ndarray]:
    """Shoulder, elbow and hand in pixels."""
    points, direction = [SHOULDER], 0.0
    for length, angle in zip(LINKS, angles, strict=True):
        direction += angle
        points.append(points[-1] + length * np.array([math.sin(direction), -math.cos(direction)]))
    return points


PAIRS = np.stack(np.meshgrid(*[np.linspace(-2.4, 2.4, 49)] * 2), -1).reshape(-1, 2)
HANDS = np.array([joints(pair)[2] for pair in PAIRS])


def picture(angles: np.ndarray, ball: np.ndarray) -> np.ndarray:
    """The scene from the side, uint8 `[96, 96, 3]`."""
    image = Image.new("RGB", (SIZE * SCALE, SIZE * SCALE), "#dfe7ee")
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 84 * SCALE, SIZE * SCALE, SIZE * SCALE), fill="#9aa5b1")
    disc(pen, ball, 5, "#d55e00")
    points = joints(angles)
    pen.line([tuple(point * SCALE) for point in points], fill="#0072b2", width=6 * SCALE, joint="curve")
    for point in points[:2]:
        disc(pen, point, 4.5, "#1f2933")
    disc(pen, points[2], 4.5, "#e69f00")
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def disc(pen: ImageDraw.ImageDraw, at: np.ndarray, radius: float, colour: str) -> None:
    box = [*((at - radius) * SCALE), *((at + radius) * SCALE)]
    pen.ellipse(box, fill=colour)


def wrist(scene: np.ndarray, hand: np.ndarray) -> np.ndarray:
    """The area around the hand, enlarged twice, uint8 `[96, 96, 3]`."""
    padded = np.pad(scene, ((24, 24), (24, 24), (0, 0)), mode="edge")
    x, y = (int(value) for value in np.clip(np.round(hand), 0, SIZE - 1))
    return padded[y : y + 48, x : x + 48].repeat(2, 0).repeat(2, 1)


def reach(number: int) -> Trajectory:
    """One rollout: the hand moves to the ball, more precisely in later rollouts."""
    dice = np.random.default_rng(number)
    where = dice.uniform(0.5, 2.2) * (1 if number % 2 else -1)
    ball = SHOULDER + 50 * np.array([math.sin(where * 0.6), -math.cos(where * 0.6)])
    steps, skill = int(dice.integers(30, 60)), 0.05 + 0.15 * number / 40
    angles = np.array([-0.6, 1.2]) * (-1 if number % 2 else 1)
    rows = []
    for _ in range(steps + 1):
        scene, hand = picture(angles, ball), joints(angles)[2]
        best = PAIRS[np.argmin(np.linalg.norm(HANDS - ball, axis=1) + 4 * np.abs(PAIRS - angles).max(axis=1))]
        move = np.clip(skill * (best - angles) + dice.normal(0, 0.04, 2), -0.25, 0.25)
        rows.append((scene, wrist(scene, hand), np.concatenate([angles, hand / SIZE, ball / SIZE]), move, hand))
        angles = angles + move
    scenes, wrists, states, moves, hands = (torch.from_numpy(np.array(column)) for column in zip(*rows, strict=True))
    near = (hands - torch.from_numpy(ball)).norm(dim=1)
    done = torch.zeros(steps, 1, 1, dtype=torch.bool)
    done[-1] = True
    return Trajectory(
        model_weights_id=f"arm_{number // 10 * 100}",
        actions=moves[:-1, None].float(),
        rewards=(1 - near[1:, None, None] / 50).float(),
        dones=done,
        terminations=done & (near[-1] < 8),
        curr_obs=side(scenes[:-1], wrists[:-1], states[:-1]) | {"task": ["touch the ball"]},
        next_obs=side(scenes[1:], wrists[1:], states[1:]),
    )


def side(scenes: torch.Tensor, wrists: torch.Tensor, states: torch.Tensor) -> dict[str, object]:
    return {"main_images": scenes[:, None], "wrist_images": wrists[:, None], "states": states[:, None].float()}


def ostinato(*arguments: object) -> None:
    subprocess.run([*MAIN, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def shrink(source: Path, name: str, colours: int = 96) -> None:
    """Write a picture with few colours: a third of the bytes."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(HERE / name, optimize=True)


def plant_faults(dataset: Path) -> None:
    """Let an action jump, and frames come late."""
    path = next((dataset / "data").rglob("*.parquet"))
    table = pq.read_table(path)
    columns = {name: table.column(name).to_pylist() for name in ("episode_index", "timestamp", "action")}
    first = [columns["episode_index"].index(episode) for episode in range(40)]
    columns["action"][first[7] + 9] = [4.0, *columns["action"][first[7] + 9][1:]]
    for row in range(first[21] + 12, first[22]):
        columns["timestamp"][row] += 0.05
    for name in ("timestamp", "action"):
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array(columns[name], table.schema.field(name).type))
    pq.write_table(table, path)


def doctor(dataset: Path, image: Path) -> None:
    """Draw the page of the doctor; the dataset has faults, so the exit status is 1."""
    done = subprocess.run([*MAIN, "doctor", dataset.name, "--output", str(image)], cwd=dataset.parent, check=False)
    assert done.returncode == 1


def browse(rollouts: Path, target: Path) -> None:
    """Take a screenshot of the page."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("OSTINATO_CHROMIUM") or shutil.which("chromium")
    command = [*MAIN, "view", str(rollouts), "--web", "--episode", "33", "--step", "12"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 820})
        page.goto(url)
        page.locator("#count", has_text="40 of 40").wait_for()
        page.locator("#return-low").fill("40")
        page.locator("body[data-shown='33/12/0']").wait_for()
        page.wait_for_timeout(1000)
        page.screenshot(path=target)
        browser.close()
        server.terminate()


def main() -> None:
    """Make the data, open them in the viewers, and write the screenshots."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        rollouts = here / "rollouts"
        with TrajectoryReplayBuffer(auto_save=True, auto_save_path=rollouts, trajectory_format="safetensors") as buffer:
            buffer.add_trajectories([reach(number) for number in range(40)])
        once = ("--save-image", "--no-display", "--output", here / "out.png", "--overwrite")
        ostinato("view", rollouts, *once, "--episode", 33, "--step", 12)
        shrink(here / "out.png", "view_window.png")
        ostinato("view", rollouts, *once, "--episode", 33, "--step", 12, "--camera", "states")
        shrink(here / "out.png", "view_states.png")
        browse(rollouts, here / "web.png")
        shrink(here / "web.png", "view_web.png")
        reaching = here / "reach"
        export(rollouts, reaching, "lerobot", fields=LEROBOT, fps=20, task="touch the ball", progress=False)
        ostinato("view", reaching, *once, "--episode", 33, "--step", 12)
        shrink(here / "out.png", "view_dataset.png", 255)
        ostinato("plot", reaching, "--episode", 33, "--output", here / "out.png", "--overwrite")
        shrink(here / "out.png", "plot_dataset.png", 255)
        plant_faults(reaching)
        doctor(reaching, here / "doctor.png")
        shrink(here / "doctor.png", "doctor.png", 255)
        ostinato("demo", "--steps", 6000, "--prioritized", here / "demo")
        ostinato("plot", here / "demo" / "checkpoint", "--output", here / "out.png", "--overwrite")
        shrink(here / "out.png", "plot_report.png")


if __name__ == "__main__":
    main()
