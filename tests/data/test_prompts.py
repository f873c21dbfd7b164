"""The general prompts that come with the package."""

from __future__ import annotations

from pathlib import Path

import real_family
import yaml

from mergekit_slta.data import prompts
from mergekit_slta.data.prompts import TOPICS, general_prompts


def squeezed(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def test_every_topic_has_25_prompts_of_one_line_and_no_two_are_alike() -> None:
    by_topic = yaml.safe_load(Path(prompts.__file__).with_name("prompts.yml").read_text(encoding="utf-8"))
    assert tuple(by_topic) == TOPICS and len(TOPICS) == 8
    assert {topic: len(own) for topic, own in by_topic.items()} == dict.fromkeys(TOPICS, 25)
    every = [prompt for own in by_topic.values() for prompt in own]
    assert len(set(map(squeezed, every))) == len(every) == 200
    assert all(prompt == prompt.strip() and "\n" not in prompt and 10 < len(prompt) < 150 for prompt in every)


def test_any_number_of_them_is_of_all_topics() -> None:
    by_topic = {topic: general_prompts([topic]) for topic in TOPICS}
    every = general_prompts()
    assert sorted(every) == sorted(prompt for own in by_topic.values() for prompt in own)
    for topic in TOPICS:
        assert len({*every[:80]} & {*by_topic[topic]}) == 10
    assert {*general_prompts(["code", "sums"])} == {*by_topic["code"], *by_topic["sums"]}


def test_the_benchmarks_instructions_are_others() -> None:
    forms = [*real_family.FORMS, *real_family.CHECKS]
    asked = {squeezed(form.format(subject)) for form in forms for subject in real_family.SUBJECTS}
    assert not asked & set(map(squeezed, general_prompts()))
    beginnings = [squeezed(form.partition("{}")[0]) for form in forms]
    endings = [squeezed(form.partition("{}")[2]) for form in forms]
    for prompt in map(squeezed, general_prompts()):
        for begin, end in zip(beginnings, endings, strict=True):
            assert not (prompt.startswith(begin) and prompt.endswith(end)), prompt
