"""What the data package offers and what it may not load."""

import subprocess
import sys

from uneven import data


def test_public_names_are_pinned() -> None:
    assert data.__all__ == [
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
    assert all(hasattr(data, name) for name in data.__all__)


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, uneven.data; print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
