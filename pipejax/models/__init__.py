"""Flax nnx models whose activations are named for offload. They know nothing of pipelines."""

from pipejax.models import attention as attention
from pipejax.models import gpt as gpt
from pipejax.models import llama as llama
