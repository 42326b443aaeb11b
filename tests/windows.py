"""What each unit and each slice sampler must make of the rows of a log: checks of one batch, in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .episodes import Log, Row, achieved, goal, observe, row_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[[Log, Any, dict[Any, Any]], None]

__all__ = [
    "check_deltas",
    "check_frames",
    "check_hindsight",
    "check_nstep",
    "check_rows",
    "check_sequence",
    "check_slices",
    "reward_of",
]


def then(batch: Any, key: str) -> Any:
    """Return a field after the step, wherever rows have it."""
    if "next" in batch:
        return batch["next"][key]
    return batch[key if key in {"reward", "done", "terminated", "truncated"} else f"next_{key}"]


def check_rows(log: Log, batch: Any, info: dict[Any, Any], *, after: bool = True) -> list[Row]:
    """Each record is the row of its slot, which may be drawn; return these rows."""
    log.check_tags()
    present, places = log.present(), log.places()
    slots = log.slots_of(info["index"])
    assert slots
    assert set(slots) <= set(places), "a row of no episode, or of no row at all"
    rows = [present[slot] for slot in slots]
    flat = "next" not in batch
    if after:
        assert [row_of(batch, i, flat=flat) for i in range(len(rows))] == rows
    assert batch["id"].tolist() == [row.id for row in rows]
    return rows


def check_nstep(log: Log, batch: Any, info: dict[Any, Any], *, n: int, gamma: float, frames: bool = False) -> None:
    """Return, end of the step and its flags, against a loop over the log."""
    rows = check_rows(log, batch, info, after=False)
    present, places = log.present(), log.places()
    for i, slot in enumerate(log.slots_of(info["index"])):
        episode, at = places[slot]
        steps = [present[s] for s in episode[at : at + n]]
        last = steps[-1]
        reward = sum(gamma**k * row.reward for k, row in enumerate(steps))
        assert abs(float(then(batch, "reward")[i]) - reward) <= 1e-5 * abs(reward)
        assert int(batch["steps_to_next_obs"][i]) == len(steps)
        assert abs(float(batch["gamma"][i]) - gamma ** len(steps)) < 1e-6
        for flag in ("done", "terminated", "truncated"):
            assert bool(then(batch, flag)[i]) == getattr(last, flag)
        assert not any(row.done for row in steps[:-1])
        if not frames:
            assert then(batch, "obs")[i].tolist() == observe(last.env, last.episode, last.t + 1)
            assert batch["obs"][i].tolist() == observe(rows[i].env, rows[i].episode, rows[i].t)
        if log.tagged:
            assert (last.env, last.episode, last.t) == (rows[i].env, rows[i].episode, rows[i].t + len(steps) - 1)


def check_frames(
    log: Log, batch: Any, info: dict[Any, Any], *, k: int, padding: str = "repeat", merge: bool = False, n: int = 1
) -> None:
    """Stacks before and after the step; the latter `n` steps on."""
    present, places = log.present(), log.places()
    check_rows(log, batch, info, after=n == 1)

    def stack(episode: list[int], at: int) -> list[list[float]]:
        frames = []
        for place in range(at - k + 1, at + 1):
            row = present[episode[max(place, 0)]]
            blank = place < 0 and padding == "zeros"
            frames.append([0.0] * 3 if blank else observe(row.env, row.episode, row.t))
        return frames

    for i, slot in enumerate(log.slots_of(info["index"])):
        episode, at = places[slot]
        shape = (k * 3,) if merge else (k, 3)
        assert batch["obs"][i].shape == shape
        assert batch["obs"][i].view(k, 3).tolist() == stack(episode, at)
        end = min(at + n, len(episode)) - 1
        last = present[episode[end]]
        expected = [*stack(episode, end)[1:], observe(last.env, last.episode, last.t + 1)]
        assert then(batch, "obs")[i].view(k, 3).tolist() == expected


def check_deltas(log: Log, batch: Any, info: dict[Any, Any], *, offsets: dict[tuple[str, ...], list[int]]) -> None:
    """Each field at its offsets, clamped to the rows present of the episode, and the masks."""
    check_rows(log, batch, info, after=False)
    present, places = log.present(), log.places()
    for path, steps in offsets.items():
        level = batch
        for name in path[:-1]:
            level = level[name]
        read, pad = level[path[-1]], level[f"{path[-1]}_is_pad"]
        assert pad.dtype is torch.bool
        for i, slot in enumerate(log.slots_of(info["index"])):
            episode, at = places[slot]
            rows = [present[episode[min(max(at + step, 0), len(episode) - 1)]] for step in steps]
            if path[-1] == "obs":
                after = 1 if path[0] == "next" else 0
                assert read[i].tolist() == [observe(row.env, row.episode, row.t + after) for row in rows]
            else:
                assert read[i].tolist() == [getattr(row, path[-1]) for row in rows]
            assert pad[i].tolist() == [not 0 <= at + step < len(episode) for step in steps]


def check_sequence(
    log: Log,
    batch: Any,
    info: dict[Any, Any],
    *,
    length: int,
    boundary: str = "pad",
    burn_in: int = 0,
    bootstrap: int = 0,
    dilation: int = 1,
) -> None:
    """Every row of every window, its masks, and the anchors."""
    check_rows(log, batch, info)
    places, ahead = log.places(), (length + bootstrap - 1) * dilation
    total = burn_in + length + bootstrap
    slots, anchors = (log.slots_of(info[key]) for key in ("index", "anchor_index"))
    valid, learning = info["validity_mask"].tolist(), info["learning_mask"].tolist()
    assert len(slots) % total == 0
    for number in range(len(slots) // total):
        part = slice(number * total, (number + 1) * total)
        assert len(set(anchors[part])) == 1
        line, at = places[anchors[part.start]]
        if boundary == "strict":
            assert at + ahead < len(line)
        if boundary == "stop":
            at = max(0, min(at, len(line) - 1 - ahead))
        if boundary == "include_reset":
            line = [s for s in log.present() if s % log.lanes == anchors[part.start] % log.lanes]
            at = line.index(anchors[part.start])
        wanted = [at + (i - burn_in) * dilation for i in range(total)]
        assert slots[part] == [line[min(max(w, 0), len(line) - 1)] for w in wanted]
        assert valid[part] == [0 <= w < len(line) for w in wanted]
        assert learning[part] == [burn_in <= i < burn_in + length for i in range(total)]
        assert info["sequence_id"][part].tolist() == [number] * total
        assert info["step_in_sequence"][part].tolist() == list(range(total))


def reward_of(batch: Any) -> torch.Tensor:
    """The reward of goals: tells goal and row apart from any other."""
    goals: torch.Tensor = batch["desired_goal"]
    numbers: torch.Tensor = batch["id"]
    return goals * 2 + numbers.to(torch.float32) % 16


def check_hindsight(log: Log, batch: Any, info: dict[Any, Any], *, strategy: str, ratio: float, late: bool) -> None:
    """Goals come from where the strategy says, rewards follow; rows that are not relabelled stay as they were."""
    rows = check_rows(log, batch, info, after=False)
    present, places = log.present(), log.places()
    relabelled = batch["relabelled"].tolist()
    assert torch.equal(info["relabelled"], batch["relabelled"])
    slots, rewards = log.slots_of(info["index"]), reward_of(batch)
    for i, slot in enumerate(slots):
        episode, at = places[slot]
        reached = [achieved(present[s], 0 if late else 1) for s in episode]
        if late:
            reached[0] = -7.0  # nobody reached the first state by a step
        goals = {
            "future": reached[at + 1 :] if late else reached[at:],
            "final": reached[-1:] if not late or at + 1 < len(episode) else [],
            "episode": reached[1:] if late else reached,
            "random": [achieved(present[s], 0 if late else 1) for s in places],
        }[strategy]
        got = float(batch["desired_goal"][i])
        if relabelled[i]:
            assert got in goals
            assert float(then(batch, "reward")[i]) == float(rewards[i])
        else:
            assert got == goal(rows[i])
            assert float(then(batch, "reward")[i]) == rows[i].reward
            assert ratio < 1 or not goals, "every row that has a goal to take takes one"
    assert ratio > 0 or not any(relabelled)


def check_slices(
    log: Log,
    batch: Any,
    info: dict[Any, Any],
    *,
    length: int,
    strict: bool = True,
    pad: bool = False,
    span: tuple[Any, Any] = (False, False),
) -> list[list[int]]:
    """Pieces of episodes, of lawful lengths, with their flags; return the slots of each."""
    present, places = log.present(), log.places()
    slots = log.slots_of(info["index"])
    rows = [present[slot] for slot in slots]
    assert batch["id"].tolist() == [row.id for row in rows]
    short = any(len(slots) < length for slots, _ in log.episodes())
    assert (("collector", "mask") in info) == (pad and (short or any(span)))
    mask = info["collector", "mask"].tolist() if ("collector", "mask") in info else [True] * len(slots)
    last = info["next", "truncated"].reshape(-1).tolist()
    pieces: list[Any] = [[]]
    for i, slot in enumerate(slots):
        assert bool(info["next", "terminated"].reshape(-1)[i]) == rows[i].terminated
        assert bool(info["next", "done"].reshape(-1)[i]) == (rows[i].done or last[i])
        if not mask[i]:
            assert slot == pieces[-2][-1]  # the last row, repeated
            assert i % length
            assert not last[i]
            continue
        pieces[-1].append(slot)
        if last[i]:
            pieces.append([])
    assert pieces.pop() == []
    if pad:
        assert len(slots) == len(pieces) * length
    for piece in pieces:
        assert piece[0] in places, "a row of no episode"
        episode, at = places[piece[0]]
        assert piece == episode[at : at + len(piece)]
        full = length if strict else min(length, len(episode))
        assert len(piece) <= full <= len(episode)
        if len(piece) < full:
            out = full - len(piece)
            left = at == 0 and span[0] is not False and (span[0] is True or out <= span[0])
            right = at + len(piece) == len(episode) and span[1] is not False and (span[1] is True or out <= span[1])
            assert left or right
    return pieces
