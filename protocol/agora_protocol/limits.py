"""Every number that two peers must agree on, or that bounds what a stranger's bytes can cost.

SPEC.md quotes them all; a test compares the two.
"""

from typing import Final

PROTOCOL_VERSION: Final = 1
OLDEST_PROTOCOL_VERSION: Final = 1  # that this version can still speak
PROTOCOL_NAME: Final = "/agora/1"

# Frames
FRAME_MAGIC: Final = 0xA6
PREFIX_BYTES: Final = 16
MAX_HEADER_BYTES: Final = 65_536  # of every frame but an answer
# An answer may carry a manifest, amendments or a status: MAX_STATUS_BYTES + 4096.
MAX_ANSWER_HEADER_BYTES: Final = 1_052_672
MAX_PAYLOAD_BYTES: Final = 268_435_456
MAX_TENSORS: Final = 8
MAX_DIMENSIONS: Final = 6
MAX_DIMENSION: Final = 2_147_483_647

# Calls
MAX_CALLS_PER_CONNECTION: Final = 256
MAX_DEADLINE_MS: Final = 600_000
MAX_HINTS: Final = 256
HANDSHAKE_TIMEOUT_S: Final = 10
PING_AFTER_SILENCE_S: Final = 10
PING_ANSWER_S: Final = 5

# Texts and addresses
MAX_TEXT_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 64
MAX_ADDRESSES: Final = 16
MAX_ADDRESS_BYTES: Final = 216
MAX_INVITE_BYTES: Final = 8192
MAX_PORTS: Final = 4  # in one DialBack
MAX_SEEN_BYTES: Final = 64  # a direct TCP address, /ip4/... or /ip6/...
MAX_RELAYED_PEERS: Final = 1024  # for which one peer offers to relay

# Records in the DHT
MAX_RECORD_BYTES: Final = 20_480
MAX_RECORD_LIFETIME_S: Final = 600
CLOCK_TOLERANCE_S: Final = 60
MAX_KEY_RECORDS: Final = 64  # under one key: those of the peers with the smallest hashes
MAX_SHARD_BITS: Final = 16
RECENT_STEPS: Final = 16

# Admission
MAX_TICKETS: Final = 3  # in one proof: a delegate's, a bearer's, and that of the peer that uses it
MAX_PROOF_BYTES: Final = 1024
MAX_REVOCATION_BYTES: Final = 1536
MAX_SHARED_REVOCATIONS: Final = 12  # in one ShareRevocations, or one BanList record
MAX_REVOCATIONS: Final = 1024  # that a peer keeps of a run
SALT_BYTES: Final = 16

# Amendments
MAX_AMENDMENT_BYTES: Final = 6144
MAX_CHANGES_BYTES: Final = 4096  # the new values in one amendment
MAX_AMENDMENTS: Final = 64  # of a run, in one chain
MAX_RIVALS: Final = 4  # different amendments of one number that a peer keeps
MAX_KEPT_AMENDMENTS: Final = 128  # that a peer keeps of a run, and that one KnownAmendments has
MAX_SHARED_AMENDMENTS: Final = 8  # in one ShareAmendments

# Evaluations
MAX_EVALUATION_BYTES: Final = 1792
MAX_EVALUATION_VALUES: Final = 8  # metrics in one evaluation
MAX_SHARED_EVALUATIONS: Final = 10  # in one EvaluationList record
MAX_KEPT_EVALUATIONS: Final = 64  # that a peer keeps of a run
MAX_EVALUATIONS_OF_ISSUER: Final = 12  # of these, of one issuer

# Documents
MAX_MANIFEST_BYTES: Final = 65_536
MAX_CONFIG_BYTES: Final = 16_384  # the config.json of a base model, inside a manifest
MAX_WEIGHT_FILES: Final = 256
MAX_STATUS_BYTES: Final = 1_048_576
MAX_KEY_FILE_BYTES: Final = 4096

# The pipeline
MAX_STAGES: Final = 1024
MAX_SPAN_STAGES: Final = 256
MAX_REFERENCES: Final = 256  # log-probabilities in one message: rows of a microbatch of preference pairs
MAX_EPOCH_STATE: Final = 1024  # integers with which an origin sends its state of the epochs
MAX_METRICS: Final = 8  # sums that an answer reports in addition to the loss
BOUNDARY_BLOCK: Final = 64  # values of a token in a quantised boundary that share one scale

# Averaging and state
MAX_GOSSIPED_REPLICAS: Final = 64
SLICE_BLOCK: Final = 1024  # elements of a stage's weights that belong to one slice together
MAX_SLICES: Final = 1000  # slices into which inner steps may divide a stage's weights
PART_ELEMENTS: Final = 131_072  # elements of a small shard, which one reducer averages in one call
MAX_SMALL_PARTS: Final = 64  # of a gradient or slice; in more shards than these it is cut into larger ones
MAX_PART_ELEMENTS: Final = 524_288  # elements of the largest shard
QUANTISER_BLOCK: Final = 64  # elements of a quantised shard that share an exponent (int8) or a scale
STATE_CHUNK_BYTES: Final = 4_194_304
SKETCH_SUMS: Final = 16  # sums in the sketch of one array of a chunk
MAX_SKETCHED_CHUNKS: Final = 64  # in one GetSketches

# The base model
MAX_BASE_TENSORS: Final = 16_384  # in a tensor list
MAX_TENSOR_LIST_BYTES: Final = 16_777_216

# msgpack, from any source
MAX_DEPTH: Final = 16
MAX_ARRAY_ITEMS: Final = 1024
MAX_MAP_ITEMS: Final = 64
MAX_VALUES: Final = 4096  # keys and values together, where more than MAX_DEPTH containers are possible
