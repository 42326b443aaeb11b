"""The main job in one package: Double DQN on a Gymnasium simulator, through the library's public API only."""

from ostinato.demo.agent import Agent
from ostinato.demo.config import SOLVED_RETURN, DqnConfig, Progress, Report
from ostinato.demo.picture import picture
from ostinato.demo.reopen import Reopened, save_and_reopen
from ostinato.demo.simulate import Collector, EnvSpec, evaluate
from ostinato.demo.training import make_buffer, train

__all__ = [
    "SOLVED_RETURN",
    "Agent",
    "Collector",
    "DqnConfig",
    "EnvSpec",
    "Progress",
    "Reopened",
    "Report",
    "evaluate",
    "make_buffer",
    "picture",
    "save_and_reopen",
    "train",
]
