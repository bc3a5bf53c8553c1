"""The manifest: one canonical form, one run id, one signature; every mistake is one sentence that says what to do."""

from __future__ import annotations

import hashlib
import tomllib
from typing import Any

import msgpack
import pytest
from agora_protocol.errors import ManifestError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.limits import MAX_MANIFEST_BYTES, MAX_PAYLOAD_BYTES, STATE_CHUNK_BYTES
from agora_protocol.manifest import Manifest, SignedManifest, is_signed, preset
from agora_protocol.manifest_model import SubspaceSection
from agora_protocol.manifest_sections import OptimizerSection
from agora_protocol.packing import pack_canonical
from agora_protocol.presets import PRESETS


def test_the_empty_file_is_the_tiny_preset_but_for_an_exact_boundary_and_adamw() -> None:
    adamw = {"name": "adamw", "learning_rate": OptimizerSection().learning_rate}
    exact = preset("tiny", model={"subspace": 128}, boundary={"codec": "bf16"}, optimizer=adamw)
    assert Manifest.from_toml("name = 'tiny'") == exact != preset("tiny")


@pytest.mark.parametrize("name", [*PRESETS])
def test_a_file_reads_back_as_it_was_written(name: str, alice: Identity) -> None:
    manifest = preset(name, data={"corpus": ['a "quoted"\\\n\x7f.txt', "\u00e9\u4e2d.jsonl"]}, seed=2**63 - 1)
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert Manifest.from_toml(manifest.to_toml()).run_id == manifest.run_id
    signed = SignedManifest.sign(manifest, alice)
    assert SignedManifest.from_toml(signed.to_toml()) == signed
    assert Manifest.from_toml(signed.to_toml()) == signed.manifest
    assert is_signed(signed.to_toml()) and not is_signed(manifest.to_toml())


def test_every_key_of_the_file_is_documented() -> None:
    lines = [line for line in preset("tiny").to_toml().splitlines() if line]
    assert all("# " in line and len(line.split("# ", 1)[1]) > 8 for line in lines)


def test_the_canonical_form_is_sorted_and_complete() -> None:
    data = preset("tiny", optimizer={"learning_rate": 1}).canonical()
    values = msgpack.unpackb(data)
    assert [*values] == sorted(Manifest.model_fields.keys() - {"evaluation"})  # which is left out while it is not used
    assert all([*section] == sorted(section) for section in values.values() if isinstance(section, dict))
    assert values["optimizer"]["learning_rate"] == 1.0 and b"\xadlearning_rate\xcb" in data
    assert msgpack.packb(values) == data


def test_the_order_of_a_file_does_not_matter_and_every_value_does() -> None:
    one = Manifest.from_toml("seed = 1\n[model]\nwidth = 64\nheads = 2\n[stages]\ncount = 1\n")
    two = Manifest.from_toml(
        "[stages]\ncount = 1\n[model]\nheads = 2\nwidth = 64\nsubspace = 64\n[data]\n"
    ).with_values(seed=1)
    assert one == two and one.run_id == two.run_id
    ids = {one.run_id}
    for change in ({"seed": 2}, {"name": "x"}, {"boundary": {"codec": "float32"}}, {"optimizer": {"clip": 0}}):
        ids.add(one.with_values(**change).run_id)
    assert len(ids) == 5


def test_the_run_id_is_the_hash_with_the_founder_inside(alice: Identity, bob: Identity) -> None:
    signed = SignedManifest.sign(preset("tiny"), alice)
    assert signed.run_id == hashlib.sha256(b"agora manifest 1\0" + signed.manifest.canonical()).hexdigest()
    assert signed.founder == alice.peer
    assert signed.run_id != SignedManifest.sign(preset("tiny"), bob).run_id != preset("tiny").run_id


def test_minus_zero_is_zero() -> None:
    assert preset("tiny", data={"heldout": -0.0}).run_id == preset("tiny", data={"heldout": 0.0}).run_id


def test_layers_are_cut_evenly_or_as_said() -> None:
    even = preset("tiny", model={"layers": 7}, stages={"count": 3})
    assert [[*even.layers_of(stage)] for stage in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    said = preset("tiny", model={"layers": 7}, stages={"count": 3, "first_layers": [0, 1, 6]})
    assert [[*said.layers_of(stage)] for stage in range(3)] == [[0], [1, 2, 3, 4, 5], [6]]
    for stage in (-1, 3):
        with pytest.raises(ValueError, match="not one of 3"):
            said.layers_of(stage)


def test_sizes_follow_from_the_sections() -> None:
    manifest = Manifest()
    assert manifest.tokens_per_microbatch == 1024 and manifest.boundary_shape() == (8, 128, 128)
    assert manifest.max_payload_bytes == STATE_CHUNK_BYTES, "a chunk of state, where boundaries are smaller"
    wide = manifest.with_values(schedule={"microbatch": 128}, optimizer={"target_tokens": 16_384})
    assert wide.max_payload_bytes == 128 * 128 * 128 * 2 + 4 * 128 * 129
    assert manifest.stage_count == 2


def test_admission(alice: Identity, bob: Identity) -> None:
    listed = preset("tiny", admission={"mode": "listed", "peers": [bob.peer]})
    founded = SignedManifest.sign(listed, alice).manifest
    assert (
        founded.admits_without_ticket(alice.peer)
        and founded.admits_without_ticket(bob.peer)
        and preset("tiny").admits_without_ticket(bob.peer)
    )
    assert not founded.admits_without_ticket(Identity.generate().peer)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\nwidht = 128", "[model] has no key 'widht'; did you mean 'width'?"),
        ("[optimiser]\nclip = 1.0", "there is no key 'optimiser'; did you mean 'optimizer'?"),
        ("[model]\nqqq = 1", "[model] has no key 'qqq'; use one of family, width"),
        ("sede = 3", "there is no key 'sede'; did you mean 'seed'?"),
        ("[model]\nwidth = 130", "[model] width 130 is not divisible by heads 4; use a multiple of heads, such as width = 128"),  # noqa: E501
        ("[model]\nkey_value_heads = 3", "heads 4 is not a multiple of key_value_heads 3; use a divisor of heads, such as key_value_heads = 2"),  # noqa: E501
        ("[model]\nkey_value_heads = 8", "heads 4 is not a multiple of key_value_heads 8"),
        ("[model]\nwidth = 12\nheads = 4", "head size width / heads = 3 is odd, and rotary positions need pairs; use width = 16"),  # noqa: E501
        ("[model]\nsubspace = 129", "subspace 129 is more than width 128; remove it, or set it to less"),
        ("[model]\nsubspace = 1", "[model] subspace 1 must be greater than or equal to 2"),
        ("[model]\nsubspace = 64\nembedding = 'learnt'", "leaves tokens only a subspace of 64 in width 128; use"),
        ("[model]\nvocabulary = 1", "[model] vocabulary 1 must be greater than or equal to 2"),
        ("[model]\nvocabulary = 100", "vocabulary 100 is too small for [data] tokenizer bytes"),
        ("[model]\nwidth = 1000000", "[model] width 1000000 must be less than or equal to 65536"),
        ("[model]\nwidth = 128.0", "[model] width 128.0 must be a valid integer"),
        ("[model]\nwidth = true", "[model] width True must be a valid integer"),
        ("[model]\nfamily = 'mamba'", "[model] family 'mamba' is unknown; use one of subspace, hf."),
        ("[model]\nfamily = 'subspac'", "[model] family 'subspac' is unknown; did you mean 'subspace'?"),
        ("[model]\nfamily = 3", "[model] family 3 is unknown; use one of subspace, hf."),
        ("[model]\nfamily = [1]", "[model] family a tuple is unknown; use one of subspace, hf."),
        ("[stages]\ncount = 5", "[model] layers 4 are fewer than [stages] count 5, and every stage needs a layer"),
        ("[stages]\ncount = 0", "[stages] count 0 must be greater than or equal to 1"),
        ("[stages]\nfirst_layers = [0]", "first_layers names 1 stages where count is 2"),
        ("[stages]\nfirst_layers = [1, 2]", "first_layers [1, 2] is not a cut of 4 layers; begin with 0"),
        ("[stages]\nfirst_layers = [0, 0]", "first_layers [0, 0] is not a cut of 4 layers"),
        ("[stages]\nfirst_layers = [0, 4]", "first_layers [0, 4] is not a cut of 4 layers"),
        ("[stages]\nfirst_layers = [0, '1']", "[stages] first_layers[1] '1' must be a valid integer"),
        ("[boundary]\ncodec = 'int8/int5hh'", "[boundary] codec 'int8/int5hh' is unknown; did you mean 'int5h'? use one of bf16"),  # noqa: E501
        ("[boundary]\ncodec = 'gzip'", "[boundary] codec 'gzip' is unknown; use one of bf16, float32, int8, int8h, int7"),  # noqa: E501
        ("[optimizer]\ntarget_tokens = 1000", "target_tokens 1000 is not a multiple of the 1024 tokens of a microbatch"),  # noqa: E501
        ("[optimizer]\ntarget_tokens = 3000", "use target_tokens = 3072"),
        ("[optimizer]\nwarmup_steps = 2000", "warmup_steps 2000 leaves nothing of total_steps 2000"),
        ("[optimizer]\nlearning_rate = nan", "learning_rate nan must be a finite number"),
        ("[optimizer]\nlearning_rate = '1'", "learning_rate '1' must be a valid number"),
        ("[optimizer]\nbeta1 = 1.0", "[optimizer] beta1 1.0 must be less than 1"),
        ("[schedule]\nmicrobatch = 65536\n[optimizer]\ntarget_tokens = 8388608", "bytes on the wire, over the limit of"),  # noqa: E501
        ("[data]\ncorpus = []", "[data] corpus must have at least 1 item"),
        ("[data]\ncorpus = 'stdlib'", "[data] corpus 'stdlib' must be a list"),
        ("[data]\ncorpus = ['']", "[data] corpus[0] '' must have at least 1 character"),
        ("[data]\nheldout = 0.9", "[data] heldout 0.9 must be less than or equal to 0.5"),
        ("[admission]\nmode = 'listed'", "admits nobody but the founder; list peers, or use mode open"),
        ("[admission]\npeers = ['x']", "[admission] 'x' is not a peer id"),
        ("model = 3", "model 3 must be a table"),
        ("seed = -1", "seed -1 must be greater than or equal to 0"),
        ("seed = 9223372036854775808", "seed 9223372036854775808 must be less than or equal to"),
        ("seed = 0x" + "f" * 6000, "seed a huge integer must be"),
        ("seed = " + "1" * 6000, "not valid TOML"),
        ("name = 'two words'", "name 'two words' must be 1 to 64 letters, digits"),
        ("founder = 'me'", "founder is not a peer id; remove it"),
        ("x = [", "not valid TOML (Invalid value"),
        ("x = " + "[" * 100_000, "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
        ("# " + "x" * 300_000, "more than 262144 bytes; is it a manifest?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_that_says_what_to_do(text: str, says: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_toml(text, "run.toml")
    said = str(caught.value)
    assert said.startswith("run.toml: ") and says in said
    assert len(said) < 420 and "\n" not in said and said.endswith((".", "?"))


def test_a_file_name_that_is_no_utf8_is_refused() -> None:
    name = b"caf\xe9.txt".decode(errors="surrogateescape")  # as Python reads it from the command line
    with pytest.raises(ManifestError, match=r"corpus\[0\] 'caf\\udce9.txt' must be valid Unicode"):
        preset("tiny", data={"corpus": [name]})
    with pytest.raises(ManifestError, match=r"'\\ud800' is not valid Unicode; write it again"):
        preset("tiny", admission={"mode": "listed", "peers": ["\ud800"]})


def test_more_mistakes_that_need_values(alice: Identity) -> None:
    for admission, says in (
        ({"mode": "listed", "peers": [alice.peer] * 2}, "one peer twice"),
        ({"mode": "open", "peers": [alice.peer]}, "no effect in mode open"),
    ):
        with pytest.raises(ManifestError, match=says):
            preset("tiny", admission=admission)
    with pytest.raises(ManifestError, match=f"more than the {MAX_MANIFEST_BYTES} allowed"):
        preset("tiny", data={"corpus": ["a" * 1024] * 64})
    with pytest.raises(ManifestError, match="did you mean 'tiny'"):
        preset("tinny")


def test_the_largest_payload_fits_exactly_or_is_refused() -> None:
    manifest = Manifest().with_values(model={"width": 65_536, "context": 1024}, optimizer={"target_tokens": 1024},
                                   schedule={"microbatch": 1})  # fmt: skip
    assert manifest.max_payload_bytes <= MAX_PAYLOAD_BYTES
    with pytest.raises(ManifestError, match="over the limit"):
        manifest.with_values(boundary={"codec": "float32"})


def model_of(manifest: Manifest) -> SubspaceSection:
    assert isinstance(manifest.model, SubspaceSection)
    return manifest.model


def test_replaced_follows_width_with_a_subspace_that_was_all_of_it_or_the_share_for_links() -> None:
    assert model_of(Manifest().with_values(model={"width": 256})).subspace == 256
    assert model_of(preset("tiny").with_values(model={"width": 256})).subspace == 112
    assert model_of(preset("tiny", model={"subspace": 32}).with_values(model={"width": 256})).subspace == 32
    assert model_of(preset("tiny").with_values(model={"heads": 2})).width == 128


def test_a_boundary_has_the_subspaces_numbers_and_its_embedding_is_fixed() -> None:
    narrow = preset("tiny", model={"subspace": 20})
    assert narrow.boundary_shape() == (8, 128, 20) and model_of(narrow).is_embedding_fixed
    assert model_of(preset("tiny")).is_embedding_fixed and not model_of(Manifest()).is_embedding_fixed
    assert SubspaceSection(embedding="fixed").is_embedding_fixed
    assert preset("small", model={"subspace": 20}).max_payload_bytes >= 8 * 256 * 20 * 2


def test_a_manifest_that_exists_is_valid_however_it_was_made() -> None:
    with pytest.raises(ManifestError, match="width 129 is not divisible"):
        Manifest(model=SubspaceSection(width=129, subspace=129))
    with pytest.raises(ManifestError, match="more than width"):
        Manifest.model_validate({"model": {"width": 64, "subspace": 96}})
    narrow = Manifest.model_validate({"model": {"width": 64}, "data": {"corpus": ["a.txt"]}})
    assert model_of(narrow).subspace == 64


def test_sections_are_immutable_and_closed() -> None:
    section: Any = preset("tiny").model
    with pytest.raises(ValueError, match="frozen"):
        section.width = 3
    with pytest.raises(ValueError, match="extra"):
        SubspaceSection(depth=3)  # type: ignore[call-arg]


def test_signed_bytes_are_read_back_and_pinned_to_their_run(signed: SignedManifest) -> None:
    assert SignedManifest.from_bytes(signed.to_bytes()) == signed
    assert SignedManifest.from_bytes(signed.to_bytes(), signed.run_id) == signed
    with pytest.raises(ManifestError, match="is of run .* ask another peer, or for a new invite"):
        SignedManifest.from_bytes(signed.to_bytes(), RunId("0" * 64))


def test_a_changed_manifest_is_not_its_founders(signed: SignedManifest, alice: Identity, bob: Identity) -> None:
    changed = SignedManifest(signed.manifest.with_values(seed=9), signed.signature)
    stolen = SignedManifest(signed.manifest.with_values(founder=bob.peer), signed.signature)
    unsigned = SignedManifest(preset("tiny"), alice.sign(b"agora founder 1\0" + preset("tiny").canonical()))
    for bad in (changed, stolen, unsigned, SignedManifest(signed.manifest, bytes(64))):
        with pytest.raises(ManifestError, match="somebody changed it; ask for the original"):
            SignedManifest.from_bytes(bad.to_bytes())


def test_a_signed_file_that_was_edited_is_refused(signed: SignedManifest) -> None:
    text = signed.to_toml()
    with pytest.raises(ManifestError, match="somebody changed it"):
        SignedManifest.from_toml(text.replace("seed = 0", "seed = 1"))
    with pytest.raises(ManifestError, match="no \\[signed\\] table"):
        SignedManifest.from_toml(preset("tiny").to_toml(), "run.toml")
    for wrong in ("'zz'", "3", "'00'"):
        edited = text[: text.index("signature = ")] + f"signature = {wrong}\n"
        with pytest.raises(ManifestError, match="not hex|somebody changed it"):
            SignedManifest.from_toml(edited)
    assert tomllib.loads(text)["signed"]["run"] == signed.run_id


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xc0",
        msgpack.packb([1, b"", b""]),
        msgpack.packb([1, b"\xc0", bytes(64)]),
        msgpack.packb([True, b"\x80", bytes(64)]),
        msgpack.packb([2, b"\x80", bytes(64)]),
        msgpack.packb([1, b"\x80", bytes(63)]),
        msgpack.packb([1, {}, bytes(64)]),
        bytes(MAX_MANIFEST_BYTES + 1),
        b"\x93\x01\xc6\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        SignedManifest.from_bytes(data)


def test_a_signed_manifest_must_be_in_canonical_form(signed: SignedManifest, alice: Identity) -> None:
    unsorted = msgpack.packb(signed.manifest.model_dump())
    data = msgpack.packb([1, unsorted, alice.sign(b"agora founder 1\0" + unsorted)])
    with pytest.raises(ManifestError, match="canonical"):
        SignedManifest.from_bytes(data)


def test_a_received_manifest_is_judged_like_a_file(alice: Identity) -> None:
    values = preset("tiny").model_dump() | {"founder": alice.peer}
    values["model"]["heads"] = 3
    data = msgpack.packb([1, msgpack.packb(values), bytes(64)])
    with pytest.raises(ManifestError, match="the received manifest: \\[model\\] width 128 is not divisible by heads 3"):
        SignedManifest.from_bytes(data)


def test_a_key_that_came_later_changes_no_id_and_no_file_while_it_is_not_used() -> None:
    manifest = Manifest(name="poems")
    assert b"oldest_version" not in manifest.canonical() and "oldest_version" not in manifest.to_toml()
    asks = manifest.with_values(admission={"oldest_version": "0.2.0", "oldest_version_from": "2027-02-28"})
    assert asks.run_id != manifest.run_id and Manifest.from_toml(asks.to_toml()) == asks
    for each in (manifest, asks, manifest.with_values(admission={"oldest_version": "0.2.0"})):
        signed = SignedManifest.sign(each, Identity.generate())
        assert SignedManifest.from_bytes(signed.to_bytes(), signed.run_id) == signed
        assert SignedManifest.from_toml(signed.to_toml()) == signed


def test_a_section_that_came_later_changes_no_id_and_no_file_while_it_is_not_used() -> None:
    manifest = Manifest(name="poems")
    assert b"evaluation" not in manifest.canonical() and "[evaluation]" not in manifest.to_toml()
    asks = manifest.with_values(evaluation={"tasks": ["heldout", "sums"]})
    assert asks.run_id != manifest.run_id and Manifest.from_toml(asks.to_toml()) == asks
    assert b"every" in manifest.canonical() and asks.canonical().count(b"every") == manifest.canonical().count(b"every")
    signed = SignedManifest.sign(asks, Identity.generate())
    assert SignedManifest.from_bytes(signed.to_bytes(), signed.run_id) == signed
    with pytest.raises(ManifestError, match="not in canonical form"):  # as a default that is written out would be
        values = {**asks.model_dump(), "founder": signed.founder}
        SignedManifest.from_bytes(msgpack.packb([1, pack_canonical(values), signed.signature]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tasks": ["sums", "sums"]}, "names one task twice"),
        ({"tasks": ["/etc/passwd"]}, "tasks"),
        ({"tasks": ["a" * 65]}, "tasks"),
        ({"tasks": [f"t{number}" for number in range(9)]}, "tasks"),
        ({"every": 0}, "every"),
        ({"share": 0.0}, "share"),
        ({"share": 1.5}, "share"),
        ({"items": 0}, "items"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ManifestError, match=says):
        Manifest(name="poems").with_values(evaluation=wrong)


def test_heldout_text_is_evaluated_where_some_is_held_out() -> None:
    with pytest.raises(ManifestError, match="hold out some text"):
        Manifest(name="poems").with_values(data={"heldout": 0.0}, evaluation={"tasks": ["heldout"]})


@pytest.mark.parametrize("wrong", ["0.2", "v0.2.0", "0.2.0rc1", "-1.0.0", "0.2.0\n"])
def test_an_oldest_version_is_three_numbers(wrong: str) -> None:
    with pytest.raises(ManifestError):
        Manifest(name="poems").with_values(admission={"oldest_version": wrong})
    with pytest.raises(ManifestError):
        Manifest(name="poems").with_values(admission={"oldest_version_from": wrong})
