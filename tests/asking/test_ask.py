"""A model's own answers: the tokens that transformers generates one by one, and those that the records give again."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from support import calibration_samples, families, memory
from support.adapters import write_adapter
from support.calibration_samples import BOS, EOS, LETTERS, load, spelled, write_jsonl, write_scripted
from support.command import run
from support.examining import t5
from transformers import AutoTokenizer

import mergekit_slta as slta
from mergekit_slta.asking import ask as asking
from mergekit_slta.cli.commands import main
from mergekit_slta.layers import attention, decoder

ANSWERED = "{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}" + ANSWERED
PROMPTS = ["abc " + "q" * length for length in (1, 30, 7, 12, 3, 22, 9)]


def write_model(folder: Path, architecture: str = "llama", template: str | None = PLAIN) -> Path:
    """A random model whose tokenizer knows single characters."""
    nested = architecture in families.MULTIMODAL
    config = families.config_of(architecture, **({} if nested else LETTERS))
    for name, value in LETTERS.items():
        setattr(config.get_text_config(), name, value)
    base = families.make_family(folder, config, experts=0).base
    calibration_samples.write_tokenizer(base, template)
    return base


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def one_by_one(model: Any, prompts: Sequence[Sequence[int]], most: int) -> list[list[int]]:
    """Each prompt with what ``generate`` adds to it alone."""
    return [
        model.generate(torch.tensor([[*prompt]]), do_sample=False, max_new_tokens=most, pad_token_id=2)[0].tolist()
        for prompt in prompts
    ]


def calibrating(path: Path, folder: Path, count: int) -> dict[int, tuple[list[int], str]]:
    """The rows of tokens that a file gives when it calibrates, each with the text of its answer, by record."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = load(str(path), tokenizer, samples=count, max_tokens=1000)
    return {
        record: ([*row], str(tokenizer.decode([*row[slice(*answer)]])) if answer else "")
        for record, row, answer in zip(data.records, data.token_ids, data.answers, strict=True)
    }


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_oss", "gemma3", "falcon_alibi", "lfm2", "qwen2_5_vl"])
@pytest.mark.parametrize("template", [PLAIN, None])
def test_answers_are_what_generate_gives_one_by_one_and_calibrate_with_the_same_tokens(
    architecture: str, template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "BATCH", 4)
    monkeypatch.setattr(attention, "SCORES", 100)
    folder = write_model(tmp_path, architecture, template)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    with mock.patch.object(decoder, "attend", wraps=decoder.attend) as attend:
        out = slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=20, quiet=True)
    assert attend.called == (architecture == "gpt_oss")  # which would have the scores of all pairs in memory
    before, after = ("[user]", "</s>[assistant]") if template else ("", "\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = random.Random(0).sample(PROMPTS, len(PROMPTS))
    texts = [f"<s>{before}{prompt}{after}" for prompt in asked]
    given = [tokenizer(t, add_special_tokens=False, padding=False, truncation=False)["input_ids"] for t in texts]
    expected = one_by_one(families.open_model(folder), given, 20)
    assert len({tuple(row[len(prompt) :]) for row, prompt in zip(expected, given, strict=True)}) > 2
    rows = calibrating(out, folder, len(PROMPTS))
    for number, wanted in enumerate(expected):
        row, answer = rows[number]
        assert row[: len(wanted)] == wanted
        words = str(tokenizer.decode(wanted[len(given[number]) :]))
        assert answer.removesuffix("</s>") == words.removesuffix("</s>").strip()
    assert [("messages" in record) for record in records_of(out)] == [template is not None] * len(PROMPTS)


@pytest.mark.parametrize("row", [{"prompt": "hi: "}, {"prompt": "hi:", "completion": " a"}])
def test_an_answer_that_calibrates_in_the_prompts_line_is_asked_for_there(row: dict[str, str], tmp_path: Path) -> None:
    folder = write_scripted(tmp_path / "model", [BOS, *spelled(row["prompt"] + "yes"), EOS], None)
    prompts = write_jsonl(tmp_path / "a.jsonl", [row])
    out = slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=5, quiet=True)
    assert records_of(out)[0]["prompt"] == row["prompt"]
    assert calibrating(out, folder, 1)[0][0] == [BOS, *spelled(row["prompt"] + "yes"), EOS]


THINKING = "<think>so</think>59"
# Like those of Qwen 3, of DeepSeek's distilled models, with an open thought in the prompt, and of Llama 3 and Gemma.
SPLIT = PLAIN.replace(
    "{{ m.content }}",
    "{% if '</think>' in m.content %}<think>{{ m.content.split('</think>')[0].split('<think>')[-1] }}</think>"
    "{% endif %}{{ m.content.split('</think>')[-1] }}",
)
DROPPED = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
TRIMMED = PLAIN.replace("m.content }}", "m.content | trim }}")
OTHER_END = PLAIN.replace("</s>", "<end>")
OPEN = "[assistant]<think>"


def of_script(folder: Path, said: str, template: str | None, **more: Any) -> tuple[Path, list[int], str]:
    """A model that says a text to the prompt "hi", the tokens of both, and a file of that prompt."""
    prompt = "<s>hi\n"
    if template:
        start = OPEN if OPEN in template else "[assistant]"
        prompt = f"<s>[user]hi{'<end>' if template == OTHER_END else '</s>'}{start}"
    tokenizer = calibration_samples.write_tokenizer(folder / "tokenizer")
    script = tokenizer(prompt + said, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    prompts = write_jsonl(folder / "prompts.jsonl", [{"prompt": "hi"}])
    return write_scripted(folder / "model", script, template, **more), script, prompts


@pytest.mark.parametrize(
    ("template", "said", "form"),
    [
        (PLAIN, "ho", "messages"),
        (PLAIN, " ho\n", "messages"),
        (PLAIN, THINKING, "messages"),
        (SPLIT, THINKING, "messages"),
        (SPLIT.replace("[assistant]", OPEN), "so</think>59", "messages"),
        (DROPPED, THINKING, "text"),
        (DROPPED.replace("[assistant]", OPEN), "so</think>59", "text"),
        (TRIMMED, "ho", "messages"),
        (TRIMMED, "ho\n", "text"),
        (OTHER_END, "ho", "text"),
        (None, "ho", "completion"),
        (None, " ho\n", "completion"),
    ],
)
@pytest.mark.parametrize("adds_end", [True, False])
def test_a_record_calibrates_with_all_tokens_from_the_prompt_to_the_end(
    template: str | None, said: str, form: str, adds_end: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, script, prompts = of_script(tmp_path, said + "</s>", template, adds_end=adds_end)
    out = slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=len(said) + 1, quiet=True)
    (record,), (row, answer) = records_of(out), calibrating(out, folder, 1)[0]
    assert row[: len(script)] == script
    tag = "<think>" * (template == SPLIT.replace("[assistant]", OPEN))  # by the template, and not in the content
    assert answer.removesuffix("</s>").rstrip() == tag + said.strip()
    assert form == next(name for name in ("messages", "text", "completion") if name in record)
    assert not caplog.messages


SYSTEM, ASKED, SAID = (
    {"role": role, "content": content} for role, content in (("system", "be kind"), ("user", "hi"), ("assistant", "ho"))
)
MORE = {"role": "user", "content": "and"}


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": [SYSTEM, ASKED, SAID]}, [SYSTEM, ASKED]),
        ({"messages": [SYSTEM, ASKED, SAID, MORE, SAID]}, [SYSTEM, ASKED, SAID, MORE]),
        ({"messages": json.dumps([ASKED, SAID])}, [ASKED]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, [ASKED]),
        ({"prompt": [SYSTEM, ASKED], "completion": [SAID]}, [SYSTEM, ASKED]),
        ({"prompt": " hi\n", "completion": "ho"}, [ASKED]),
        ({"question": "hi", "answer": "ho", "text": "Q hi A ho"}, [ASKED]),
        ({"instruction": "hi", "input": "and", "output": "ho"}, [ASKED | {"content": "hi\nand"}]),
        ({"instruction": "hi", "input": "", "output": "ho"}, [ASKED]),
        ({"text": "hi"}, [ASKED]),
        ({"system": "be kind", "conversations": [ASKED, SAID]}, [SYSTEM, ASKED]),
        ({"system_prompt": "be kind", "question": "hi", "response": "ho"}, [SYSTEM, ASKED]),
        ({"prompt": json.dumps([ASKED]), "completion": "ho"}, [ASKED]),
        ({"prompt": '{"a": 1}'}, [ASKED | {"content": '{"a": 1}'}]),
    ],
)
def test_a_records_answer_is_left_out_and_the_turns_before_it_stay(
    record: dict[str, Any], turns: list[dict[str, str]], tmp_path: Path
) -> None:
    folder = write_model(tmp_path)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [record])
    (found,) = records_of(slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=5, quiet=True))
    assert found["messages"][:-1] == turns and found["messages"][-1]["role"] == "assistant"


def test_records_that_ask_nothing_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path)
    shown = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}
    nested = json.loads("[" * 900 + "]" * 900)
    records = [{"title": "x"}, {"prompt": "hi", "context": "x"}, {"messages": [SAID]}, {"prompt": "q" * 200}]
    records += [
        {"messages": [shown]},
        {"messages": [ASKED | {"more": nested}]},
        {"messages": [ASKED | {"id": "\ud83d"}]},
    ]
    prompts = write_jsonl(tmp_path / "a.jsonl", records)
    out = slta.ask(folder, tmp_path / "o.jsonl", prompts, max_new_tokens=5, quiet=True)
    assert len(records_of(out)) == 1
    (skipped,) = [message for message in caplog.messages if "kipped" in message]
    assert skipped.startswith("Skipped 6 prompts, the first because row ")
    left_out = "The prompts leave out the field 'context': write what the model needs into them."
    assert left_out in caplog.messages
    with pytest.raises(slta.SltaError, match="row 1 has no prompt: its fields are title; name one of them 'prompt'"):
        slta.ask(folder, tmp_path / "p.jsonl", write_jsonl(tmp_path / "b.jsonl", records[:1]))
    with pytest.raises(slta.SltaError, match="row 1 leaves no room for an answer: lower max_new_tokens"):
        slta.ask(folder, tmp_path / "p.jsonl", write_jsonl(tmp_path / "c.jsonl", records[1:2]))


def test_tools_are_asked_with_and_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path, template="{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + PLAIN)
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    prompts = write_jsonl(tmp_path / "a.jsonl", [{"messages": [ASKED], "tools": tools}])
    out = slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=5, quiet=True)
    (record,), (row, _) = records_of(out), calibrating(out, folder, 1)[0]
    assert record["tools"] == tools and row[:5] == [*spelled("find"), BOS] and "leave out" not in caplog.text
    slta.ask(write_model(tmp_path / "without"), tmp_path / "o.jsonl", prompts, max_new_tokens=5, quiet=True)
    assert "The prompts leave out the tools: write what the model needs into them." in caplog.messages


def test_a_run_that_was_killed_goes_on_and_writes_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "BATCH", 2)
    folder = write_model(tmp_path)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    whole = slta.ask(folder, tmp_path / "whole.jsonl", prompts, max_new_tokens=8, quiet=True)
    out, produced, batches, most = tmp_path / "out.jsonl", asking._produced, list[int](), 2

    def counting(model: Any, rows: Any, limit: int) -> Any:
        if len(batches) == most:
            raise KeyboardInterrupt
        batches.append(len(rows))
        return produced(model, rows, limit)

    monkeypatch.setattr(asking, "_produced", counting)
    with pytest.raises(KeyboardInterrupt):
        slta.ask(folder, out, prompts, max_new_tokens=8, quiet=True)
    assert not out.exists()
    beside = tmp_path / "out.jsonl.partial"
    beside.write_bytes(beside.read_bytes()[:-9])  # while it wrote the last answer of the second batch
    said = "out.jsonl.partial holds answers of another model, to other prompts or of another length"
    with pytest.raises(slta.SltaError, match=said):
        slta.ask(folder, out, prompts, max_new_tokens=9, quiet=True)
    batches, most = [], 4
    slta.ask(folder, out, prompts, max_new_tokens=8, quiet=True)
    assert len(batches) == 3  # the second one again, and the last two
    assert out.read_bytes() == whole.read_bytes() and not beside.exists()
    with pytest.raises(slta.SltaError, match=r"out.jsonl already exists and is unchanged: name another file"):
        slta.ask(folder, out, prompts, max_new_tokens=8, quiet=True)


@pytest.mark.parametrize("most", [2, 0])
def test_prompts_that_do_not_fit_together_are_answered_in_halves(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    whole = slta.ask(folder, tmp_path / "whole.jsonl", prompts, max_new_tokens=8, quiet=True)
    generate = transformers.GenerationMixin.generate

    def limited(self: Any, ids: torch.Tensor, **settings: Any) -> Any:
        if len(ids) > most:
            raise memory.torch_without_memory()
        return generate(self, ids, **settings)

    monkeypatch.setattr(transformers.GenerationMixin, "generate", limited)
    if most:
        again = slta.ask(folder, tmp_path / "again.jsonl", prompts, max_new_tokens=8, quiet=True)
        assert again.read_bytes() == whole.read_bytes()
    else:
        with pytest.raises(slta.SltaError, match="One answer does not fit into the memory of cpu: .*max_new_tokens"):
            slta.ask(folder, tmp_path / "again.jsonl", prompts, max_new_tokens=8, quiet=True)


def test_answers_that_are_cut_off_or_empty_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = [BOS, *spelled("abcdef "), EOS, *spelled("xyz"), EOS, *spelled("abcdefgh"), EOS]
    folder = write_scripted(tmp_path / "model", script, None)
    # The newline behind a prompt is at the position of its length plus 1; the script's next token comes first.
    prompts = [{"prompt": "p" * length} for length in (5, 6, 7, 10, 12, 13)]
    out = tmp_path / "out.jsonl"
    asked = write_jsonl(tmp_path / "a.jsonl", prompts)
    assert run("ask", folder, asked, "-o", out, "--max-new-tokens", 4).stdout == f"{out} written.\n"
    answers = {record["prompt"].strip(): record["completion"] for record in records_of(out)}
    assert answers == {"p" * 7: "xyz", "p" * 12: "bcde", "p" * 13: "cdef"}
    assert caplog.messages == [
        f"{out}: 3 of 6 answers are empty and left out.",
        f"{out}: 2 of 6 answers are cut off after 4 tokens, and have no end token.",
        f"{out}: 2 of 6 answers change their tokens when their text is tokenized again.",  # by the tokenizer's </s>
    ]
    empty = write_jsonl(tmp_path / "b.jsonl", prompts[:1])
    with pytest.raises(slta.SltaError, match="answers none of 1 prompt: give other prompts"):
        slta.ask(folder, tmp_path / "none.jsonl", empty, max_new_tokens=4, quiet=True)


def test_an_answer_that_ends_in_its_reasoning_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _, prompts = of_script(tmp_path, f"{THINKING} and more", PLAIN)
    for limit, said in ((10, "end in the reasoning after 10 tokens: delete"), (20, "are cut off after 20 tokens, and")):
        slta.ask(folder, tmp_path / f"{limit}.jsonl", prompts, max_new_tokens=limit, quiet=True)
        (message,) = [message for message in caplog.messages if "after" in message]
        assert said in message
        caplog.clear()


@pytest.mark.parametrize("template", [PLAIN, None])
@pytest.mark.parametrize("end", ["", "</s>"])
def test_an_answer_that_is_cut_off_calibrates_without_an_end(end: str, template: str | None, tmp_path: Path) -> None:
    """The chat template would write one; the tokenizer adds none."""
    folder, script, prompts = of_script(tmp_path, f"abcde{end or 'fgh'}", template, adds_end=False)
    out = slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=6 if end else 5, quiet=True)
    row, answer = calibrating(out, folder, 1)[0]
    assert row == (script if end else script[:-3]) and answer.removesuffix("</s>") == "abcde"


def test_the_token_that_ends_a_turn_in_the_chat_template_ends_an_answer(tmp_path: Path) -> None:
    """As <|im_end|> does where a base model, whose end token is another, has learned chats."""
    folder, _, prompts = of_script(tmp_path, "ho<pad>[user]more", PLAIN.replace("</s>", "<pad>"))
    (record,) = records_of(slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=12, quiet=True))
    assert record["messages"][1:] == [{"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_that_overflows_is_named(dtype: str, tmp_path: Path) -> None:
    folder, _, prompts = of_script(tmp_path, "ho</s>", None)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.transformer.ln_f.weight.data.fill_(60_000)
    model.transformer.wte.weight.data.mul_(4)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    out = tmp_path / "out.jsonl"
    if dtype == "bfloat16":
        assert slta.ask(folder, out, prompts, max_new_tokens=3, quiet=True).is_file()
        return
    with pytest.raises(slta.SltaError, match="model computes numbers that are not finite in float16: in its config.js"):
        slta.ask(folder, out, prompts, max_new_tokens=3, quiet=True)
    assert not out.exists() and len(out.with_name("out.jsonl.partial").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "is_kept"),
    [
        ("so " + "ab " * 12, False),
        ("a" * 39, False),
        ("Once more, " + "and so on, " * 4, False),
        ("".join(f"line {n} of more\n" for n in range(3)), True),  # a list of different lines
        ("| _ | _ | _ |", True),  # too short to be sure
    ],
)
def test_an_answer_that_repeats_one_phrase_to_the_limit_is_left_out(
    said: str, is_kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_scripted(tmp_path / "model", [BOS, *spelled(f"hi\n{said}."), EOS], None)
    # The second prompt is one token longer, so that its answer begins and ends one token later.
    prompts = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}, {"prompt": "hi" + "i" * len(said)}])
    out = slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=len(said), quiet=True)
    assert any(said.startswith(record["completion"]) for record in records_of(out)) == is_kept
    ends = f"until they are cut off after {len(said)} tokens, and are left out."
    loops = f"{out}: 1 of 2 answers repeat one phrase {ends}"
    assert (loops in caplog.messages) == (not is_kept)
    assert any("are cut off" in message and message != loops for message in caplog.messages) == is_kept


def test_an_adapter_is_applied(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    adapter = write_adapter(folder, tmp_path / "adapter", "q_proj", "down_proj", alpha=40)
    adapted = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), str(adapter))
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    adapted.merge_and_unload().save_pretrained(whole)
    prompts = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    how: dict[str, Any] = {"max_new_tokens": 8, "quiet": True, "lora_merge_cache": str(tmp_path / "cache")}
    answers, of_whole, of_base = (
        slta.ask(model, tmp_path / f"out{number}.jsonl", prompts, **how).read_bytes()
        for number, model in enumerate((f"{folder}+{adapter}", str(whole), str(folder)))
    )
    assert answers == of_whole != of_base
    with pytest.raises(slta.SltaError, match="is a LoRA adapter: name a folder for the merged model with --lora"):
        slta.ask(f"{folder}+{adapter}", tmp_path / "no.jsonl", prompts, max_new_tokens=8)


def test_a_merged_adapter_counts_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In memory, where the base model that it was trained on is stored in bfloat16."""
    monkeypatch.setattr(asking, "LIBRARIES", 0)
    whole, half = write_model(tmp_path), tmp_path / "half"
    adapter = write_adapter(whole, tmp_path / "adapter", "q_proj")
    shutil.copytree(whole, half)
    transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(half)
    prompts, cache = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}]), str(tmp_path / "cache")
    for number, model in enumerate((str(whole), f"{half}+{adapter}", str(half))):
        slta.ask(model, tmp_path / f"{number}.jsonl", prompts, max_new_tokens=8, lora_merge_cache=cache)
    of_whole, of_adapter, of_half = (line for line in capsys.readouterr().err.splitlines() if "Memory" in line)
    assert of_whole == of_adapter != of_half


def test_a_model_that_answers_nothing_and_unknown_topics_are_refused(tmp_path: Path) -> None:
    t5(tmp_path / "t5")
    with pytest.raises(slta.SltaError, match="t5 is not a decoder-only language model: only these can answer prompts"):
        slta.ask(tmp_path / "t5", tmp_path / "out.jsonl", topics=["code"], quiet=True)
    with pytest.raises(slta.SltaError, match="There is no topic 'cooking': choose from instructions, chat"):
        slta.ask(tmp_path / "t5", tmp_path / "out.jsonl", topics=["code", "cooking"])


def test_the_models_own_settings_do_not_sample_and_every_end_token_ends(tmp_path: Path) -> None:
    folder = write_scripted(tmp_path / "model", [BOS, *spelled("hi\nab<cd"), EOS], None)
    settings = transformers.GenerationConfig(
        eos_token_id=[2, *spelled("<")], do_sample=True, temperature=50.0, repetition_penalty=9.0, max_length=3
    )
    settings.save_pretrained(folder)
    prompts = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}])
    (record,) = records_of(slta.ask(folder, tmp_path / "out.jsonl", prompts, max_new_tokens=9, quiet=True))
    assert record == {"prompt": "hi\n", "completion": "ab<"}


def test_the_command_asks_the_packages_prompts_by_topic(tmp_path: Path) -> None:
    out, plain, which = tmp_path / "out.jsonl", tmp_path / "prompts.txt", ["--topic", "sums", "--samples", 3]
    run("ask", write_model(tmp_path), "-o", out, *which, "--max-new-tokens", 4, "--quiet")
    assert run("ask", "--prompts-only", *which, "-o", plain).output == f"{plain} written.\n"
    asked = [record["messages"][0]["content"] for record in records_of(out)]
    assert asked == plain.read_text().splitlines() and len(asked) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-o", "a.jsonl"], "Missing argument 'MODEL'"),
        (["m", "-o", "a.csv"], "a.csv does not end in .jsonl: name another file"),
        (["m", "-o", "there.jsonl"], "there.jsonl already exists and is unchanged"),
        (["m", "there.jsonl", "-o", "a.jsonl", "--topic", "code"], "give only one of the two"),
        (["m", "no.jsonl", "-o", "a.jsonl"], "Calibration file 'no.jsonl' does not exist"),
        (["no", "-o", "a.jsonl"], "no cannot be used: there is no such folder"),
        (["m", "--prompts-only", "-o", "a.txt"], "leave MODEL out"),
        (["--prompts-only", "-o", "a.jsonl"], "a.jsonl does not end in .txt"),
        (["m", "-o", "a.jsonl", "--topic", "cooking"], "'cooking' is not one of 'instructions', 'chat'"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: list[str], sentence: str, here: None, tmp_path: Path) -> None:
    write_model(tmp_path).rename("m")
    Path("there.jsonl").write_text('{"prompt": "hi"}\n')
    done = CliRunner().invoke(main, ["ask", *arguments])
    assert done.exit_code and sentence in " ".join(done.output.split()), done.output
    assert Path("there.jsonl").read_text() == '{"prompt": "hi"}\n' and not Path("a.jsonl").exists()
