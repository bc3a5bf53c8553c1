"""The libp2p process, its streams and addresses. Only this folder imports hivemind; `net/dht` uses it through that."""
