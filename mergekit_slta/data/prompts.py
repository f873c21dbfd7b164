"""The general prompts that come with the package, by topic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

import yaml

from mergekit_slta.errors import SltaError

TOPICS = ("instructions", "chat", "explaining", "writing", "code", "sums", "languages", "reasoning")


def general_prompts(topics: Sequence[str] = ()) -> list[str]:
    """The prompts of some topics, or of all: the first of each topic, then the second ones, so that few are of all."""
    if unknown := [topic for topic in topics if topic not in TOPICS]:
        raise SltaError(f"There is no topic {unknown[0]!r}: choose from {', '.join(TOPICS)}.")
    by_topic = yaml.safe_load(Path(__file__).with_name("prompts.yml").read_text(encoding="utf-8"))
    rows = zip_longest(*(by_topic[topic] for topic in TOPICS if topic in (topics or TOPICS)))
    return [prompt for prompt in chain.from_iterable(rows) if prompt]
