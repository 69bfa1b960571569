"""The demo model's tokenizer: byte-level BPE trained on the generated text, one token per digit,
and a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo.text import documents, long_document
from tools.demo.text.chat import BOS, END, PAD, ROLE_TOKENS

SPECIAL = (PAD, BOS, END, *ROLE_TOKENS)
VOCAB_SIZE = 4096
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('the demo model knows the roles system, user and assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def training_text(seed: int, count: int) -> list[str]:
    """Return the texts that merges are trained on, without special tokens."""
    texts = [found.text for found in documents(seed, count)]
    texts += [long_document(seed, index).text for index in range(count // 50)]
    return [part for text in texts for part in split_special(text)]


def split_special(text: str) -> list[str]:
    """Return the pieces of `text` between special tokens."""
    for token in SPECIAL:
        text = text.replace(token, "\0")
    return [part for part in text.split("\0") if part]


def make_tokenizer(seed: int, count: int = 20000) -> Tokenizer:
    """Train the tokenizer; the same seed gives the same file. Encoding begins with <|bos|> by
    default."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=40,
        special_tokens=list(SPECIAL),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed, count), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(ROLE_TOKENS),
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
