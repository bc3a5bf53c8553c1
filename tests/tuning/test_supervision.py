"""What is learnt of a sample: answers and completions with their end of turn, found by blocks or by prefixes."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agora_protocol.errors import DataError, DiskError, ManifestError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agora.data.tokenizer import ByteTokenizer
from agora.tuning.chat import chat_template
from agora.tuning.chat.chat_template import (
    TemplateProblem,
    split_supervised,
    training_templates,
    without_generation_blocks,
)
from agora.tuning.chat.conversations import ChatMessage, Completion, Conversation, PlainText, Preference, Role, Sample
from agora.tuning.chat.model_tokenizer import ModelTokenizer, open_model_tokenizer, read_chat_template
from agora.tuning.chat.sample_file import PlacedSample
from agora.tuning.chat.sample_formats import ReadingCounts, ReadingRules
from agora.tuning.chat.supervision import TokenSample, encode_samples, mark_sample, tokenise
from tests.tuning.chat_folders import CHATML, CHATML_WITH_BLOCKS, DROPS_EARLIER_THOUGHTS, write_folder

NOW = datetime(2026, 7, 1)
BYTES = open_model_tokenizer(None, NOW)


def message(role: Role, content: str, **extra: Any) -> ChatMessage:
    return ChatMessage(role, content, extra=extra)


TWO_TURNS = Conversation(
    (
        message("system", "Be brief."),
        message("user", "2 + 2?"),
        message("assistant", "\n four, caf\u00e9 \U0001f600 "),
        message("user", "Sure?"),
        message("assistant", "Yes."),
    )
)


def tokens_of(
    sample: Sample, tokenizer: ModelTokenizer, context: int | None = None, supervise_all: bool = False
) -> TokenSample:
    marked = mark_sample(PlacedSample(sample, "x.jsonl:7"), tokenizer, supervise_all=supervise_all)
    return next(encode_samples([marked], tokenizer, context=context))


def marked(sample: Sample, tokenizer: ModelTokenizer, **more: Any) -> str:
    """The text of a sample of one sequence, with what its supervised tokens stand for in brackets."""
    (sequence,) = tokens_of(sample, tokenizer, **more)
    return "".join(
        f"[{part}]" if kind else part for part, kind in split_supervised(sequence.text, sequence.supervised_ranges())
    )


def with_template(tmp_path: Path, template: str) -> ModelTokenizer:
    return open_model_tokenizer(write_folder(tmp_path, template), NOW)


EXPECTED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
    "<|im_start|>assistant\n[\n four, caf\u00e9 \U0001f600 <|im_end|>]\n<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n[Yes.<|im_end|>]\n"
)


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_BLOCKS])
def test_answers_and_their_ends_of_turn_are_learnt_with_blocks_and_without(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    has_blocks = tokenizer.template.has_generation_blocks
    assert has_blocks == (template == CHATML_WITH_BLOCKS)
    # without blocks, the newline that the template writes after an answer is the answer's too, as in TRL
    expected = EXPECTED if has_blocks else EXPECTED.replace("<|im_end|>]\n", "<|im_end|>\n]")
    assert marked(TWO_TURNS, tokenizer) == expected
    (sequence,) = tokens_of(TWO_TURNS, tokenizer)
    end = tokenizer.tokenizer.encode(["<|im_end|>"])[0][0]
    assert sequence.supervised[sequence.ids == end].tolist() == [False, False, True, False, True]


def test_ids_and_masks_equal_those_of_transformers(tmp_path: Path) -> None:
    (plain,) = tokens_of(TWO_TURNS, with_template(tmp_path, CHATML))
    (sequence,) = tokens_of(TWO_TURNS, with_template(tmp_path, CHATML_WITH_BLOCKS))
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": each.role, "content": each.content} for each in TWO_TURNS.messages],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert sequence.ids.tolist() == plain.ids.tolist() == theirs["input_ids"]
    assert sequence.supervised.tolist() == [bool(learnt) for learnt in theirs["assistant_masks"]]


TEXTS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


@settings(max_examples=50)
@given(st.lists(TEXTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
def test_every_byte_of_every_answer_is_learnt_and_nothing_else(texts: list[str]) -> None:
    roles: Sequence[Role] = ("user", "assistant")
    conversation = Conversation(tuple(message(roles[i % 2], text) for i, text in enumerate(texts)))
    (sequence,) = tokens_of(conversation, BYTES)
    learnt = "".join(text + "\0" for text in texts[1::2])
    assert sequence.ids[sequence.supervised].astype(np.uint8).tobytes() == learnt.encode()
    assert sequence.ids.astype(np.uint8).tobytes() == sequence.text.encode()


def test_without_a_template_the_plain_one_is_taken(tmp_path: Path) -> None:
    end = "User: Sure?\nAssistant: [Yes.\0]"
    assert marked(TWO_TURNS, BYTES).startswith("System: Be brief.\nUser: 2 + 2?\nAssistant: [\n four")
    assert marked(TWO_TURNS, BYTES).endswith(end)
    plain = open_model_tokenizer(write_folder(tmp_path), NOW)
    assert plain.template_name == "the plain template"
    assert marked(TWO_TURNS, plain).endswith(end.replace("\0", "<|im_end|>"))


def test_the_plain_template_has_no_form_for_tools() -> None:
    called = Conversation((message("user", "x"), message("assistant", "", tool_calls=[{}])))
    with pytest.raises(DataError, match="x.jsonl:7: the plain template refuses it .*no form for tools"):
        tokens_of(called, BYTES)


def test_only_answers_after_the_prompt_are_learnt(tmp_path: Path) -> None:
    late = Conversation(TWO_TURNS.messages, prompt_messages=4)
    for template in (CHATML, CHATML_WITH_BLOCKS):
        text = marked(late, with_template(tmp_path, template))
        assert text.count("[") == 1
        assert "\n[Yes.<|im_end|>" in text


def test_an_excluded_answer_is_not_learnt(tmp_path: Path) -> None:
    excluded = Conversation((*TWO_TURNS.messages[:4], ChatMessage("assistant", "Yes.", is_trainable=False)))
    for template in (CHATML, CHATML_WITH_BLOCKS):
        assert "[Yes" not in marked(excluded, with_template(tmp_path, template))
    once = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(DataError, match="has 1 generation blocks for 2 answers; use a template with one for each"):
        tokens_of(excluded, with_template(tmp_path, once))


def test_a_template_that_rewrites_earlier_turns_cannot_be_masked(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, DROPS_EARLIER_THOUGHTS)
    with pytest.raises(DataError) as caught:
        tokens_of(TWO_TURNS, tokenizer)
    for text in ("x.jsonl:7", "cannot be masked", "message 3", "generation %}", "a record for each answer"):
        assert text in str(caught.value)
    odd = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    with pytest.raises(DataError, match="message 3: .* asks for an answer in another way than it writes one"):
        tokens_of(TWO_TURNS, with_template(tmp_path / "odd", odd))
    last = Conversation(TWO_TURNS.messages, prompt_messages=4)
    assert marked(last, tokenizer).endswith("<|im_start|>assistant\n[<think></think>Yes.<|im_end|>\n]")


def test_messages_may_contain_what_marks_the_blocks(tmp_path: Path) -> None:
    odd = Conversation((message("user", "\ufdd00\ufdd1"), message("assistant", "\ufdd01\ufdd1")))
    assert "[\ufdd01\ufdd1<|im_end|>]" in marked(odd, with_template(tmp_path, CHATML_WITH_BLOCKS))


def test_a_completion_is_literal_and_learnt_with_its_end(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    sample = Completion("2 + 2 = ", "four")
    assert marked(sample, tokenizer) == "2 + 2 = [four<|im_end|>]"
    assert marked(sample, BYTES) == "2 + 2 = [four\0]"
    (sequence,) = tokens_of(sample, tokenizer)
    ids = AutoTokenizer.from_pretrained(tmp_path)("2 + 2 = four<|im_end|>")["input_ids"]
    assert sequence.ids.tolist() == ids
    assert ids[0] == 0
    assert not sequence.supervised[0]


def test_a_token_that_the_file_adds_at_the_end_is_not_doubled(tmp_path: Path) -> None:
    write_folder(tmp_path)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    processor = rules["post_processor"]["processors"][1]
    processor["single"].append({"SpecialToken": {"id": "<|im_end|>", "type_id": 0}})
    processor["special_tokens"]["<|im_end|>"] = {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    (sequence,) = tokens_of(Completion("a", "b"), open_model_tokenizer(tmp_path, NOW))
    assert sequence.ids.tolist().count(2) == 1
    assert sequence.ids[-1] == 2
    assert sequence.supervised[-1]


def test_plain_text_is_learnt_but_for_its_first_token(tmp_path: Path) -> None:
    assert marked(PlainText("roses"), BYTES) == "r[oses\0]"
    assert marked(PlainText("roses"), with_template(tmp_path, CHATML)) == "[roses<|im_end|>]"  # after <|begin|>
    assert len(tokens_of(PlainText(""), BYTES)[0].ids) == 0


def test_the_objective_lm_learns_all_and_adds_no_beginning(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, DROPS_EARLIER_THOUGHTS)
    (chat,) = tokens_of(TWO_TURNS, tokenizer, supervise_all=True)
    assert chat.supervised[1:].all()
    (document,) = tokens_of(PlainText("roses"), tokenizer, supervise_all=True)
    assert document.ids[0] != 0
    assert document.supervised[1:].all()
    assert document.ids[-1] == 2


def test_both_sides_of_a_preference_share_the_prompt(tmp_path: Path) -> None:
    sides = [Conversation((message("user", "2 + 2?"), message("assistant", text)), 1) for text in ("four", "five")]
    chosen, rejected = tokens_of(Preference(*sides), with_template(tmp_path, CHATML))
    prompt = int(np.argmax(chosen.supervised))
    assert chosen.ids[:prompt].tolist() == rejected.ids[:prompt].tolist()
    assert prompt == np.argmax(rejected.supervised)
    assert [side.text[slice(*side.supervised_ranges()[0])] for side in (chosen, rejected)] == [
        "four<|im_end|>\n",
        "five<|im_end|>\n",
    ]


def test_what_is_longer_than_the_context_loses_its_end_and_says_how_much() -> None:
    (sequence,) = tokens_of(Completion("12345", "67890"), BYTES, context=8)
    assert (len(sequence.ids), sequence.truncated) == (8, 3)
    assert sequence.ids[sequence.supervised].tobytes().replace(b"\0", b"") == b"678"
    (sequence,) = tokens_of(Completion("12345", "67890"), BYTES, context=5)
    assert not sequence.supervised.any()
    assert sequence.truncated == 6


def test_many_samples_are_tokenised_in_order_whatever_their_kinds(tmp_path: Path) -> None:
    kinds: list[Sample] = [PlainText("roses"), TWO_TURNS, Completion("a", "b")]
    tokenizer = with_template(tmp_path, CHATML)
    samples = [PlacedSample(kinds[number % 3], "") for number in range(3000)]
    texts = (mark_sample(sample, tokenizer, supervise_all=False) for sample in samples)
    lengths = [len(sample[0].ids) for sample in encode_samples(texts, tokenizer, context=None)]
    assert lengths == [len(tokens_of(kinds[number % 3], tokenizer)[0].ids) for number in range(3)] * 1000


# --- templates and folders


def rendered(tmp_path: Path, template: str, **settings: Any) -> str:
    folder = write_folder(tmp_path, template, **settings)
    return open_model_tokenizer(folder, NOW).template.render(TWO_TURNS, "x.jsonl:7")


def test_templates_find_the_functions_that_hugging_face_gives_them(tmp_path: Path) -> None:
    assert rendered(tmp_path, "{{ strftime_now('%d %b %Y') }}") == "01 Jul 2026"
    assert rendered(tmp_path, "{{ {'<a>': '\u00e9'} | tojson }}") == '{"<a>": "\u00e9"}'
    assert rendered(tmp_path, "{{ bos_token + eos_token }}{{ pad_token }}") == "<|begin|><|im_end|>"
    assert rendered(tmp_path, "{% for m in messages %}{{ m.role[0] }}{% break %}{% endfor %}") == "s"
    assert rendered(tmp_path, "{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}") == "2"
    assert rendered(tmp_path, "{% if true %}\n  x\n  {% endif %}") == "  x\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no \x1b') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.json }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content + 1 }}",
        "{{ messages[0].content % 5 % 5 }}{{ 1 + 'x' }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_one_sentence(tmp_path: Path, template: str) -> None:
    with pytest.raises(DataError) as caught:
        rendered(tmp_path, template)
    assert "x.jsonl:7: the chat template of" in str(caught.value)
    assert "refuses it" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_malformed_template_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a chat template .*correct it"):
        rendered(tmp_path, "{% for %}")


def test_the_template_is_found_wherever_models_keep_it(tmp_path: Path) -> None:
    def name(template: str | None, **settings: Any) -> str:
        return open_model_tokenizer(write_folder(tmp_path, template, **settings), NOW).template.render(TWO_TURNS, "")

    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert (name(None, chat_template="c"), name(None, chat_template=named), name("f", chat_template="c")) == (
        "c",
        "d",
        "f",
    )
    with pytest.raises(DataError, match="chat_template in .* is not text"):
        (tmp_path / "chat_template.jinja").unlink()
        name(None, chat_template=5)


def test_folders_that_lack_something_say_what(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"no tokenizer.json; give the folder of a Hugging Face model"):
        open_model_tokenizer(tmp_path, NOW)
    write_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    assert open_model_tokenizer(tmp_path, NOW).longest_context == 2048
    for content, says in ((b"no", "is not JSON"), (b"[]", "is not a JSON object"), (b"\xff", "is not UTF-8")):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(DataError, match=says):
            open_model_tokenizer(tmp_path, NOW)
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_model_tokenizer(tmp_path, NOW).end_of_turn == "<|im_end|>"


def test_who_lacks_jinja2_is_told_the_command_that_installs_it() -> None:
    code = """
import sys
sys.modules["jinja2"] = None
from datetime import datetime
from agora.tuning.chat.conversations import ChatMessage, Conversation
from agora.tuning.chat.model_tokenizer import open_model_tokenizer
from agora_protocol.errors import LocalError
try:
    open_model_tokenizer(None, datetime.now()).template.render(Conversation((ChatMessage("user", "x"),)), "")
except LocalError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().endswith("install it with: pip install 'agora-swarm[tuning]'")


@given(st.text(max_size=30))
def test_the_bytes_of_a_character_all_stand_for_it(text: str) -> None:
    (encoded,) = ByteTokenizer().encode_with_offsets([text], add_special=True)
    assert bytes(encoded.ids.tolist()) == text.encode()
    assert (np.diff(encoded.offsets, axis=1) == 1).all()
    for place, character in enumerate(text):
        assert bytes(encoded.ids[encoded.offsets[:, 0] == place].tolist()) == character.encode()


# --- ends and beginnings that are there already


@pytest.mark.parametrize("completion", [" 4<|im_end|>", " 4<|im_end|>\n", " 4"])
def test_the_end_of_a_completion_is_added_only_where_it_is_missing(tmp_path: Path, completion: str) -> None:
    tokenizer = open_model_tokenizer(write_folder(tmp_path), NOW)
    assert marked(Completion("2 + 2 =", completion), tokenizer).count("<|im_end|>") == 1
    assert marked(PlainText(completion), tokenizer, supervise_all=True).count("<|im_end|>") == 1
    answer = Conversation((message("user", "2 + 2?"), message("assistant", completion)))
    for template in (CHATML, CHATML_WITH_BLOCKS):
        shown = marked(answer, with_template(tmp_path, template))
        assert shown.count("<|im_end|>") == 2 and "4<|im_end|>" in shown


def test_an_end_of_bytes_or_of_a_newline_is_added_once() -> None:
    for text in ("a", "a\0"):
        (sequence,) = tokens_of(Completion("q", text), BYTES)
        assert sequence.ids.tolist() == [*b"qa", 0]
    answer = Conversation((message("user", "q"), message("assistant", "a\0")))
    assert marked(answer, BYTES) == "User: q\nAssistant: [a\0]"


def test_the_end_of_a_turn_that_differs_from_the_end_of_text_is_not_doubled(tmp_path: Path) -> None:
    template = """{% for m in messages %}{{ '<turn>' + m.role + ':' + m.content + '<end>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<turn>assistant:' }}{% endif %}"""
    answer = Conversation((message("user", "q"), message("assistant", "a<end> ")))
    assert marked(answer, with_template(tmp_path, template)) == "<turn>user:q<end><turn>assistant:[a<end>]"


def test_the_beginning_of_a_text_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = open_model_tokenizer(write_folder(tmp_path), NOW)
    (without,) = tokens_of(Completion("2 + 2 =", " 4"), tokenizer)
    (with_it,) = tokens_of(Completion("<|begin|>2 + 2 =", " 4"), tokenizer)
    assert without.ids.tolist() == with_it.ids.tolist() and without.ids[0] == 0 != without.ids[1]


# --- templates of strangers are bounded


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes longer than"),
        ("{{ 'x' * 100000000000 }}", "memory"),
        ("{{ ('x' * 100000)|center(100000000000) }}", "memory"),
        ("{% set ns = namespace(x='xx') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "memory"),
        (
            "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
            "",
        ),
        ("{% macro f(n) %}{{ f(n) ~ f(n) }}{% endmacro %}{{ f(1) }}", "refuses it"),
        ("{{ 'x' * 70000000 }}", "makes more than 64 Mi characters"),
    ],
)
def test_a_template_that_takes_too_much_is_stopped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, says: str
) -> None:
    sandbox = tmp_path / "chat_sandbox.py"
    sandbox.write_text(chat_template.SANDBOX.read_text().replace("REQUEST_S = 20.0", "REQUEST_S = 4.0"))
    monkeypatch.setattr(chat_template, "SANDBOX", sandbox)
    tokenizer = with_template(tmp_path, template)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError) as caught:
        tokenizer.template.render(TWO_TURNS, "x.jsonl:7")
    assert "x.jsonl:7" in str(caught.value) and says in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, "KiB of this process"


def test_after_a_template_was_stopped_others_render(tmp_path: Path) -> None:
    source = "{% if messages[0].content == 'bomb' %}{{ 'x' * 100000000000 }}{% endif %}fine"
    tokenizer = with_template(tmp_path, source)
    for _ in range(2):
        with pytest.raises(TemplateProblem, match="memory"):
            tokenizer.template.render(Conversation((message("user", "bomb"),)), "x.jsonl:1")
        assert tokenizer.template.render(TWO_TURNS, "x.jsonl:2") == "fine"


def test_the_process_of_a_template_ends_with_it(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    tokenizer.template.render(TWO_TURNS, "")
    process = tokenizer.template._renderer._process
    del tokenizer
    gc.collect()
    assert process.returncode == 0


# --- other templates than the model's own


def conversation(*turns: tuple[Role, str]) -> Conversation:
    return Conversation(tuple(message(role, content) for role, content in turns))


@pytest.mark.parametrize("name", training_templates())
def test_templates_for_training_mask_every_answer_of_a_long_conversation(tmp_path: Path, name: str) -> None:
    source = read_chat_template(name, None)
    tokenizer = open_model_tokenizer(write_folder(tmp_path), NOW, source)
    (sequence,) = tokens_of(TWO_TURNS, tokenizer)
    learnt = [text for text, is_learnt in split_supervised(sequence.text, sequence.supervised_ranges()) if is_learnt]
    assert len(learnt) == 2 and "four" in learnt[0] and "Yes." in learnt[1] and "Sure?" not in "".join(learnt)
    usable = open_model_tokenizer(tmp_path, NOW, without_generation_blocks(source))
    assert usable.template.render(TWO_TURNS, "") == sequence.text and not usable.template.has_generation_blocks


@pytest.mark.parametrize(
    ("name", "own"), [("qwen3", "qwen3"), ("chatml", "qwen2_5"), ("llama3", "llama3"), ("gemma", "gemma3")]
)
def test_templates_for_training_write_what_the_models_own_write(tmp_path: Path, name: str, own: str) -> None:
    """Of one turn, and of several where the model's own template keeps earlier answers as they were."""
    from trl import chat_template_utils

    theirs = (Path(chat_template_utils.__file__).parent / "chat_templates" / f"{own}.jinja").read_text()
    trained = open_model_tokenizer(write_folder(tmp_path), NOW, read_chat_template(name, None)).template
    original = open_model_tokenizer(tmp_path, NOW, theirs).template
    turn: tuple[tuple[Role, str], ...] = (("user", "2 + 2?"), ("assistant", "4"))
    asked = [turn, (("system", "Be brief."), *turn)] + ([] if name == "qwen3" else [turn + turn])
    for turns in asked:
        if name == "chatml" and turns[0][0] != "system":
            continue  # Qwen2.5's own writes a system message of its own
        assert trained.render(conversation(*turns), "") == original.render(conversation(*turns), "")


def test_a_template_is_chosen_by_file_by_name_or_from_the_models_named_ones(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": CHATML}, {"name": "rag", "template": "no"}]
    folder = write_folder(tmp_path / "model", chat_template=named)
    assert read_chat_template("tool_use", folder) == CHATML
    (tmp_path / "mine.jinja").write_text(CHATML_WITH_BLOCKS)
    assert read_chat_template(str(tmp_path / "mine.jinja"), folder) == CHATML_WITH_BLOCKS
    with pytest.raises(DataError, match="--chat-template nonsense is neither a file nor .* qwen3, tool_use, rag"):
        read_chat_template("nonsense", folder)


def test_named_templates_without_a_default_are_not_passed_over(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, chat_template=[{"name": "tool_use", "template": CHATML}])
    tokenizer = open_model_tokenizer(folder, NOW)
    with pytest.raises(TemplateProblem, match=r"several chat templates \('tool_use'\).*--chat-template"):
        tokenizer.template.render(TWO_TURNS, "x.jsonl:7")
    (sequence,) = tokens_of(Completion("2 + 2 =", " 4"), tokenizer)
    assert sequence.text == "2 + 2 = 4<|im_end|>", "a completion needs no template"
    default = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    assert open_model_tokenizer(write_folder(tmp_path, chat_template=default), NOW).template.render(TWO_TURNS, "")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("no")
    with pytest.raises(TemplateProblem, match="'rag'"):
        open_model_tokenizer(write_folder(tmp_path), NOW).template.render(TWO_TURNS, "")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    shown = open_model_tokenizer(tmp_path, NOW).template.render(TWO_TURNS, "")
    assert shown.startswith("<|im_start|>system"), "the file of a model that also sees pictures is read"


# --- what a template leaves out is said


DROPS_SYSTEM = "{%- set messages = messages | selectattr('role', 'ne', 'system') | list %}" + CHATML
SHOUTS = CHATML.replace("message.content", "message.content | upper")


def counted(sample: Sample, tokenizer: ModelTokenizer) -> ReadingCounts:
    counts = ReadingCounts()
    list(tokenise(StubFiles([PlacedSample(sample, "x.jsonl:7")]), counts, tokenizer, 64))
    return counts


class StubFiles:
    objective, rules = "sft", ReadingRules()

    def __init__(self, placed: list[PlacedSample]) -> None:
        self._placed = placed

    def samples(self, counts: ReadingCounts) -> list[PlacedSample]:
        return self._placed


@pytest.mark.parametrize(
    ("template", "changed"),
    [
        (CHATML, {}),
        (CHATML_WITH_BLOCKS, {}),
        (DROPS_SYSTEM, {"system": 1}),
        (SHOUTS, {"system": 1, "user": 1, "assistant": 2}),
    ],
)
def test_messages_that_a_template_changes_or_drops_are_counted(
    tmp_path: Path, template: str, changed: dict[str, int]
) -> None:
    counts = counted(TWO_TURNS, with_template(tmp_path, template))
    assert {role: count for role, count in counts.changed.items() if count} == changed


THOUGHT = {"reasoning_content": "easy", "mask": True}


@pytest.mark.parametrize(
    ("template", "unwritten"),
    [
        (CHATML, {"reasoning_content": 1, "mask": 1, "tools": 1}),
        (CHATML + "{# reasoning_content, tools #}", {"mask": 1}),
        (CHATML_WITH_BLOCKS + "{{ messages | tojson }}{{ tools }}", {}),
    ],
)
def test_fields_that_a_template_does_not_write_are_counted(
    tmp_path: Path, template: str, unwritten: dict[str, int]
) -> None:
    thought = Conversation((message("user", "a"), message("assistant", "b", **THOUGHT)), tools=({"name": "f"},))
    tokenizer = with_template(tmp_path, template)
    assert counted(thought, tokenizer).unwritten == unwritten


def test_a_call_of_a_tool_that_the_template_drops_is_never_learnt_as_an_empty_answer(tmp_path: Path) -> None:
    called = Conversation((message("user", "a"), message("assistant", "", tool_calls=[{"name": "f"}])))
    with pytest.raises(DataError, match="x.jsonl:7, message 2, has only tool_calls, and .* does not write them"):
        counted(called, with_template(tmp_path, CHATML))


def test_sides_that_become_equal_are_left_out(tmp_path: Path) -> None:
    sides = [Conversation((message("user", "a"), message("assistant", "b", thought=text))) for text in "xy"]
    for pair, context in ((Preference(*sides), 64), (Preference(Completion("a", "bcd"), Completion("a", "bce")), 3)):
        (sample,) = encode_samples(
            [mark_sample(PlacedSample(pair, "x"), with_template(tmp_path, CHATML), supervise_all=False)],
            with_template(tmp_path, CHATML),
            context=context,
        )
        assert len(sample) == 2 and not any(side.supervised.any() for side in sample)


@pytest.mark.parametrize(
    ("settings", "template", "says"),
    [
        ({"chat_template": "other"}, CHATML, "the other one, in tokenizer_config.json, is not used"),
        ({"chat_template": CHATML}, CHATML, ""),
        ({"chat_template": [{"name": "default", "template": CHATML}, {"name": "rag", "template": "x"}]}, None, "'rag'"),
        ({"eos_token": "<|nope|>"}, CHATML, "the eos_token '<|nope|>' of tokenizer_config.json is no token"),
        ({"added_tokens_decoder": {"500": {"content": "<tool>"}}}, CHATML, "adds '<tool>', which tokenizer.json lacks"),
        ({}, CHATML.replace("im_start", "start_header_id"), "writes '<|start_header_id|>', no token"),
        ({}, CHATML, ""),
    ],
)
def test_what_is_taken_or_ignored_of_a_folder_is_said(
    tmp_path: Path, settings: dict[str, Any], template: str | None, says: str
) -> None:
    remarks = open_model_tokenizer(write_folder(tmp_path, template, **settings), NOW).remarks
    assert says in "; ".join(remarks) and bool(says) == bool(remarks)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "capital letters and small ones"),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, "a space at the end and none"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}},
            "letters with accents and without",
        ),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": " "}}, "a line break and a space"),
        ({"normalizer": {"type": "NFC"}}, ""),
    ],
)
def test_a_tokenizer_that_changes_the_text_is_said(tmp_path: Path, rule: dict[str, Any], says: str) -> None:
    folder = write_folder(tmp_path, CHATML)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads((folder / "tokenizer.json").read_text()) | rule))
    remarks = "; ".join(open_model_tokenizer(folder, NOW).remarks)
    assert says in remarks and bool(says) == ("has the same tokens for" in remarks)


@pytest.mark.parametrize("value", [5, ["<|im_end|>"], {"content": 3}])
def test_an_end_of_turn_that_is_no_text_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(DataError, match="eos_token in tokenizer_config.json or .* not the text of a token"):
        open_model_tokenizer(write_folder(tmp_path, CHATML, eos_token=value), NOW)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "config.json"]
)
def test_a_pointer_of_git_lfs_in_place_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, CHATML)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises((DataError, ManifestError), match=rf"{name} is a git-lfs pointer.*git lfs pull"):
        open_model_tokenizer(folder, NOW)


def test_a_tokenizer_that_draws_its_tokens_is_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path, CHATML) / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["model"]["dropout"] = 0.1
    path.write_text(json.dumps(rules))
    with pytest.raises(ManifestError, match="draws other tokens .*dropout"):
        open_model_tokenizer(tmp_path, NOW)
