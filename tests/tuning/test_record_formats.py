"""Every format is recognised by its first record and becomes the same few samples; errors name column, line, remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agora_protocol.errors import DataError, InputError

from agora.tuning.chat.conversations import ChatMessage, Completion, Conversation, PlainText, Preference, Sample
from agora.tuning.chat.sample_file import open_samples
from agora.tuning.chat.sample_formats import FORMATS, Objective, ReadingCounts, ReadingRules, parse_columns, parse_roles

SYSTEM = ChatMessage("system", "Be brief.")
USER = ChatMessage("user", "2 + 2?")
ANSWER = ChatMessage("assistant", "4")
WRONG = ChatMessage("assistant", "5")
CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
BAD = [CHAT[0], {"role": "assistant", "content": "5"}]
ONE_TURN = Conversation((USER, ANSWER))
PAIR = Preference(Conversation((USER, ANSWER), 1), Conversation((USER, WRONG), 1))


def samples_of(
    tmp_path: Path, *rows: Mapping[str, Any], columns: str = "", objective: Objective | None = None, **rules: Any
) -> tuple[str, list[Sample]]:
    """The name of the format, and the samples of a file with these rows."""
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    reading = ReadingRules(parse_columns(columns) if columns else {}, **rules)
    file = open_samples([path], reading, objective)
    return file.files[0].reader.format.name, [placed.sample for placed in file.samples(ReadingCounts())]


def refused(tmp_path: Path, *rows: Mapping[str, Any], says: Sequence[str], **more: Any) -> None:
    with pytest.raises(DataError) as caught:
        samples_of(tmp_path, *rows, **more)
    for text in says:
        assert text in str(caught.value), str(caught.value)


GPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
ASKED_BRIEFLY = Preference(Conversation((SYSTEM, USER, ANSWER), 2), Conversation((SYSTEM, USER, WRONG), 2))
EXAMPLES: list[tuple[str, dict[str, Any], Sample]] = [
    ("chat", {"messages": CHAT, "id": 3}, ONE_TURN),
    (
        "chat",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]},
                CHAT[1],
            ]
        },
        ONE_TURN,
    ),
    ("ShareGPT", {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}, ONE_TURN),
    (
        "ShareGPT",
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}], "system": "Be brief."},
        Conversation((SYSTEM, USER, ANSWER)),
    ),
    ("Alpaca", {"instruction": "2 + 2?", "input": "", "output": "4"}, ONE_TURN),
    (
        "Alpaca",
        {"instruction": "Add", "input": "2, 2", "output": "4", "system": "Be brief.", "history": [["2 + 2?", "4"]]},
        Conversation((SYSTEM, USER, ANSWER, ChatMessage("user", "Add\n2, 2"), ANSWER)),
    ),
    ("prompt and completion", {"prompt": "2 + 2 =", "completion": " 4"}, Completion("2 + 2 =", " 4")),
    ("prompt and completion", {"prompt": CHAT[:1], "completion": CHAT[1:]}, Conversation((USER, ANSWER), 1)),
    ("prompt and completion", {"prompt": "2 + 2?", "completion": CHAT[1]}, Conversation((USER, ANSWER), 1)),
    ("text", {"text": "roses"}, PlainText("roses")),
    (
        "preference",
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
        Preference(Completion("2 + 2 =", " 4"), Completion("2 + 2 =", " 5")),
    ),
    ("preference", {"prompt": CHAT[:1], "chosen": "4", "rejected": CHAT[1] | {"content": "5"}}, PAIR),
    ("preference", {"prompt": "2 + 2?", "chosen": CHAT, "rejected": BAD, "messages": CHAT}, PAIR),
    ("preference", {"prompt": "2 + 2?", "system": "Be brief.", "chosen": "4", "rejected": "5"}, ASKED_BRIEFLY),
    (
        "preference",
        {"prompt": "Add:", "input": "2, 2 =", "chosen": " 4", "rejected": " 5"},
        Preference(Completion("Add:\n2, 2 =", " 4"), Completion("Add:\n2, 2 =", " 5")),
    ),
    ("Alpaca preference", {"instruction": "2 + 2?", "input": "", "chosen": "4", "rejected": "5"}, PAIR),
    (
        "Alpaca preference",
        {"instruction": "2 + 2?", "system": "Be brief.", "chosen": "4", "rejected": "5"},
        ASKED_BRIEFLY,
    ),
    (
        "ShareGPT preference",
        {"conversations": GPT[:1], "chosen": GPT[1], "rejected": GPT[1] | {"value": "5"}, "system": "Be brief."},
        ASKED_BRIEFLY,
    ),
    ("implicit preference", {"chosen": CHAT, "rejected": BAD}, PAIR),
    ("implicit preference", {"chosen": CHAT, "rejected": BAD, "system": "Be brief."}, ASKED_BRIEFLY),
    ("chat", {"messages": CHAT, "system": "Be brief."}, Conversation((SYSTEM, USER, ANSWER))),
    ("chat", {"messages": json.dumps(CHAT)}, ONE_TURN),
    ("ShareGPT", {"conversations": json.dumps(GPT)}, ONE_TURN),
    (
        "implicit preference",
        {"chosen": "Human: hi\n\nAssistant: hello", "rejected": "Human: hi\n\nAssistant: heyho"},
        Preference(Completion("Human: hi\n\nAssistant:", " hello"), Completion("Human: hi\n\nAssistant:", " heyho")),
    ),
]


@pytest.mark.parametrize(("name", "row", "sample"), EXAMPLES)
def test_a_format_is_recognised_and_read(tmp_path: Path, name: str, row: dict[str, Any], sample: Sample) -> None:
    assert samples_of(tmp_path, row, row) == (name, [sample, sample])


def test_the_page_shows_a_record_of_every_format_that_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "use" / "data.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w ]+) \| `.*\| `(\{.*\})` \|$", page, re.M))
    assert list(rows) == [kind.name for kind in FORMATS]
    for name, row in rows.items():
        assert samples_of(tmp_path, json.loads(row))[0] == name


# a table has one type a column, so that the content of one message cannot be a list and that of another text
TABLES = [row for _, row, _ in EXAMPLES if row != EXAMPLES[1][1]]


@pytest.mark.parametrize("row", TABLES)
def test_a_table_gives_the_same_samples_as_lines(tmp_path: Path, row: dict[str, Any]) -> None:
    """A table fills the fields that a message lacks with nulls."""
    expected = samples_of(tmp_path, row)
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    file = open_samples([tmp_path / "x.parquet"], ReadingRules())
    read = [placed.sample for placed in file.samples(ReadingCounts())]
    assert (file.files[0].reader.format.name, read) == expected


def test_the_objective_is_that_of_the_format_unless_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows: list[tuple[dict[str, Any], str]] = [({"text": "x"}, "lm"), ({"messages": CHAT}, "sft")]
    for row, objective in [*rows, ({"chosen": CHAT, "rejected": BAD}, "dpo")]:
        path.write_text(json.dumps(row))
        assert open_samples([path], ReadingRules()).objective == objective
    row = {"messages": CHAT, "chosen": CHAT, "rejected": BAD}
    assert samples_of(tmp_path, row)[0] == "implicit preference"
    assert samples_of(tmp_path, row, objective="sft") == ("chat", [ONE_TURN])


def test_columns_of_other_names_are_mapped(tmp_path: Path) -> None:
    row = {"question": "a", "answer": "b", "messages": CHAT, "completion": "not this"}
    mapping = "prompt=question, completion=answer"
    assert samples_of(tmp_path, row, columns=mapping) == ("prompt and completion", [Completion("a", "b")])
    swapped = {"prompt": "b", "completion": "a"}
    assert samples_of(tmp_path, swapped, columns="prompt=completion,completion=prompt")[1] == [Completion("a", "b")]
    pair = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": BAD[1:]}
    mapping = "prompt=prompt,completion=chosen"
    assert samples_of(tmp_path, pair, columns=mapping)[1] == [Conversation((USER, ANSWER), 1)]


def test_a_mapped_column_is_not_read_by_its_own_name_too(tmp_path: Path) -> None:
    row = {"input": "2 + 2?", "output": "4"}
    assert samples_of(tmp_path, row, columns="instruction=input") == ("Alpaca", [ONE_TURN])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prompt", "write it like prompt=question,completion=answer"),
        ("prompt=", "write it like"),
        ("promt=a", "did you mean 'prompt'"),
        ("zzz=a", "known are"),
        ("prompt=a,prompt=b", "twice"),
    ],
)
def test_a_wrong_mapping_says_how_to_write_it(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_columns(text)


def test_a_missing_column_is_named_with_line_and_remedy(tmp_path: Path) -> None:
    refused(
        tmp_path,
        {"prompt": "a", "answer\x1b[31m": "b"},
        says=[
            "x.jsonl:1 has no column 'completion'",
            "prompt and completion",
            r"'answer\x1b[31m'",
            "--columns completion=NAME",
        ],
    )
    refused(tmp_path, {"output": "a"}, says=["no column 'instruction'", "Alpaca"])
    refused(tmp_path, {"a": 1}, says=["no known format (present: 'a'; known are", "--columns prompt=NAME"])
    refused(tmp_path, {"text": None}, says=["no known format", "'text' is null"])
    refused(tmp_path, {"q": "a"}, columns="prompt=question", says=["no column 'question'", "correct --columns"])
    refused(
        tmp_path, {"q": "a"}, columns="prompt=q", says=["no column 'completion'", "--columns prompt=q,completion=NAME"]
    )
    refused(tmp_path, {"q": "a"}, columns="prompt=q,text=q", says=["No format has all of the columns"])
    refused(tmp_path, {"chosen": "a", "q": "b"}, columns="prompt=q", objective="dpo", says=["no column 'rejected'"])


def test_a_column_that_a_later_record_lacks_is_named(tmp_path: Path) -> None:
    good = {"prompt": "a", "completion": "b"}
    refused(tmp_path, good, {"prompt": "a"}, says=["x.jsonl:2", "'completion' is missing from", "remove the record"])
    refused(tmp_path, good, good | {"prompt": None}, says=["x.jsonl:2", "'prompt' is null in"])
    refused(tmp_path, good, good | {"prompt": 5}, says=["x.jsonl:2", "prompt is a number, not text"])
    refused(tmp_path, {"text": "\ud800"}, says=["x.jsonl:1", "half a surrogate pair"])


def test_an_objective_that_the_format_cannot_serve_is_refused(tmp_path: Path) -> None:
    pair = {"chosen": CHAT, "rejected": BAD}
    refused(
        tmp_path,
        {"messages": CHAT},
        objective="dpo",
        says=["format chat", "--objective sft", "prompt, chosen, rejected"],
    )
    refused(tmp_path, pair | {"prompt": CHAT[:1]}, objective="sft", says=["--objective dpo", "completion=chosen"])
    refused(tmp_path, pair, objective="lm", says=["--objective dpo", "or give another file"])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, says=["x.jsonl holds no record", "one JSON object a line"])


def turns(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        (["assistant"], ["message 1, has role 'assistant' at the beginning, where 'system' or 'user' is expected"]),
        (["user", "user"], ["message 2, has role 'user' after 'user', where 'assistant' is expected"]),
        (["user", "assistant", "assistant"], ["message 3", "'user' or 'tool' is expected"]),
        (["user", "system", "assistant"], ["message 2", "a system message may come first"]),
        (["system", "assistant"], ["message 2", "where 'user' is expected"]),
        (["user"], ["ends with role 'user'", "the last must be the assistant's"]),
        (["user", "assistant", "user"], ["ends with role 'user'"]),
        ([], ["has no message"]),
        (["user", "oracle\x1b"], ["message 2", r"the unknown role 'oracle\x1b'", "known are 'system'"]),
    ],
)
def test_roles_out_of_order_are_named_with_line_and_message(tmp_path: Path, roles: list[str], says: list[str]) -> None:
    refused(tmp_path, turns("user", "assistant"), turns(*roles), says=["x.jsonl:2", *says])


@pytest.mark.parametrize("roles", [["system", "human", "gpt"], ["developer", "user", "model", "human", "bot"]])
def test_other_spellings_of_roles_are_known(tmp_path: Path, roles: list[str]) -> None:
    sample = samples_of(tmp_path, turns(*roles))[1][0]
    assert isinstance(sample, Conversation) and sample.messages[-1].role == "assistant"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "messages is a string; write a list"),
        (["hello"], "message 1, is a string; write an object"),
        ([{"content": "x"}], "message 1, has no field 'role' or 'from'"),
        ([{"role": "user"}], "message 1, has no field 'content' or 'value'"),
        ([{"role": "user", "content": 5}], "message 1, content is a number, not text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type 'image_url', but only text"),
    ],
)
def test_malformed_messages_are_named(tmp_path: Path, messages: object, says: str) -> None:
    refused(tmp_path, {"messages": messages}, says=["x.jsonl:1", says])


def test_a_record_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(600):
        nested = [nested]
    refused(tmp_path, {"messages": [{**CHAT[0], "extra": nested}, CHAT[1]]}, says=["x.jsonl:1", "nested too deeply"])


def test_calls_of_tools_and_other_fields_are_kept_for_the_template(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": None}}}
    messages = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    sample = samples_of(tmp_path, {"messages": messages, "tools": json.dumps(tools)})[1][0]
    assert isinstance(sample, Conversation) and sample.tools == tuple(tools)
    assert sample.messages[1].extra == {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    assert [message.extra for message in sample.messages[2:]] == [{"name": "add"}, {"reasoning_content": "easy"}]
    refused(tmp_path, {"messages": CHAT, "tools": "no"}, says=["tools is not JSON"])
    refused(tmp_path, {"messages": CHAT, "tools": 5}, says=["tools is a number; write a list"])


def test_answers_that_a_record_excludes_are_not_learnt(tmp_path: Path) -> None:
    excluded = [
        CHAT[0],
        CHAT[1] | {"weight": 0},
        CHAT[0],
        CHAT[1] | {"train": True},
        CHAT[0],
        CHAT[1] | {"train": False},
    ]
    sample = samples_of(tmp_path, {"messages": excluded})[1][0]
    assert isinstance(sample, Conversation)
    assert [sample.is_supervised(index) for index in range(6)] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen": CHAT, "rejected": CHAT}, "chosen and rejected are equal"),
        (
            {"chosen": CHAT, "rejected": [{"role": "user", "content": "other"}, CHAT[1]]},
            "do not begin with the same prompt",
        ),
        ({"chosen": "yes", "rejected": "no"}, "do not begin with the same prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": CHAT[1]}, "one is text, one messages"),
        ({"prompt": CHAT[:1], "chosen": CHAT[:1], "rejected": BAD}, "chosen has no answer after the prompt"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "history, pair 1, is not [question, answer]"),
        ({"instruction": "a", "output": "b", "history": "a"}, "history, pair 1, is not [question, answer]"),
    ],
)
def test_records_that_say_nothing_are_named(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    refused(tmp_path, row, says=["x.jsonl:1", says])


def test_a_prompt_shared_in_full_leaves_an_answer_on_both_sides(tmp_path: Path) -> None:
    """The longer side goes on after the answer of the shorter one."""
    longer = [*CHAT, CHAT[0], CHAT[1]]
    pair = samples_of(tmp_path, {"chosen": longer, "rejected": CHAT})[1][0]
    assert isinstance(pair, Preference) and isinstance(pair.chosen, Conversation)
    assert pair.chosen.prompt_messages == 1


# --- nothing that changes what is learnt is silent


MESSAGES_TWICE = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "content": "c"}]'


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES_TWICE},
        {"conversations": MESSAGES_TWICE.replace("role", "from").replace("content", "value")},
        {"prompt": "q", "chosen": MESSAGES_TWICE, "rejected": "b"},
        {"messages": CHAT, "tools": '[{"name": "f", "name": "g"}]'},
        {"instruction": "a", "output": "b", "history": '[{"a": 1, "a": 2}]'},
    ],
)
def test_a_key_twice_in_a_text_of_json_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    refused(tmp_path, row, says=["x.jsonl:1", "has the key", "twice"])


@pytest.mark.parametrize("answer", ['{"a": 1, "a": 2}', '[{"a": 1, "a": 2}', '{"role": 1, "role": 2} // no'])
def test_an_answer_in_json_is_learnt_as_it_is(tmp_path: Path, answer: str) -> None:
    assert samples_of(tmp_path, {"prompt": "q", "completion": answer})[1] == [Completion("q", answer)]


@pytest.mark.parametrize(
    ("said", "learnt"),
    [
        ({"weight": "0"}, False),
        ({"weight": "0.0"}, False),
        ({"weight": 0.0}, False),
        ({"train": "false"}, False),
        ({"train": "No"}, False),
        ({"train": 0}, False),
        ({"loss": False}, False),
        ({"training": False}, False),
        ({"weight": 1, "train": False}, False),
        ({"Weight": 0}, False),
        ({"loss_mask": 0}, False),
        ({"trainable": "no"}, False),
        ({"train_on_turn": False}, False),
        ({"loss_weight": "0.0"}, False),
        ({"loss_scale": 1.0}, True),
        ({"weight": "1"}, True),
        ({"weight": 1.0, "train": " True "}, True),
        ({"weight": None}, True),
    ],
)
def test_whether_an_answer_is_learnt_is_read_as_it_is_meant(tmp_path: Path, said: dict[str, Any], learnt: bool) -> None:
    sample = samples_of(tmp_path, {"messages": [CHAT[0], CHAT[1] | said]})[1][0]
    assert isinstance(sample, Conversation) and sample.is_supervised(1) is learnt


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"weight": 0.5}, "'weight' 0.5"),
        ({"weight": "half"}, "'weight' 'half'"),
        ({"weight": 2}, "'weight' 2"),
        ({"weight": -1}, "'weight' -1"),
        ({"train": "maybe"}, "'train' 'maybe'"),
        ({"train": []}, "'train' []"),
        ({"loss": 0.1}, "'loss' 0.1"),
        ({"loss_scale": 0.5}, "'loss_scale' 0.5"),
        ({"loss_mask": [0, 1]}, "'loss_mask' [0, 1]"),
        ({"train_detail": [{"begin_offset": 0}]}, "'train_detail'"),
    ],
)
def test_a_weight_between_learnt_and_not_is_refused_with_line_and_field(
    tmp_path: Path, said: dict[str, Any], says: str
) -> None:
    good = {"messages": CHAT}
    row = {"messages": [CHAT[0], CHAT[1] | said]}
    refused(tmp_path, good, row, says=["x.jsonl:2", "message 2, has " + says, "learnt whole or not at all"])


def test_a_question_that_is_to_be_learnt_is_refused(tmp_path: Path) -> None:
    row = {"messages": [CHAT[0] | {"train": True}, CHAT[1]]}
    refused(tmp_path, row, says=["x.jsonl:1", "message 1, has 'train' True", "only answers of the assistant"])
    assert samples_of(tmp_path, {"messages": [CHAT[0] | {"train": False, "weight": 1}, CHAT[1]]})[1] == [
        Conversation((ChatMessage("user", "2 + 2?", False), ANSWER))
    ]


KTO = {"prompt": "2 + 2 =", "completion": " 4", "label": True}


@pytest.mark.parametrize(
    "row",
    [
        KTO,
        KTO | {"label": False},
        KTO | {"label": "False"},
        KTO | {"label": 0},
        KTO | {"label": "bad"},
        KTO | {"label": -1},
        {"prompt": "a", "completion": "b", "desirable": False},
        {"messages": CHAT, "kto_tag": False},
        {"conversations": GPT, "label": True},
        {"instruction": "2 + 2?", "output": "4", "kto_tag": "true"},
    ],
)
def test_answers_that_are_labelled_good_or_bad_need_a_choice(tmp_path: Path, row: dict[str, Any]) -> None:
    refused(tmp_path, row, says=["x.jsonl:1", "of the format KTO", "cannot be learnt yet", "--objective sft"])


def test_an_answer_that_is_labelled_bad_is_never_learnt_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [KTO, KTO | {"label": False}, KTO | {"label": "false"}, KTO | {"label": 0}, KTO | {"label": "true"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    file, counts = open_samples([path], ReadingRules(), "sft"), ReadingCounts()
    assert [placed.where for placed in file.samples(counts)] == [f"{path}:1", f"{path}:5"]
    assert counts.labelled_bad == 3 and "label" in file.files[0].used_columns


def test_labels_that_come_late_or_cannot_be_read_are_named(tmp_path: Path) -> None:
    unlabelled = {"prompt": "a", "completion": "b"}
    refused(tmp_path, unlabelled, KTO | {"label": False}, says=["x.jsonl:2 has label false", "the first record has no"])
    refused(tmp_path, KTO, KTO | {"label": "so so"}, objective="sft", says=["x.jsonl:2", "label is 'so so'"])
    refused(tmp_path, KTO, unlabelled, objective="sft", says=["x.jsonl:2", "label is None"])


@pytest.mark.parametrize("late", [{"label": "false"}, {"label": 0}, {"kto_tag": "no"}, {"is_desirable": False}])
def test_a_late_verdict_is_named_in_every_spelling(tmp_path: Path, late: dict[str, Any]) -> None:
    refused(tmp_path, {"messages": CHAT}, {"messages": CHAT} | late, says=["x.jsonl:2 has ", "so its answer is bad"])


def test_classes_that_are_numbers_are_no_verdicts(tmp_path: Path) -> None:
    assert len(samples_of(tmp_path, KTO | {"label": 3}, KTO | {"label": 0})[1]) == 2


@pytest.mark.parametrize("said", [{"weight": 0}, {"train": "false"}, {"sample_weight": 0.0}, {"trainable": "no"}])
@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": "a", "chosen": "b", "rejected": "c"}])
def test_a_record_that_its_columns_exclude_is_left_out_and_counted(
    tmp_path: Path, row: dict[str, Any], said: dict[str, Any]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [row, row | said, row | dict.fromkeys(said)])))
    file, counts = open_samples([path], ReadingRules()), ReadingCounts()
    assert [placed.where for placed in file.samples(counts)] == [f"{path}:1", f"{path}:3"]
    assert counts.excluded == 1


@pytest.mark.parametrize("said", [{"weight": 0.5}, {"train": "maybe"}, {"loss_weight": [1]}])
def test_a_record_that_counts_in_part_is_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    refused(tmp_path, {"messages": CHAT}, {"messages": CHAT} | said, says=["x.jsonl:2", "whole or not at all"])
    assert samples_of(tmp_path, {"text": "a"} | said)[0] == "text", "columns of plain text say many things"


@pytest.mark.parametrize("prompt", [CHAT[:1], json.dumps(CHAT[:1]), "2 + 2?"])
@pytest.mark.parametrize("as_text", [json.dumps, lambda value: value])
def test_sides_of_a_preference_may_be_messages_as_json_text(tmp_path: Path, prompt: object, as_text: Any) -> None:
    row = {"prompt": prompt, "chosen": as_text(CHAT[1:]), "rejected": as_text(BAD[1:])}
    assert samples_of(tmp_path, row)[1] == [PAIR]
    whole = {"chosen": as_text(CHAT), "rejected": as_text(BAD)}
    assert samples_of(tmp_path, whole)[1] == [PAIR]


def test_json_that_is_no_messages_stays_text(tmp_path: Path) -> None:
    row = {"prompt": '[{"a": 1}]', "completion": '{"role_of": 2}'}
    assert samples_of(tmp_path, row)[1] == [Completion(row["prompt"], row["completion"])]


def test_a_label_that_is_no_judgement_is_another_column(tmp_path: Path) -> None:
    assert samples_of(tmp_path, KTO | {"label": "positive"})[1] == [Completion("2 + 2 =", " 4")]
    mapped = samples_of(tmp_path, {"q": "a", "label": "true"}, columns="prompt=q,completion=label")
    assert mapped == ("prompt and completion", [Completion("a", "true")])


def test_a_table_says_late_labels_too(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": None}, {"prompt": "a", "completion": "b", "label": False}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    file = open_samples([tmp_path / "x.parquet"], ReadingRules())
    with pytest.raises(DataError, match="row 2 has label false"):
        list(file.samples(ReadingCounts()))


# --- other names and orders of roles, malformed records, several files


def test_roles_and_fields_of_other_names_are_mapped(tmp_path: Path) -> None:
    row = {"dialog": [{"speaker": "Customer", "said": "2 + 2?"}, {"speaker": "agent", "said": "4"}]}
    columns, roles = "messages=dialog,role=speaker,content=said", {"customer": "user", "agent": "assistant"}
    assert samples_of(tmp_path, row, columns=columns, roles=roles) == ("chat", [ONE_TURN])
    refused(tmp_path, row, columns="messages=dialog", says=["no field 'role' or 'from'", "--columns role=NAME"])
    refused(tmp_path, row, columns=columns, says=["unknown role 'Customer'", "--roles customer=user"])
    assert parse_roles("a = user, B=tool") == {"a": "user", "b": "tool"}
    for text, says in (("a", "write it like"), ("a=boss", "roles are system"), ("a=user,A=tool", "twice")):
        with pytest.raises(InputError, match=says):
            parse_roles(text)


def test_roles_come_in_any_order_if_that_is_chosen(tmp_path: Path) -> None:
    roles = ["assistant", "user", "user", "system", "assistant", "user"]
    row = turns(*roles)
    refused(tmp_path, row, says=["message 1, has role 'assistant'", "--role-order any"])
    sample = samples_of(tmp_path, row, any_order=True)[1][0]
    assert isinstance(sample, Conversation) and [message.role for message in sample.messages] == roles
    assert [index for index in range(6) if sample.is_supervised(index)] == [0, 4]
    refused(tmp_path, turns("user", "system"), any_order=True, says=["no message of the assistant"])


def test_malformed_records_are_left_out_and_each_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = ["no", json.dumps({"other": 1}), json.dumps({"messages": CHAT}), "[1]", '{"messages": [}']
    lines += [json.dumps(turns("user", "user")), json.dumps({"messages": 5}), json.dumps({"messages": CHAT}), "{}"]
    path.write_bytes("\n".join(lines).encode() + b'\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match="x.jsonl:1 is not JSON"):
        open_samples([path], ReadingRules())
    file, counts = open_samples([path], ReadingRules(skip_bad=True)), ReadingCounts()
    assert [placed.where for placed in file.samples(counts)] == [f"{path}:3", f"{path}:8"]
    assert [re.search(r"x.jsonl:(\d+)", problem)[1] for problem in counts.problems] == list("1245679") + ["10"]
    path.write_text("no\n{}\n")
    with pytest.raises(DataError, match="x.jsonl:1 is not JSON"):
        open_samples([path], ReadingRules(skip_bad=True))


def test_of_a_list_malformed_records_are_left_out_as_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    items = ["no", '{"other": 1}', json.dumps({"messages": CHAT}), "[1]", '{"messages": [}', '{"messages": "no end}']
    items += [json.dumps(turns("user", "user")), json.dumps({"messages": 5}), json.dumps({"messages": CHAT}), "{}"]
    path.write_bytes(("[" + ",\n".join(items)).encode() + b',\n{"a": "\xff"}\n]')
    with pytest.raises(DataError, match="x.json:1 has something other than an object"):
        open_samples([path], ReadingRules())
    file, counts = open_samples([path], ReadingRules(skip_bad=True)), ReadingCounts()
    assert [placed.where for placed in file.samples(counts)] == [f"{path}:3", f"{path}:9"]
    found = [re.search(r"x.json:(\d+)", problem) for problem in counts.problems]
    assert [int(match[1]) for match in found if match] == [1, 2, 4, 5, 6, 7, 8, 10, 11]


def test_several_files_of_several_formats_are_read_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / "a.csv").write_text("instruction,output,input\n2 + 2?,4,\n")
    sub = tmp_path / "shards"
    sub.mkdir()
    (sub / "1.NDJSON").write_text(json.dumps({"conversations": GPT}))
    (sub / "0.json").write_text(json.dumps([{"prompt": "2 + 2?", "completion": CHAT[1]}]))
    (sub / ".hidden.jsonl").write_text("no")
    (sub / "README.md").write_text("no")
    file = open_samples([tmp_path / "b.jsonl", tmp_path / "a.csv", sub], ReadingRules())
    assert [each.path.name for each in file.files] == ["b.jsonl", "a.csv", "0.json", "1.NDJSON"]
    samples = [placed.sample for placed in file.samples(ReadingCounts())]
    assert samples == [ONE_TURN, ONE_TURN, Conversation((USER, ANSWER), 1), ONE_TURN]


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "test.jsonl"),
        ("data/train-0.jsonl", "data/validation-0.jsonl"),
        ("Dev/x.jsonl", "train/x.jsonl"),
    ],
)
def test_a_folder_of_several_splits_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"messages": CHAT}))
    with pytest.raises(DataError, match="holds files of the splits"):
        open_samples([tmp_path], ReadingRules())


def test_blank_answers_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    blank = [CHAT[0], CHAT[1] | {"content": " \n"}]
    rows = [{"messages": CHAT}, {"messages": blank}, {"messages": [*CHAT, *blank]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    counts = ReadingCounts()
    assert len(list(open_samples([path], ReadingRules()).samples(counts))) == 3 and counts.empty_answers == 2
