"""Claims about the forms that a run's requests and answers may have, also by codecs that amendments have named."""

from __future__ import annotations

import pytest
from agora_protocol.errors import ProtocolError, Refused
from agora_protocol.messages import Process, Processed
from agora_protocol.tensors import WireTensor

from agora.codec import encode_tokens
from agora.core.calls import Reply
from agora.core.live_manifest import LiveManifest
from agora.pipeline.process_call import CodecForms, ProcessCall, TensorForm, WireRules
from tests.pipeline.world import peer_id
from tests.train.support import batches_for, small_manifest
from tests.train.test_amended_steps import amendment

CORE = small_manifest(boundary={"codec": "bf16"})
AMENDMENT = amendment(CORE, {"boundary.codec": "int8/int4"}, 40)
PEER = peer_id("peer")


def tensor(form: TensorForm) -> WireTensor:
    values = 1
    for size in form.shape:
        values *= size
    nbytes = values * {"uint8": 1, "bf16": 2}[form.dtype]
    return WireTensor(form.dtype, form.shape, memoryview(bytes(nbytes)))


def call(form: TensorForm, codec: str) -> ProcessCall:
    request = Process(b"m" * 16, PEER, 1, "train", 1000, codec=codec)
    tokens = encode_tokens(batches_for(CORE, 1)[0][0])
    return ProcessCall(request, [tensor(form), tokens], 0.0, lambda _: None)


def forms(codec: str) -> CodecForms:
    return CodecForms.of(codec, CORE.boundary_shape())


def test_a_request_has_the_form_of_its_codec_before_and_after_the_amendments_step() -> None:
    rules = WireRules.of_run(LiveManifest(CORE, [AMENDMENT]))
    for name, codec in (("bf16", ""), ("bf16", "bf16"), ("int8/int4", "int8/int4")):
        assert rules.check_request(call(forms(name).boundary, codec)).codec == codec
    with pytest.raises(ProtocolError, match="The boundary is bf16"):
        rules.check_request(call(forms("bf16").boundary, "int8/int4"))


def test_an_answer_has_the_form_of_the_requests_codec() -> None:
    rules = WireRules.of_run(LiveManifest(CORE, [AMENDMENT]))
    answer = Reply(Processed(1.0, 4, 0.1), [tensor(forms("int8/int4").gradient)])
    assert rules.check_answer(answer, "train", PEER, "int8/int4").gradient is answer.tensors[0]
    with pytest.raises(ProtocolError, match="The peer sent a gradient of uint8"):
        rules.check_answer(answer, "train", PEER)


def test_a_codec_that_no_known_amendment_names_is_no_offence_and_computes_nothing() -> None:
    live = LiveManifest(CORE)
    rules = WireRules.of_run(live)
    for codec in ("int8/int4", "float32", "nonsense"):
        with pytest.raises(Refused, match="no amendment that is known here"):
            rules.check_request(call(forms("int8/int4").boundary, codec))
    live.amend([AMENDMENT])
    assert rules.check_request(call(forms("int8/int4").boundary, "int8/int4"))
    live.amend([])
    # Its delegate was banned: microbatches that were opened before are answered all the same.
    assert rules.check_request(call(forms("int8/int4").boundary, "int8/int4"))


def test_the_same_tensors_by_another_codec_are_another_work() -> None:
    digests = {call(forms("bf16").boundary, codec).content_digest for codec in ("", "bf16", "float32")}
    assert len(digests) == 3
