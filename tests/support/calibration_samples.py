"""What tests of calibration data share: conversations, files of records, a tokenizer of single characters, and a model
that says what it is told.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import families
from tokenizers import decoders, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergekit_slta.data.sources import CalibrationData, CalibrationSource, read_records
from mergekit_slta.errors import SltaError

BOS, EOS = 0, 1
CHARACTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?[]\n<>|/_{}"'
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def write_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """A character-level tokenizer that adds <s> and </s>, and drops characters that it does not know.

    Its files say to pad, and to truncate on the left.
    """
    backend = families.character_tokenizer(("<s>", "</s>", "<pad>", *CHARACTERS))
    backend.decoder = decoders.Fuse()
    backend.enable_padding(pad_id=2, pad_token="<pad>", length=64)
    backend.enable_truncation(max_length=5, direction="left")
    families.save_tokenizer(folder, backend, chat_template, truncation_side="left", model_max_length=16)
    return AutoTokenizer.from_pretrained(folder)


def spelled(text: str) -> tuple[int, ...]:
    return tuple(3 + CHARACTERS.index(character) for character in text)


def with_special(text: str) -> tuple[int, ...]:
    return (BOS, *spelled(text), EOS)


def write_jsonl(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def no_tokenizer() -> PreTrainedTokenizerBase:
    raise SltaError("the expert has no tokenizer")


def source_of(source: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> CalibrationSource:
    defaults: dict[str, Any] = {"template": "", "load_expert_tokenizer": no_tokenizer, "max_tokens": 100, "seed": 0}
    return CalibrationSource(source, records=read_records(source), tokenizer=tokenizer, **defaults | settings)


def load(source: str, tokenizer: PreTrainedTokenizerBase, samples: int = 4, **settings: Any) -> CalibrationData:
    return source_of(source, tokenizer, **settings).draw(samples)


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(SltaError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


# Characters are tokens, so that a model's answers are tokenized as it produced them.
LETTERS: dict[str, Any] = {"vocab_size": 3 + len(CHARACTERS), "bos_token_id": BOS, "eos_token_id": EOS}


def write_scripted(folder: Path, script: Sequence[int], template: str | None, *, adds_end: bool = True) -> Path:
    """A GPT-2 that looks at positions alone: after ``i`` tokens, whatever they are, it says token ``i`` of a script."""
    size: int = LETTERS["vocab_size"]
    config = transformers.GPT2Config(n_embd=size, n_layer=1, n_head=1, **LETTERS)
    model: Any = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.eye(size))  # the head's weight, too
        model.transformer.wpe.weight[: len(script) - 1].copy_(9 * torch.eye(size)[list(script[1:])])
        model.transformer.ln_f.weight.fill_(1)
    model.save_pretrained(folder)
    write_tokenizer(folder, template)
    if not adds_end:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        only_begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        tokenizer.backend_tokenizer.post_processor = only_begins
        tokenizer.save_pretrained(folder)
    return folder
