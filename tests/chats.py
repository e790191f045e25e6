"""Chat templates, a small tokenizer for them, and conversations."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from uneven.data import Tokenizer, load_tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|eot|>")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are terse.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with a system prompt of its own, as many small models have it."""

CHATML_TAGGED = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
"""The same text, with marks."""

HEADERS = """\
{{- bos_token }}
{#- A loop over the turns, in the manner of Llama 3, that says what is generated. #}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|header|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + '<|eot|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|header|>\n\n' }}
{%- endif %}
"""

CONVERSATIONS = [
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "system", "content": "Answer in French.\n\n"},
        {"role": "user", "content": "  the cat 😀 sat"},
        {"role": "assistant", "content": "\n\nle chat é assis "},
        {"role": "user", "content": "and the dog?\n"},
        {"role": "assistant", "content": "le chien\n\n\n"},
    ],
    [
        {"role": "user", "content": "say nothing"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": '<b>&amp;</b> "quoted" {{ braces }}'},
        {"role": "user", "content": "the assistant has the last word no more"},
    ],
]


TEXT = "the cat sat on the dog\n\n le chat le chien assistant user system"


def byte_level() -> tokenizers.Tokenizer:
    """As in GPT-2: white space belongs to the word behind it, but not to its offsets."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = processors.ByteLevel(trim_offsets=True)
    model.decoder = decoders.ByteLevel()
    return trained(model, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def sentence_piece() -> tokenizers.Tokenizer:
    """As in Llama 2: a mark for spaces, one before the text, and bytes for what has no token."""
    model = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return trained(model, initial_alphabet=[], bytes_too=True)


def trained(
    model: tokenizers.Tokenizer, *, initial_alphabet: list[str], bytes_too: bool = False
) -> tokenizers.Tokenizer:
    special = [*SPECIAL, *(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if bytes_too else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=290 if not bytes_too else 330,
        special_tokens=special,
        initial_alphabet=initial_alphabet,
        show_progress=False,
    )
    model.train_from_iterator([TEXT] * 4, trainer)
    return model


def chat_tokenizer(
    folder: Path, template: str | None, *, model: tokenizers.Tokenizer | None = None, **config: object
) -> Tokenizer:
    """A tokenizer with special tokens, in a folder that has a chat template where one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (model or byte_level()).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(str(folder))
