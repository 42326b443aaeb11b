"""Double DQN on Gymnasium's CartPole-v1, with the public API of Ostinato."""

from ostinato.demo.agent import Agent
from ostinato.demo.config import SOLVED_RETURN, DqnConfig, Report, TrainingState
from ostinato.demo.figure import training_figure
from ostinato.demo.training import Collector, EnvSpec, Reopened, evaluate, make_buffer, save_and_reopen, train

__all__ = [
    "SOLVED_RETURN",
    "Agent",
    "Collector",
    "DqnConfig",
    "EnvSpec",
    "Reopened",
    "Report",
    "TrainingState",
    "evaluate",
    "make_buffer",
    "save_and_reopen",
    "train",
    "training_figure",
]
