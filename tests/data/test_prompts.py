"""The general prompts that come with the package."""

import real_family

from mergekit_slta.data.prompts import TOPICS, general_prompts


def squeezed(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def test_any_number_of_them_is_of_all_topics() -> None:
    by_topic = {topic: general_prompts([topic]) for topic in TOPICS}
    every = general_prompts()
    assert len({*map(squeezed, every)}) == len(every) == 200 and {*map(len, by_topic.values())} == {25}
    assert sorted(every) == sorted(prompt for own in by_topic.values() for prompt in own)
    for topic in TOPICS:
        assert len({*every[:80]} & {*by_topic[topic]}) == 10
    assert {*general_prompts(["code", "sums"])} == {*by_topic["code"], *by_topic["sums"]}


def test_the_benchmarks_instructions_are_others() -> None:
    prompts = [squeezed(prompt) for prompt in general_prompts()]
    for form in (*real_family.FORMS, *real_family.CHECKS):
        begin, _, end = map(squeezed, form.partition("{}"))
        assert not [prompt for prompt in prompts if prompt.startswith(begin) and prompt.endswith(end)]
