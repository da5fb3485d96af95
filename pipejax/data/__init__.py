"""Token files, a byte-level tokenizer, and batches that are a function of the step alone."""

from pipejax.data.bytes import SEPARATOR as SEPARATOR
from pipejax.data.bytes import VOCAB_SIZE as VOCAB_SIZE
from pipejax.data.bytes import decode as decode
from pipejax.data.bytes import encode as encode
from pipejax.data.bytes import tokenize_folder as tokenize_folder
from pipejax.data.loader import Loader as Loader
from pipejax.data.tokens import DataError as DataError
from pipejax.data.tokens import TokenFile as TokenFile
from pipejax.data.tokens import write_tokens as write_tokens
