"""What tests of calibration data share: conversations, files of records, and a tokenizer of single characters."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mergekit_slta.data.sources import CalibrationData, CalibrationSource
from mergekit_slta.errors import SltaError

BOS, EOS = 0, 1
CHARACTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?[]\n<>|/_{}"'
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def write_tokenizer(folder: Path, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """A character-level tokenizer that adds <s> and </s>, and drops characters that it does not know.

    Its files say to pad, and to truncate on the left.
    """
    vocabulary = {"<s>": BOS, "</s>": EOS, "<pad>": 2} | {c: i for i, c in enumerate(CHARACTERS, 3)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    backend.decoder = decoders.Fuse()
    backend.enable_padding(pad_id=2, pad_token="<pad>", length=64)
    backend.enable_truncation(max_length=5, direction="left")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        truncation_side="left",
        model_max_length=16,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def spelled(text: str) -> tuple[int, ...]:
    return tuple(3 + CHARACTERS.index(character) for character in text)


def with_special(text: str) -> tuple[int, ...]:
    return (BOS, *spelled(text), EOS)


def write_jsonl(path: Path, records: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def not_needed() -> PreTrainedTokenizerBase:
    raise AssertionError("the expert's tokenizer was loaded although nothing needs it")


def source_of(source: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> CalibrationSource:
    defaults: dict[str, Any] = {"template": "", "expert_tokenizer": not_needed, "max_tokens": 100, "seed": 0}
    return CalibrationSource(source, tokenizer=tokenizer, **defaults | settings)


def load(source: str, tokenizer: PreTrainedTokenizerBase, samples: int = 4, **settings: Any) -> CalibrationData:
    return source_of(source, tokenizer, **settings).draw(samples)


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(SltaError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message
