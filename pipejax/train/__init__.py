"""Training on top of a pipeline: optimizer, state, checkpoints, metrics, the loop, sampling."""

from pipejax.train.checkpoint import CheckpointError as CheckpointError
from pipejax.train.checkpoint import Checkpoints as Checkpoints
from pipejax.train.loop import RunConfig as RunConfig
from pipejax.train.loop import TrainingError as TrainingError
from pipejax.train.loop import train as train
from pipejax.train.optimizer import Optimizer as Optimizer
from pipejax.train.optimizer import OptimizerConfig as OptimizerConfig
from pipejax.train.optimizer import make_optimizer as make_optimizer
from pipejax.train.sample import sample as sample
from pipejax.train.state import Trainer as Trainer
from pipejax.train.state import TrainState as TrainState
