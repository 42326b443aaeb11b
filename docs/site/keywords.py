"""Words that a reader may search for and a title does not have: abbreviations, and the names that others use."""

from __future__ import annotations

__all__ = ["KEYWORDS"]

KEYWORDS: dict[str, list[str]] = {
    "README.md": ["install", "introduction"],
    "audit.md": ["bug", "correctness", "cpprb", "fasttd3", "holosoma", "skrl"],
    "casts.md": ["dtype", "float64", "numpy"],
    "choosing.md": ["compression", "cuda", "device", "gpu", "images", "memory", "storage", "writer"],
    "combinations.md": ["compatibility"],
    "compat/isaacgymenvs.md": ["isaacgymenvs"],
    "compat/objectrl.md": ["objectrl"],
    "datasets.md": ["d4rl", "hdf5", "lerobot", "minari", "mujoco", "offline", "robomimic", "zarr"],
    "doctor.md": ["check", "validate"],
    "environments.md": ["autoreset", "environment", "gymnasium", "vectorized"],
    "failures.md": ["crash", "error", "exception"],
    "flow.md": ["rate limiter", "reverb", "samples per insert"],
    "migrating.md": ["migration", "replace"],
    "groups.md": ["agent", "grpo", "llm", "rlhf", "verl"],
    "mixing.md": ["demonstrations", "offline", "rlpd"],
    "recipes/cleanrl.md": ["cleanrl", "dqn"],
    "recipes/isaac.md": ["amp", "gpu", "isaac gym", "isaac lab", "isaacgymenvs"],
    "recipes/ray.md": ["cluster", "distributed", "ray"],
    "recipes/rlinf.md": ["rlinf"],
    "recipes/robot-datasets.md": ["behaviour cloning", "imitation", "lerobot"],
    "recipes/sb3.md": ["sac", "sb3", "stable baselines"],
    "recipes/torchrl.md": ["torchrl"],
    "samplers/by-field.md": ["grpo", "llm"],
    "samplers/frames.md": ["action chunk", "atari", "delta timestamps", "frame stack", "framestack", "images"],
    "samplers/hindsight.md": ["goal-conditioned", "herreplaybuffer"],
    "samplers/nstep.md": ["multi-step", "n-step", "rainbow"],
    "samplers/prioritized.md": ["per", "prioritised", "prioritized", "priority", "sum tree"],
    "samplers/sequences.md": ["burn-in", "gru", "lstm", "r2d2", "recurrent", "rnn", "sequence"],
    "samplers/slices.md": ["dreamer", "recurrent", "rnn", "sequence", "slice", "transformer"],
    "samplers/uniform.md": ["epoch", "minibatch", "ppo", "random", "uniform"],
    "saving.md": ["checkpoint", "load", "restore", "resume", "save"],
    "scaling.md": ["distributed", "multiprocessing", "parallel", "process"],
    "trajectories.md": ["rollout", "trajectory"],
    "viewing.md": ["plot", "visualize"],
}
"""Words by page, in lower case: the search divides a name such as `LeRobot` into two words.

The search puts a page with one of its words before those that only have it in their text. It leaves out the English
word "her", and finds `HERReplayBuffer` by its beginning instead.
"""
