"""Whether this machine can run Agora, before it joins."""
