"""Conversations read and count as transformers has it: `apply_chat_template` and its mask of assistant tokens."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.chats import CHATML, CHATML_TAGGED, CONVERSATIONS, HEADERS, byte_level, chat_tokenizer, sentence_piece
from uneven.data.chat import read_template

MODELS = {"byte level": byte_level, "sentence piece": sentence_piece}


@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("template", "tagged"), [(HEADERS, HEADERS), (CHATML_TAGGED, CHATML_TAGGED), (CHATML, CHATML_TAGGED)]
)
def test_ids_and_mask_are_those_of_transformers(
    tmp_path: Path, template: str, tagged: str, model: str, conversation: int
) -> None:
    """Without marks in the template, the mask is that of the same template with marks."""
    messages = CONVERSATIONS[conversation]
    found = read_template(chat_tokenizer(tmp_path / "a", template, model=MODELS[model]()), where="here")
    rendered = found.render(messages, where="here")
    ((ids, is_assistants),) = found.encode([rendered])

    theirs = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert theirs.apply_chat_template(messages, tokenize=False) == rendered.text
    needed = theirs.apply_chat_template(
        messages, chat_template=tagged, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == needed["input_ids"]
    assert is_assistants.astype(int).tolist() == needed["assistant_masks"]
    assert 0 < sum(needed["assistant_masks"]) < len(ids)
