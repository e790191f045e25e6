"""From files of text and records to rows of token ids: corpus, tokenizer, order of samples, packed sequences.

One idea: everything here is a function of contents and a seed, never of a machine, a rank or a layout.
Imports numpy, tokenizers and jinja2, never torch or transformers.
"""

from uneven.data.corpus import Corpus, Document, find_files, read_corpus
from uneven.data.dataset import Packing, TokenDataset, TokenReader, prepare_dataset
from uneven.data.order import sample_index
from uneven.data.records import Fields
from uneven.data.rows import Rows
from uneven.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Corpus",
    "Document",
    "Fields",
    "Packing",
    "Rows",
    "TokenDataset",
    "TokenReader",
    "Tokenizer",
    "find_files",
    "load_tokenizer",
    "prepare_dataset",
    "read_corpus",
    "sample_index",
]
