"""Checks and keeps the records that this node of the DHT is asked to store, or gets from another.

The rules are those of protocol/SPEC.md, "Records in the DHT".
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

from agora_protocol.directory_shards import shard_bits, shard_hash
from agora_protocol.errors import ProtocolError
from agora_protocol.ids import PeerId, RunId, Span, is_peer_id
from agora_protocol.limits import CLOCK_TOLERANCE_S, MAX_KEY_RECORDS, MAX_RECORD_BYTES, MAX_SHARD_BITS
from agora_protocol.packing import pack, unpack
from agora_protocol.records import NAMES, Record, open_record, read_signed, read_unverified, record_key

from agora.net.p2pd.hivemind_shim import DHTLocalStorage, DHTRecord, DictionaryDHTValue, RecordValidatorBase

MAX_VERIFIED: Final = 8192  # maximum number of records that are remembered as verified
MAX_SHARD_KEYS: Final = 8192  # maximum number of shards' keys that are remembered by their hash
MAX_SEARCHED: Final = 8  # maximum number of records whose keys are all remembered: up to 4096 keys each
MAX_STORED_KEYS: Final = 16_384  # maximum number of keys under which a node stores records
_PACKING_BYTES: Final = 16  # an upper bound on what msgpack adds around a record's bytes

peer_hash = lru_cache(maxsize=MAX_VERIFIED)(shard_hash)  # returns the shard hash of a peer in a run; caches it


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Validates, for hivemind, each record that a node is asked to store or gets from another.

    Accepts records of this run that are signed by their peer and lie under their key. refused: by error code, how many
    records `validate` has not accepted.
    """

    def __init__(self, run: RunId, stages: int, unix: Callable[[], float] = time.time) -> None:
        """unix: the time by which records expire."""
        self.run = run
        self._unix = unix
        self.refused: Counter[str] = Counter()  # by the code of the ProtocolError
        self._stages = stages
        self._keys = {
            dht_id_of(key): key for name in NAMES for key in (record_key(run, name, stage) for stage in range(stages))
        }
        self._shard_keys: OrderedDict[bytes, str] = OrderedDict()
        # By peer, kind and span of a record: all keys of shards under which it may lie, by hash.
        self._searched: OrderedDict[tuple[PeerId, type[Record], Span], dict[bytes, str]] = OrderedDict()
        self._verified: OrderedDict[tuple[bytes, bytes, bytes, float], Record] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """Returns whether `verify` accepts the record; if not, counts its error code in `refused`.

        Called by hivemind.
        """
        try:
            self.verify(record.key, record.subkey, record.value, record.expiration_time)
        except ProtocolError as error:
            self.refused[error.code] += 1
            return False
        return True

    def is_known(self, record: DHTRecord) -> bool:
        """Returns whether this very record was accepted before and is cached: its signature is not verified again."""
        return (record.key, record.subkey, record.value, record.expiration_time) in self._verified

    def verify(self, key_hash: bytes, packed_peer: bytes, packed: bytes, expires_unix: float) -> Record:
        """Verifies a DHT entry and returns its record.

        Raises ProtocolError if key, size, expiry or signature is invalid. A record that expired within
        CLOCK_TOLERANCE_S is accepted. Up to MAX_VERIFIED accepted records are cached: see is_known.
        """
        if len(packed) > MAX_RECORD_BYTES + _PACKING_BYTES:
            raise ProtocolError("too-large", f"A record of {len(packed)} bytes.")
        now_unix = self._unix()
        known = self._verified.get((key_hash, packed_peer, packed, expires_unix))
        if known is not None and expires_unix > now_unix - CLOCK_TOLERANCE_S:
            return known
        key = self._keys.get(key_hash) or self._shard_keys.get(key_hash) or self._find_shard_key(key_hash, packed)
        data, peer = _unpack_value(packed, bytes), _unpack_value(packed_peer, str)
        if not is_peer_id(peer):
            raise ProtocolError("wrong-key", "The subkey is not a peer id.")
        if expires_unix != read_unverified(data)[1]:
            raise ProtocolError("bad-record", "The DHT's expiry is not the signed one.")
        # A record that has just expired is accepted: an answer of many records must not be refused because of one.
        grace = min(now_unix, max(expires_unix - 1e-3, now_unix - CLOCK_TOLERANCE_S))
        record = open_record(data, run=self.run, key=key, subkey_peer=PeerId(peer), now_unix=grace)
        self._verified[key_hash, packed_peer, packed, expires_unix] = record
        if len(self._verified) > MAX_VERIFIED:
            self._verified.popitem(last=False)
        return record

    def count_lookups(self, key_hash: bytes, packed: bytes) -> int:
        """Returns how many keys `verify` has to hash before it finds the one of this hash; 0 if it knows them."""
        if key_hash in self._keys or key_hash in self._shard_keys:
            return 0
        try:
            record, _ = read_unverified(_unpack_value(packed, bytes))
        except ProtocolError:
            return 0
        is_searched = (record.peer, type(record), record.span) in self._searched
        return 0 if is_searched else MAX_SHARD_BITS * len(record.span)

    def _find_shard_key(self, key_hash: bytes, packed: bytes) -> str:
        with contextlib.suppress(ProtocolError):
            # The signature comes first: a record of nobody is not worth the search.
            record = read_signed(_unpack_value(packed, bytes), self.run)
            if key := self._shard_keys_of(record).get(key_hash):
                self._shard_keys[key_hash] = key
                if len(self._shard_keys) > MAX_SHARD_KEYS:
                    self._shard_keys.popitem(last=False)
                return key
        raise ProtocolError("wrong-run", "The key is not that of any record of this run.")

    def _shard_keys_of(self, record: Record) -> dict[bytes, str]:
        about = record.peer, type(record), record.span
        if (known := self._searched.get(about)) is not None:
            return known
        bits = shard_bits(shard_hash(self.run, record.peer), MAX_SHARD_BITS)
        keys = [
            record_key(self.run, type(record), stage, bits[:depth])
            for depth in range(1, MAX_SHARD_BITS + 1)
            for stage in record.span.stages
            if stage < self._stages
        ]
        found = self._searched[about] = {dht_id_of(key): key for key in keys}
        if len(self._searched) > MAX_SEARCHED:
            self._searched.popitem(last=False)
        return found


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """Stores records for hivemind's node; a key keeps up to MAX_KEY_RECORDS, of the peers with the smallest hashes.

    No record replaces one of the same peer that expires later.
    """

    def __init__(self, run: RunId, maxsize: int | None = None) -> None:
        """maxsize: maximum number of keys, beyond which a new one replaces another; None for MAX_STORED_KEYS."""
        super().__init__(maxsize=maxsize)
        self._run = run

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Stores one peer's record, or each record of a dictionary by peer. Returns whether all were stored.

        subkey: the peer whose record `value` is; None for a dictionary. Stores nothing of any other value, and no
        record that `store_subkey` refuses.
        """
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        if not isinstance(value, DictionaryDHTValue):
            return False
        stored = [self.store_subkey(key, peer, *entry) for peer, entry in value.items()]
        return all(stored)

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Stores one peer's record; returns whether it did. If the key is full, the record of the greatest hash goes.

        Refuses a record that is expired or expires no later than the peer's last one, whose peer has a greater hash
        than all peers of a full key, or whose key is new while there are MAX_STORED_KEYS.
        """
        present = self.get(key)
        if present is None:
            has_room = len(self.data) < MAX_STORED_KEYS
            return has_room and bool(super().store_subkey(key, subkey, value, expiration_time))
        known = present.value.get(subkey)
        if known is not None and known.expiration_time >= expiration_time:
            return False
        if known is None and len(present.value) >= MAX_KEY_RECORDS:
            last = max((peer for peer, _ in present.value.items()), key=self._hash)
            if self._hash(subkey) >= self._hash(last):
                return False
            del present.value[last]
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def bytes_under(self, key: Any) -> int:
        """Returns the total size in bytes of the records under a key; 0 without any."""
        present = self.data.get(key)
        return 0 if present is None else sum(len(entry.value) for entry in present.value.data.values())

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yields nothing: hivemind hands these items to a node that it meets.

        Each publisher stores its records itself, again every few seconds, so that no node has to trust or pass on the
        records of others; otherwise a stranger that makes up many nodes would have this one send everything each time.
        """
        return iter(())

    def keep_only(self, is_kept: Callable[[PeerId], bool]) -> None:
        """Deletes the records of all peers for which `is_kept` returns False."""
        for entry in self.data.values():
            refused = [peer for peer, _ in entry.value.items() if not is_kept(PeerId(peer))]
            for peer in refused:
                del entry.value[peer]

    def _hash(self, peer: str) -> int:
        return peer_hash(self._run, PeerId(peer))


def dht_id_of(key: str) -> bytes:
    """Returns the hash under which nodes of the DHT know a record's key."""
    return hashlib.sha1(pack(key), usedforsecurity=False).digest()  # as DHTID.generate, in a third of its time


def _unpack_value(packed: bytes, kind: type) -> Any:
    value = unpack(packed, MAX_RECORD_BYTES + _PACKING_BYTES, "bad-record")
    if not isinstance(value, kind):
        raise ProtocolError("bad-record", f"A DHT entry is not {kind.__name__}.")
    return value
