"""A policy learns to add with GRPO, is killed twice, and ends as if nothing had happened.

In training of language models, groups of responses are written while the policy changes, and a run that is killed
must neither lose nor repeat a group. Here a small network writes the answers of sums such as `3+4=`, character by
character. A `GroupBuffer` holds the groups, and the trainer stores the buffer's position in its own checkpoint. The
program trains twice: once without interruption, once with two SIGKILLs between two checkpoints. Both runs train the
same groups in the same order and end with equal weights.

    python examples/groups.py                   # writes groups.png
    python examples/groups.py --steps 200
    python examples/groups.py --quick           # a few seconds, learns nothing

Needs `pip install 'ostinato[viz]'`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from ostinato import GroupBuffer

GROUPS, RESPONSES, LENGTH, LARGEST = 8, 16, 3, 4
"""Groups of each step, responses of each group, most characters of an answer, largest number to add."""
CHARACTERS = "0123456789."
"""An answer ends with a dot."""
CHECKPOINT_STEPS = 10
COLORS = ("#0072B2", "#B36B00", "#00795C")


class Policy(nn.Module):
    """Probabilities of the next character, from both numbers, the position and the character before."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = (LARGEST + 1, LARGEST + 1, LENGTH, len(CHARACTERS) + 1)
        self.layers = nn.Sequential(nn.Linear(sum(self.sizes), 64), nn.Tanh(), nn.Linear(64, len(CHARACTERS)))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return logarithms of probabilities `[..., characters]`."""
        hot = [nn.functional.one_hot(each, size) for each, size in zip(inputs, self.sizes, strict=True)]
        result: Tensor = self.layers(torch.cat(hot, -1).float()).log_softmax(-1)
        return result


def write(policy: Policy, prompt: dict[str, int], generator: torch.Generator) -> list[dict[str, Any]]:
    """Write answers to a prompt, and give a reward for each."""
    a, b = (torch.full((RESPONSES,), prompt[name]) for name in ("a", "b"))
    before, tokens = torch.full((RESPONSES,), len(CHARACTERS)), []
    for position in range(LENGTH):
        logits = policy(a, b, torch.full((RESPONSES,), position), before)
        before = torch.multinomial(logits.exp(), 1, generator=generator)[:, 0]
        tokens.append(before)
    responses = []
    for row in torch.stack(tokens, 1).tolist():
        text = "".join(CHARACTERS[token] for token in row)
        answer, dot, _ = text.partition(".")
        right = f"{prompt['a'] + prompt['b']}"
        reward = 1.0 if dot and answer == right else 0.3 * (text[0] == right[0])
        responses.append({"tokens": row[: len(answer) + len(dot)], "reward": reward})
    return responses


def produce(buffer: GroupBuffer, policy: Policy, step: int, seed: int) -> None:
    """Write the groups of a step that are not in the buffer; what was there before a kill is repeated or left."""
    for number in range(step * GROUPS, (step + 1) * GROUPS):
        generator = torch.Generator().manual_seed(seed * 10**6 + number)
        a, b = torch.randint(LARGEST + 1, (2,), generator=generator).tolist()
        (name,) = buffer.admit([{"a": a, "b": b}], ids=[f"{number}"])
        if buffer.state(name)[0] in {"waiting", "running"}:
            with torch.no_grad():
                responses = write(policy, {"a": a, "b": b}, generator)
            for count, response in enumerate(responses):
                buffer.append(name, {**response, "version": step}, id=f"{count}")


def loss_of(policy: Policy, groups: tuple[Any, ...]) -> tuple[Tensor, float]:
    """Return the loss of GRPO for groups, and their mean reward."""
    losses, rewards = [], []
    for group in groups:
        reward = torch.tensor([response.fields["reward"] for response in group.responses])
        advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
        rewards.append(reward)
        rows = [each.fields["tokens"] for each in group.responses]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        known = tokens >= 0
        count, length = tokens.shape
        before = torch.cat([torch.full((count, 1), len(CHARACTERS)), tokens[:, :-1].clamp(min=0)], 1)
        a, b = (torch.full((count, length), group.prompt[name]) for name in ("a", "b"))
        logits = policy(a, b, torch.arange(length).expand(count, length), before)
        chosen = logits.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
        entropy = -(logits.exp() * logits).sum(-1)  # a small bonus, so that no answer is settled too early
        losses.append(-((advantage[:, None] * chosen + 0.1 * entropy) * known).sum() / known.sum())
    return torch.stack(losses).mean(), float(torch.stack(rewards).mean())


def train(folder: Path, steps: int, seed: int) -> None:
    """Train from the last checkpoint of a folder, or from the beginning; runs in a process that may be killed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    policy, path = Policy(), folder / "trainer.pt"
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    done, order, token = 0, [], None
    if path.exists():
        state = torch.load(path, weights_only=True)
        policy.load_state_dict(state["policy"])
        optimizer.load_state_dict(state["optimizer"])
        done, order, token = state["step"], state["order"], state["token"]
    options: dict[str, Any] = {"size": RESPONSES, "order": "admitted", "sync": "interval"}
    with (
        GroupBuffer.open(folder / "groups", at=token, **options)
        if token
        else GroupBuffer(folder / "groups", **options) as buffer
    ):
        for step in range(done, steps + 1):
            if step % CHECKPOINT_STEPS == 0 or step == steps:  # also before the first step
                state = {"policy": policy.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**state, "order": order, "token": buffer.position(step)}, f"{path}.new")
                Path(f"{path}.new").replace(path)
            if step == steps:
                return
            produce(buffer, policy, step, seed)
            lease = buffer.lease(GROUPS)
            loss, reward = loss_of(policy, lease.groups)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            buffer.ack(lease, step=step + 1)
            order.extend(group.id for group in lease.groups)
            print(step + 1, reward, flush=True)


def watch(title: str, folder: Path, steps: int, seed: int, kills: list[int]) -> list[list[tuple[int, float]]]:
    """Run the training in processes, each of which is killed at a step; return step and reward of each process."""
    folder.mkdir()
    lives: list[list[tuple[int, float]]] = []
    start, shown = time.perf_counter(), 0
    for kill in [*kills, None]:
        lives.append([])
        command = [sys.executable, __file__, "--train", str(folder), "--steps", str(steps), "--seed", str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 (this program)
            for line in process.stdout or ():
                step, reward = int(line.split()[0]), float(line.split()[1])
                lives[-1].append((step, reward))
                if step - shown >= steps // 5 or step == steps:
                    shown, speed = step, step / (time.perf_counter() - start)
                    print(f"{title}: {step} of {steps} steps, reward {reward:.2f}, {speed:.0f} steps/s", flush=True)
                if step == kill:
                    process.kill()
                    print(f"{title}: killed in step {step + 1}", flush=True)
                    break
        if kill is None and process.returncode:
            raise SystemExit(process.returncode)
    return lives


def smooth(life: list[tuple[int, float]], seen: dict[int, float]) -> tuple[list[int], list[float]]:
    """Return the groups trained after each step, and the mean reward of ten steps; `seen` has the rewards before."""
    groups, means = [], []
    for step, reward in life:
        seen[step] = reward
        last = [seen[each] for each in range(max(1, step - 9), step + 1)]
        groups.append(step * GROUPS)
        means.append(sum(last) / len(last))
    return groups, means


def draw(path: Path, lives: list[list[tuple[int, float]]], kills: list[int], plain: list[tuple[int, float]]) -> None:
    """Draw the reward over the groups trained, the kills, and the run without them."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*smooth(plain, {}), color="#C8CDD3", linewidth=6)
    seen: dict[int, float] = {}
    for number, life in enumerate(lives):
        axes.plot(*smooth(life, seen), color=COLORS[number % len(COLORS)])
    for kill in kills:
        axes.axvline(kill * GROUPS, color="black", linestyle=":")
        axes.annotate(" SIGKILL", (kill * GROUPS, 0.02))
    axes.set(xlabel="groups trained", ylabel="mean reward of ten steps", ylim=(0, 1.02))
    axes.set_title("Three processes, each in a color, and the run without interruption (gray)")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def run(steps: int, seed: int, picture: Path) -> None:
    """Train without and with kills, compare, and draw."""
    kills = [steps // 3 + 6, min(2 * steps // 3 + 8, steps - 2)]
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in ("plain", "killed")]
        (plain,) = watch("without interruption", folders[0], steps, seed, [])
        lives = watch("killed twice", folders[1], steps, seed, kills)
        one, other = (torch.load(folder / "trainer.pt", weights_only=True) for folder in folders)
    weights = all(torch.equal(one["policy"][name], other["policy"][name]) for name in one["policy"])
    again = sum(map(len, lives)) - steps
    print(f"\ngroups trained          {len(one['order']):6,}, killed twice: {len(other['order']):,}")
    print(f"steps trained again     {again:6,} after the kills, with the groups of the log")
    print(f"same groups and order   {one['order'] == other['order']!s:>6}")
    print(f"equal weights           {weights!s:>6}")
    last = [reward for _, reward in lives[-1]][-20:]
    print(f"mean reward at the end  {sum(last) / len(last):6.2f}")
    draw(picture, lives, kills, plain)
    print(f"picture: {picture}")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160, help="training steps of each run (default 160)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts and answers")
    parser.add_argument("--quick", action="store_true", help="24 steps: does it run here?")
    parser.add_argument("--picture", type=Path, default=Path("groups.png"), help="where to write it")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train is not None:
        train(given.train, given.steps, given.seed)
        return
    run(24 if given.quick else given.steps, given.seed, given.picture)


if __name__ == "__main__":
    main()
