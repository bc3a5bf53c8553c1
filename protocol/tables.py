"""Writes the tables of SPEC.md from the code, so that they cannot drift apart: `python protocol/tables.py`.

A test compares every table in SPEC.md with what this renders.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from agora_protocol import (
    addresses,
    amendments,
    directory_shards,
    errors,
    evaluations,
    identity,
    ids,
    limits,
    manifest,
    manifest_model,
    messages,
    records,
    tensors,
    tickets,
)
from agora_protocol.fields import REQUIRED, Structure
from agora_protocol.manifest_toml import toml_value
from pydantic import BaseModel

SPEC: Final = Path(__file__).with_name("SPEC.md")
_BLOCK: Final = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.S)

LIMITS: Final = {
    "PROTOCOL_VERSION": "`version` in Hello",
    "OLDEST_PROTOCOL_VERSION": "oldest version that a peer of this one still speaks (section 17)",
    "PROTOCOL_NAME": "libp2p protocol id of the stream",
    "FRAME_MAGIC": "first byte of every frame",
    "PREFIX_BYTES": "bytes before a frame's header",
    "MAX_HEADER_BYTES": "header of every frame but ANSWER",
    "MAX_ANSWER_HEADER_BYTES": "header of an ANSWER, which may carry a manifest, amendments or a status",
    "MAX_PAYLOAD_BYTES": "payload of one frame; a run's manifest implies a smaller one",
    "MAX_TENSORS": "tensors in one frame",
    "MAX_DIMENSIONS": "dimensions of one tensor",
    "MAX_DIMENSION": "one dimension",
    "MAX_CALLS_PER_CONNECTION": "calls one side may have open on one connection",
    "MAX_DEADLINE_MS": "deadline of one call, milliseconds",
    "MAX_HINTS": "entries of Process.hint",
    "HANDSHAKE_TIMEOUT_S": "seconds until the other side's HELLO must have arrived",
    "PING_AFTER_SILENCE_S": "seconds of silence, with a call open, after which a caller asks Ping (advice)",
    "PING_ANSWER_S": "seconds a Pong may take before the connection counts as broken (advice)",
    "MAX_TEXT_BYTES": "a sentence for people, UTF-8 bytes",
    "MAX_NAME_BYTES": "a name, UTF-8 bytes",
    "MAX_ADDRESSES": "addresses in a Hello, claim or invite",
    "MAX_ADDRESS_BYTES": "one address, ASCII",
    "MAX_INVITE_BYTES": "one invite",
    "MAX_PORTS": "ports in one DialBack",
    "MAX_SEEN_BYTES": "a direct TCP address without /p2p/PEER",
    "MAX_RELAYED_PEERS": "peers for which one peer offers to relay",
    "MAX_RECORD_BYTES": "one sealed record",
    "MAX_KEY_RECORDS": "records that a node keeps under one key, those with the smallest hashes",
    "MAX_SHARD_BITS": "bits in the key of a shard",
    "RECENT_STEPS": "steps that a stage's account in a progress is of",
    "MAX_RECORD_LIFETIME_S": "seconds from now to a record's expiry",
    "CLOCK_TOLERANCE_S": "seconds by which clocks may differ",
    "MAX_TICKETS": "tickets of a proof",
    "MAX_PROOF_BYTES": "one proof",
    "MAX_REVOCATION_BYTES": "one sealed revocation",
    "MAX_SHARED_REVOCATIONS": "revocations in a ShareRevocations or a BanList",
    "MAX_REVOCATIONS": "revocations that a peer keeps of a run",
    "SALT_BYTES": "salt of a Hello; seed of a GetSketches",
    "MAX_AMENDMENT_BYTES": "one sealed amendment",
    "MAX_CHANGES_BYTES": "the new values in one amendment",
    "MAX_AMENDMENTS": "amendments of a run, in one chain",
    "MAX_RIVALS": "different amendments of one number that a peer keeps",
    "MAX_KEPT_AMENDMENTS": "amendments that a peer keeps of a run, and that one KnownAmendments has",
    "MAX_SHARED_AMENDMENTS": "amendments in one ShareAmendments",
    "MAX_EVALUATION_BYTES": "one sealed evaluation",
    "MAX_EVALUATION_VALUES": "metrics in one evaluation",
    "MAX_SHARED_EVALUATIONS": "evaluations in one EvaluationList",
    "MAX_KEPT_EVALUATIONS": "evaluations that a peer keeps of a run",
    "MAX_EVALUATIONS_OF_ISSUER": "of these, of one issuer",
    "MAX_MANIFEST_BYTES": "one signed manifest",
    "MAX_CONFIG_BYTES": "the config.json of a base model, inside a manifest",
    "MAX_WEIGHT_FILES": "weights files of a base model",
    "MAX_STATUS_BYTES": "one status",
    "MAX_KEY_FILE_BYTES": "what is read of an identity file",
    "MAX_STAGES": "stages of a run",
    "MAX_SPAN_STAGES": "stages of one span",
    "MAX_REFERENCES": "log-probabilities in one message: rows of a microbatch of preference pairs",
    "MAX_EPOCH_STATE": "integers with which origins say what is done of the epochs",
    "MAX_METRICS": "sums that the answer to a microbatch reports in addition to the loss",
    "BOUNDARY_BLOCK": "values of a token in a quantised boundary that share one scale",
    "MAX_GOSSIPED_REPLICAS": "replicas in a GossipSteps or GossipedSteps",
    "SLICE_BLOCK": "elements of a stage's weights that fall into one slice together",
    "PART_ELEMENTS": "elements of a small shard of a gradient or slice; one reducer averages a shard in one call",
    "MAX_SLICES": "slices into which inner steps may divide a stage's weights",
    "MAX_SMALL_PARTS": "small shards of a gradient or slice",
    "MAX_PART_ELEMENTS": "elements of the largest shard",
    "QUANTISER_BLOCK": "elements of a quantised shard that share an exponent (int8) or a scale (normal2 to normal4)",
    "STATE_CHUNK_BYTES": "bytes of a snapshot, or of a base model's tensor, in one call; the last ones may be fewer",
    "SKETCH_SUMS": "sums in the sketch of one array of a chunk",
    "MAX_SKETCHED_CHUNKS": "chunks in one GetSketches",
    "MAX_BASE_TENSORS": "tensors in a tensor list",
    "MAX_TENSOR_LIST_BYTES": "one tensor list",
    "MAX_DEPTH": "levels of nesting in any msgpack",
    "MAX_ARRAY_ITEMS": "items of any msgpack array",
    "MAX_MAP_ITEMS": "entries of any msgpack map",
    "MAX_VALUES": "keys and values in one msgpack",
}


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def limits_table() -> str:
    """Returns the table of every constant of limits.py with its value and meaning."""
    names = [name for name in vars(limits) if name.isupper()]
    return _table(["name", "value", "meaning"], [[f"`{n}`", f"`{getattr(limits, n)}`", LIMITS[n]] for n in names])


def tags_table() -> str:
    """Returns the table of the byte strings that begin identities, hashed bytes and signed bytes."""
    rows = [
        ["peer id prefix (multihash, protobuf)", f"`{ids.PEER_ID_PREFIX.hex()}`"],
        ["key file prefix (protobuf)", f"`{identity.KEY_FILE_PREFIX.hex()}`"],
        ["run id tag", f"`{manifest.RUN_TAG.hex()}` = `agora manifest 1` and a zero byte"],
        ["founder's signature tag", f"`{manifest.SIGNATURE_TAG.hex()}` = `agora founder 1` and a zero byte"],
        ["record signature tag", f"`{records.RECORD_TAG.hex()}` = `agora record 1` and a zero byte"],
        ["shard hash tag", f"`{directory_shards.SHARD_TAG.hex()}` = `agora shard 1` and a zero byte"],
        ["ticket signature tag", f"`{tickets.TICKET_TAG.hex()}` = `agora ticket 1` and a zero byte"],
        ["revocation signature tag", f"`{tickets.REVOCATION_TAG.hex()}` = `agora revocation 1` and a zero byte"],
        ["amendment signature tag", f"`{amendments.AMENDMENT_TAG.hex()}` = `agora amendment 1` and a zero byte"],
        ["evaluation signature tag", f"`{evaluations.EVALUATION_TAG.hex()}` = `agora evaluation 1` and a zero byte"],
        ["evaluator tag", f"`{evaluations.EVALUATOR_TAG.hex()}` = `agora evaluator 1` and a zero byte"],
        ["hello tag", f"`{tickets.HELLO_TAG.hex()}` = `agora hello 1` and a zero byte"],
    ]
    return _table(["what", "bytes (hex)"], rows)


def errors_table() -> str:
    """Returns the table of every code that a Refusal may have."""
    refused = [errors.Busy, errors.NotMyStage, errors.NotAdmitted, errors.WrongRun, errors.Unsupported]
    kinds: list[type[errors.AgoraError]] = [*refused, errors.Refused, errors.Unavailable, errors.PeerFailed]
    rows = [[f"`{kind.code}`", "no", (kind.__doc__ or "").split("\n")[0]] for kind in kinds]
    known = {kind.code for kind in kinds}
    rows += [[f"`{code}`", "yes", text] for code, text in errors.PROTOCOL_CODES.items() if code not in known]
    return _table(["code", "offence", "meaning"], rows)


def dtypes_table() -> str:
    """Returns the table of every dtype of a tensor."""
    return _table(["dtype", "bytes per item"], [[f"`{name}`", str(size)] for name, size in tensors.ITEM_BYTES.items()])


def frames_table() -> str:
    """Returns the table of every frame type and the messages that it carries."""
    rows = []
    for kind in messages.FrameType:
        carried = [message.__name__ for message in messages.KINDS.values() if kind in message.FRAMES]
        rows.append([str(int(kind)), kind.name, ", ".join(carried) or "nothing"])
    return _table(["type", "name", "carries"], rows)


def addresses_table() -> str:
    """Returns the table of every part that an address may have."""
    rows = [[f"`/{name}`", "a value" if check else "no value"] for name, check in addresses.PARTS.items()]
    return _table(["part", "followed by"], rows)


def _default(value: Any) -> str:
    if value is REQUIRED:
        return ""
    return f"`{value if isinstance(value, bytes) else toml_value(value)}`"


def _structure(kind: type[Structure], title: str) -> str:
    text = f"#### {title}\n\n{' '.join((kind.__doc__ or '').split())}\n\n"
    rows = [[f"`{name}`", f.words, _default(f.default), f.doc] for name, f in kind.FIELDS.items()]
    return text + (_table(["field", "type", "usual", "meaning"], rows) if rows else "No fields.\n") + "\n"


def messages_tables() -> str:
    """Returns one section for every message."""
    parts = []
    for kind, message in messages.KINDS.items():
        fewest, most = message.TENSORS
        count = "" if most == 0 else f", {fewest} tensors" if fewest == most else f", {fewest} to {most} tensors"
        where = " or ".join(frame.name for frame in message.FRAMES)
        parts.append(_structure(message, f"{message.__name__} (kind {kind}, in {where}{count})"))
    return "".join(parts)


def answers_table() -> str:
    """Returns the table of every request and the message that answers it."""
    return _table(
        ["request", "answer"], [[asked.__name__, given.__name__] for asked, given in messages.ANSWER_OF.items()]
    )


def records_tables() -> str:
    """Returns one section for every record."""
    return "".join(
        _structure(record, f"{record.__name__} (kind {kind}, key word `{record.NAME}`)")
        for kind, record in records.RECORDS.items()
    )


def tickets_tables() -> str:
    """Returns one section for tickets and one for revocations."""
    return _structure(tickets.Ticket, "Ticket") + _structure(tickets.Revocation, "Revocation")


def amendments_tables() -> str:
    """Returns the section for amendments."""
    return _structure(amendments.Amendment, "Amendment")


def evaluations_tables() -> str:
    """Returns the section for evaluations."""
    return _structure(evaluations.Evaluation, "Evaluation")


def amendable_table() -> str:
    """Returns the table of every key that an amendment may change."""
    return _table(["key"], [[f"`{key}`"] for key in amendments.AMENDABLE])


def _bounds(field: Any) -> str:
    words = []
    for item in field.metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if (bound := getattr(item, name, None)) is not None:
                words.append(f"{sign} {bound:g}" if isinstance(bound, float) else f"{sign} {bound}")
    return ", ".join(words)


def _type(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        return f"list of {_type(inside[0])}"
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return " or ".join(inside)
    if origin in (Union, UnionType):
        return " or ".join(map(_type, inside))
    return "text" if annotation is str else str(annotation.__name__)


def manifest_table() -> str:
    """Returns the table of every key of a manifest, in the order of its file."""
    rows = []
    for name, field in manifest.Manifest.model_fields.items():
        inner = type(field.default).model_fields if isinstance(field.default, BaseModel) else {}
        rows += [_key_row(f"{name}.{key}" if key else name, value) for key, value in inner.items() or [("", field)]]
    return _table(KEY_HEADS, rows)


def base_model_table() -> str:
    """Returns the table of every key of `model` in the family hf."""
    fields = manifest_model.HfSection.model_fields
    return _table(KEY_HEADS, [_key_row(f"model.{key}", field) for key, field in fields.items()])


def _key_row(name: str, field: Any) -> list[str]:
    return [f"`{name}`", _type(field.annotation), _bounds(field), _default(field.default), field.description or ""]


KEY_HEADS: Final = ["key", "type", "bounds", "default", "meaning"]
TABLES: Final = {
    "limits": limits_table,
    "tags": tags_table,
    "errors": errors_table,
    "dtypes": dtypes_table,
    "frames": frames_table,
    "addresses": addresses_table,
    "messages": messages_tables,
    "answers": answers_table,
    "records": records_tables,
    "tickets": tickets_tables,
    "amendments": amendments_tables,
    "evaluations": evaluations_tables,
    "amendable": amendable_table,
    "manifest": manifest_table,
    "base_model": base_model_table,
}


def render(text: str) -> str:
    """Returns SPEC.md's text with every table as the code has it."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]().rstrip()}\n\n{block[3]}", text)


if __name__ == "__main__":
    sys.stdout.write(f"{SPEC}\n")
    SPEC.write_text(render(SPEC.read_text(encoding="utf-8")), encoding="utf-8")
